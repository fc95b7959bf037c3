"""Profiles: what a cluster is like, written once as YAML and named by `--on slurm:NAME` or `--on k8s:NAME`.

A name is looked for as NAME.yaml in $KEEPSTEP_PROFILES, ./profiles and ~/.config/keepstep/profiles, then among those
that come with keepstep; a path is taken as it is.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import yaml

from keepstep.config.values import Misfit, convert, nearest, shown
from keepstep.core.errors import ConfigError, KeepstepError, UsageError
from keepstep.core.home import home_folder
from keepstep.launch.quoting import check_variables

WARNED_EARLY_S = 60
"""Slurm looks at time limits every 30 s, and warns up to a minute early."""
Environment = Literal["none", "azure-ndv5", "nebius"]


@dataclass(frozen=True)
class SlurmProfile:
    """A Slurm cluster: where to queue, on what, and in which software."""

    partition: str = ""
    """Partition; empty takes the cluster's default. Likewise below."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    reservation: str = ""
    """Reservation to run in."""
    time_limit: str = ""
    """Wall-clock limit as Slurm writes it: 2-00:00:00."""
    nodes: int = 1
    """Nodes; `-N` wins."""
    min_nodes: int = 0
    """The run may start with this many where not all are free; 0 needs all of them."""
    gpus_per_node: int = 8
    """GPUs on each node; 0 trains on CPUs."""
    processes_per_node: int = 0
    """Processes on each node; 0 means one a GPU."""
    cpus_per_node: int = 0
    """Cores on each node; 0 leaves it to Slurm."""
    memory: str = ""
    """Memory on each node as Slurm writes it: 900G."""
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
    """Folder on each node's own disk; the squash file is copied there once a node before the run. Empty: no copy."""
    venv: str = ""
    """A virtual environment on shared storage; empty takes the Python that submits. Unused with an image."""
    environment: Environment = "none"
    """NCCL and UCX settings by machine."""
    sharp: bool = False
    """SHARP in-network reduction."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further environment variables."""
    secrets: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables whose values are read on the node, each from its file: {HF_TOKEN: /home/me/.hf_token}."""
    warn_before_end_s: int = 300
    """Save and requeue this long before the time limit; longer than a step and a save. Slurm looks every 30 s."""
    max_restarts: int = 3
    """Restarts of the workers in place."""
    max_requeues: int = 100
    """Requeues after a saved stop, and new attempts without the nodes that failed."""


@dataclass(frozen=True)
class KubernetesProfile:
    """A Kubernetes cluster: where to queue, on what, and in which image."""

    context: str = ""
    """kubectl context; empty takes the current one."""
    namespace: str = "default"
    """Namespace of the job and its storage."""
    job_kind: Literal["trainjob", "pytorchjob", "jobset"] = "trainjob"
    """trainjob (Kubeflow Trainer v2), pytorchjob (v1 operator) or jobset (no operator but its own)."""
    image: str = "keepstep:0.1.0"
    """repository:tag."""
    pull_secrets: tuple[str, ...] = ()
    """Image pull secrets."""
    nodes: int = 2
    """Nodes; `-N` wins."""
    min_nodes: int = 0
    """The run goes on with this many while others are replaced; 0 needs all of them."""
    gpus_per_node: int = 8
    """GPUs on each node; 0 trains on CPUs, one process a node."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource."""
    rdma_resource: str = "rdma/ib"
    """Name of the RDMA resource; empty asks for none."""
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
    """Kueue LocalQueue."""
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
    """Some RDMA set-ups without a device plugin need it; nothing else does."""
    tensorboard: bool = True
    """A TensorBoard Deployment and Service beside the run."""
    tensorboard_service: str = "tensorboard"
    """Name of that Service; one run of a namespace can have it."""


Profile = TypeVar("Profile", SlurmProfile, KubernetesProfile)
_SYSTEMS: Mapping[type, str] = {SlurmProfile: "slurm", KubernetesProfile: "k8s"}


def load_profile(kind: type[Profile], name: str) -> Profile:
    """Find, read and check a profile; an empty name is all defaults. Every problem is reported at once."""
    if not name:
        return kind()
    place, text = _find(_SYSTEMS[kind], name)
    try:
        content, written = yaml.safe_load(text) or {}, yaml.load(text, _AsWritten) or {}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{place} is not YAML: {error}", "keepstep launch profiles prints one to start from"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must be keys and values", "partition: gpu")
    # YAML takes 12:00:00 for a number of seconds, 0123 for 83 and no for a truth value: texts stay as they are written.
    texts = [name for name, hint in get_type_hints(kind).items() if _is_text(hint)]
    content = {name: written[name] if name in texts else content.get(name) for name in written}
    return _build(kind, content, place)


