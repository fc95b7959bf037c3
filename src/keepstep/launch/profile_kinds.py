"""What a profile of each system holds: a key with its default and its explanation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Environment = Literal["none", "azure-ndv5", "nebius"]


@dataclass(frozen=True)
class SlurmProfile:
    """A Slurm cluster: where to queue, on what, and in which software."""

    partition: str = ""
    """Partition. Empty means the cluster's default, here and below."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    reservation: str = ""
    """Reservation to run in."""
    time_limit: str = ""
    """Wall-clock limit in Slurm's format: 2-00:00:00."""
    nodes: int = 1
    """Nodes; `-N` wins."""
    min_nodes: int = 0
    """The run may start with this many nodes; 0 needs all."""
    gpus_per_node: int = 8
    """GPUs on each node; 0 trains on CPUs."""
    cluster: str = ""
    """What its nodes are, by a name of `keepstep plan --cluster list`: degrees that nobody gave are chosen for it."""
    processes_per_node: int = 0
    """Processes on each node; 0 means one per GPU."""
    cpus_per_node: int = 0
    """Cores on each node; 0 leaves it to Slurm."""
    memory: str = ""
    """Memory on each node in Slurm's format: 900G."""
    exclusive: bool = True
    """Whole nodes only."""
    exclude: tuple[str, ...] = ()
    """Nodes never to use."""
    options: tuple[str, ...] = ()
    """Further sbatch options, one each: --constraint=h100."""
    image: str = ""
    """Squash file or registry image for pyxis; empty runs without a container."""
    mounts: tuple[str, ...] = ()
    """Container mounts: /data:/data."""
    stage_image: str = ""
    """Folder on each node's local disk, to which the squash file is copied before the run. Empty: no copy."""
    venv: str = ""
    """A virtual environment on shared storage; empty means the Python that submits. Unused with an image."""
    environment: Environment = "none"
    """NCCL and UCX settings by machine."""
    sharp: bool = False
    """SHARP in-network reduction."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further environment variables."""
    secrets: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables whose values are read from files on the node: {HF_TOKEN: /home/me/.hf_token}."""
    warn_before_end_s: int = 300
    """Save and requeue this long before the time limit: longer than a step and a save. Slurm checks every 30 s."""
    max_restarts: int = 3
    """Restarts of the workers in place."""
    max_requeues: int = 100
    """Requeues after a saved stop, and new attempts without the nodes that failed."""


@dataclass(frozen=True)
class KubernetesProfile:
    """A Kubernetes cluster: where to queue, on what, and in which image."""

    context: str = ""
    """kubectl context; empty means the current one."""
    namespace: str = "default"
    """Namespace of the job and its storage."""
    job_kind: Literal["trainjob", "pytorchjob", "jobset", "volcano", "leaderworkerset"] = "trainjob"
    """trainjob (Kubeflow Trainer v2), pytorchjob (v1 operator), jobset, volcano or leaderworkerset."""
    image: str = "keepstep:0.1.0"
    """repository:tag."""
    pull_secrets: tuple[str, ...] = ()
    """Image pull secrets."""
    nodes: int = 2
    """Nodes; `-N` wins."""
    min_nodes: int = 0
    """The run continues with this many nodes while others are replaced; 0 needs all."""
    gpus_per_node: int = 8
    """GPUs on each node; 0 trains on CPUs, one process per node."""
    cluster: str = ""
    """What its nodes are, by a name of `keepstep plan --cluster list`: degrees that nobody gave are chosen for it."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource."""
    rdma_resource: str = "rdma/ib"
    """Name of the RDMA resource; empty requests none."""
    rdma_count: int = 0
    """RDMA devices for each node; 0 means as many as GPUs."""
    shm_size: str = "64Gi"
    """/dev/shm."""
    cpu: str = ""
    """Cores of each pod."""
    memory: str = ""
    """Memory of each pod."""
    pvc: str = "shared-blob-storage"
    """Claim of the shared volume."""
    mount_path: str = "/data"
    """Where the shared volume appears."""
    runs_path: str = "runs"
    """Run folders, below mount_path."""
    environment: Environment = "none"
    """NCCL and UCX settings by machine."""
    sharp: bool = False
    """SHARP in-network reduction."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further environment variables."""
    secrets: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables from Kubernetes Secrets: {HF_TOKEN: secret-name/key}."""
    queue: str = ""
    """Kueue LocalQueue; with `job_kind: volcano` a queue of Volcano."""
    required_topology: str = ""
    """Topology level, as a node label (Volcano: a tier's name): all pods must be in one domain of it."""
    preferred_topology: str = ""
    """The same as a preference; set one of the two."""
    grace_period_s: int = 600
    """Time to save after a stop request."""
    max_restarts: int = 3
    """Restarts of the workers in place."""
    backoff_limit: int = 3
    """Restarts of the whole job after failures."""
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    """Node labels to run on."""
    service_account: str = ""
    """Service account of the pods."""
    priority_class: str = ""
    """Priority class of the pods."""
    privileged: bool = False
    """Run privileged: needed only by some RDMA set-ups without a device plugin."""
    tensorboard: bool = True
    """Deploy TensorBoard and its Service with the run."""
    tensorboard_service: str = "tensorboard"
    """Name of that Service; only one run of a namespace can use it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Further values of the chart that have no key here: {localDisk: {kind: hostPath}}."""


@dataclass(frozen=True)
class SshProfile:
    """A few machines without a scheduler, on which this user has an account."""

    hosts: tuple[str, ...] = ()
    """[user@]host[:port], as in ~/.ssh/config. The first one hosts the rendezvous; `-N` takes the first N."""
    user: str = ""
    """User on hosts without one; empty leaves it to ssh."""
    options: tuple[str, ...] = ()
    """Further options of ssh, one each: IdentityFile=/home/me/.ssh/cluster."""
    folder: str = ""
    """Working folder on every host, on storage that they share; empty means this folder."""
    python: str = ""
    """The Python with keepstep on every host: /shared/env/bin/python; empty means this one."""
    min_nodes: int = 0
    """The run continues with this many hosts when others fail; 0 needs all."""
    gpus_per_node: int = 8
    """GPUs on each host; 0 trains on CPUs."""
    processes_per_node: int = 0
    """Processes on each host; 0 means one per GPU."""
    environment: Environment = "none"
    """NCCL and UCX settings by machine."""
    sharp: bool = False
    """SHARP in-network reduction."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further environment variables: {NCCL_SOCKET_IFNAME: eth0}."""
    secrets: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables whose values are read from files on the host: {HF_TOKEN: /home/me/.hf_token}."""
    max_restarts: int = 3
    """Restarts of the workers in place."""

    @property
    def nodes(self) -> int:
        """Nodes where `-N` names no number."""
        return len(self.hosts)


@dataclass(frozen=True)
class SkyProfile:
    """Machines that SkyPilot finds in a cloud, in one of several, or on Kubernetes."""

    infra: str = ""
    """Where: aws, aws/us-east-1, k8s/my-context; empty lets SkyPilot choose."""
    accelerators: str = "H100:8"
    """GPUs of each node, TYPE:COUNT; empty trains on CPUs."""
    nodes: int = 1
    """Nodes; `-N` wins."""
    min_nodes: int = 0
    """The run continues with this many nodes when others fail; 0 needs all."""
    use_spot: bool = False
    """Spot machines, which are cheaper and may be taken away at any time."""
    image: str = ""
    """Docker image, repository:tag; empty means SkyPilot's machine image."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Further resources of the task: {disk_size: 500, network_tier: best}."""
    workdir: str = ""
    """Folder of this machine that is copied to every node."""
    file_mounts: Mapping[str, Any] = field(default_factory=dict)
    """Buckets and files: {/runs: {source: "s3://my-bucket/runs", mode: MOUNT}}."""
    setup: str = "pip install keepstep"
    """Commands that run once on each node before the run."""
    environment: Environment = "none"
    """NCCL and UCX settings by machine."""
    sharp: bool = False
    """SHARP in-network reduction."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further environment variables."""
    secrets: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables that have their values from variables here: {HF_TOKEN: HF_TOKEN}."""
    max_restarts: int = 3
    """Restarts of the workers in place."""
    max_recoveries: int = 3
    """New machines after a failed run; after a preemption there is no limit."""
    strategy: str = ""
    """SkyPilot's recovery strategy: FAILOVER or EAGER_NEXT_REGION; empty means its default."""

    @property
    def gpus_per_node(self) -> int:
        """The count of TYPE:COUNT."""
        return int(self.accelerators.partition(":")[2] or 1) if self.accelerators else 0