class _AsWritten(yaml.SafeLoader):
    """Every value as the text it is; only what is empty is nothing."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the library has it
        first: [pair for pair in found if pair[0].rpartition(":")[2] in ("null", "merge")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _is_text(hint: Any) -> bool:
    """Whether a key takes texts: one, a list of them, or some by name."""
    return hint in (str, tuple[str, ...]) or get_origin(hint) is Mapping


def _build(kind: type[Profile], content: dict[str, Any], place: str) -> Profile:
    types = get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    problems: list[KeepstepError] = []
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in types:
            near = nearest(str(key), names)
            problems.append(
                KeepstepError(
                    f"{place} unknown key {key}",
                    f"did you mean {near}?" if near else "keepstep launch profiles lists every key",
                )
            )
            continue
        try:
            values[key] = convert(types[key], value)
            if key in ("variables", "secrets"):
                check_variables(values[key], f"{place} {key}:", secret=key == "secrets")
        except Misfit as misfit:
            problems.append(KeepstepError(f"{place} {key} is {shown(value)}, but it {misfit.rule}", misfit.hint))
        except UsageError as error:
            problems.append(error)
    if not problems:
        profile = kind(**values)
        problems = [KeepstepError(f"{place} {message}", hint) for message, hint in _broken(profile)]
        if not problems:
            return profile
    raise ConfigError(problems)


def _broken(profile: SlurmProfile | KubernetesProfile) -> list[tuple[str, str]]:
    broken = []
    for name in ("nodes", "min_nodes", "gpus_per_node", "max_restarts"):
        low = 1 if name == "nodes" else 0
        if getattr(profile, name) < low:
            broken.append((f"{name} is {getattr(profile, name)}, but it must be at least {low}", f"{name}: {low}"))
    for name, value in profile.variables.items():
        if not isinstance(value, str | int | float):
            broken.append((f"variables: {name} is {shown(value)}, but it must be a text or a number", f'{name}: ""'))
    if isinstance(profile, SlurmProfile):
        if profile.warn_before_end_s < 60:
            broken.append(("warn_before_end_s must be at least 60: Slurm's clock ticks every 30 s", "300"))
        limit_s = _limit_s(profile.time_limit)
        if limit_s is not None and limit_s < profile.warn_before_end_s + WARNED_EARLY_S:
            # It would save and requeue itself as soon as it has started, again and again.
            broken.append(
                (
                    f"time_limit is {profile.time_limit}, {limit_s} s, but Slurm may warn {WARNED_EARLY_S} s before "
                    f"warn_before_end_s ({profile.warn_before_end_s}): nothing is left to train in",
                    "a longer time_limit (30 is minutes, 12:00:00 hours), or a smaller warn_before_end_s",
                )
            )
        for name, path in profile.secrets.items():
            if not isinstance(path, str) or not path.startswith("/"):
                broken.append((f"secrets: {name} is {shown(path)}, but it must be the absolute path of a file", name))
    else:
        for name, reference in profile.secrets.items():
            if not isinstance(reference, str) or reference.count("/") != 1:
                broken.append(
                    (f"secrets: {name} is {shown(reference)}, but it must be SECRET/KEY", "huggingface/token")
                )
    return broken


def _limit_s(text: str) -> int | None:
    """A time limit as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for none or a wrong one."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    # Zero asks for no limit at all.
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _find(kind: str, name: str) -> tuple[str, str]:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        # The home of somebody whom this machine does not know: no such file, as for any other wrong path.
        with suppress(RuntimeError):
            path = path.expanduser()
        if not path.is_file():
            raise UsageError(f"there is no profile {name}", f"--on {kind}:NAME, or the path of a YAML file")
        return str(path), path.read_text()
    folders = [Path("profiles"), home_folder() / ".config/keepstep/profiles"]
    if os.environ.get("KEEPSTEP_PROFILES"):
        folders.insert(0, Path(os.environ["KEEPSTEP_PROFILES"]))
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            return str(path), path.read_text()
    shipped = resources.files("keepstep.launch") / "shipped" / kind
    known = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
    if name in known:
        return f"{kind}:{name}", (shipped / f"{name}.yaml").read_text()
    near = nearest(name, known)
    raise UsageError(
        f"there is no {kind} profile {name!r} in {', '.join(map(str, folders))} nor among ours ({', '.join(known)})",
        f"did you mean {near}?" if near else f"keepstep launch profiles {kind} > profiles/{name}.yaml",
    )


def commented(kind: type[SlurmProfile] | type[KubernetesProfile]) -> str:
    """A profile of defaults with every key explained, to start from."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = []
    for entry, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        assert isinstance(following, ast.Expr)
        text = ast.literal_eval(following.value)
        default = getattr(kind(), entry.target.id)
        default = list(default) if isinstance(default, tuple) else default
        lines += [
            f"# {text}",
            yaml.safe_dump({entry.target.id: default}, default_flow_style=False).strip(),
        ]
    return "\n".join(lines) + "\n"
