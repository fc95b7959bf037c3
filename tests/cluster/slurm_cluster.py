"""A real Slurm on this machine: Debian's daemons, one network and host-name namespace a node, up in about a second.

Every node has its own cable to a bridge, so that a test can pull it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "sbatch")


def missing_parts() -> str:
    """Why a cluster cannot run here, or nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if absent:
        return (
            f"{', '.join(absent)} missing: run scripts/system-packages as root (apt-get install slurmctld slurmd ...)"
        )
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["ip", "netns", "add", f"ksprobe{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"ksprobe{os.getpid()}"], check=False)
    return ""


class SlurmCluster:
    """Start with `with SlurmCluster(folder) as cluster`; nodes are n1, n2, ..."""

    def __init__(self, folder: Path, nodes: int = 3, gpus: int = 2) -> None:
        self.folder, self.count, self.gpus = folder, nodes, gpus
        # Two test sessions on one machine must not share names, addresses or ports.
        self.tag = f"ks{os.getpid() % 100000}"
        self.net = f"10.{130 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.port = _free_port()
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> SlurmCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._network()
            self._munge()
            self._configure()
            self._start_daemon("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
            for name in self.names:
                self.start_node(name)
            self.wait(
                lambda: self.run("sinfo", "-h", "-o", "%T %D").split() == ["idle", str(self.count)], 30, "nodes idle"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "-u", "root"], env=self.environment, capture_output=True, check=False)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._ask("squeue", "-h"):
            time.sleep(0.2)
        for daemon in [*self.slurmds.values(), *reversed(self.daemons)]:
            daemon.send_signal(signal.SIGTERM)
        for daemon in [*self.slurmds.values(), *reversed(self.daemons)]:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for name in self.names:
            self._kill_processes(name)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / self._space(name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.tag], capture_output=True, check=False)

    # What a test does to the cluster ------------------------------------------------------------------------------

    def run(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        """A command as a user of the login node would type it; returns its output."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
        )
        if check:
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def keepstep(self, *words: str, cwd: Path, code: int = 0) -> str:
        """`keepstep WORDS` on the login node."""
        done = subprocess.run(
            [sys.executable, "-m", "keepstep", *words], env=self.environment, cwd=cwd, capture_output=True, text=True
        )
        assert done.returncode == code, f"{words} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self._ask("scontrol", "-o", "show", "job", job_id)))

    def wait_state(self, job_id: str, states: set[str], seconds: float = 90, log: Path | None = None) -> dict[str, str]:
        """Poll until the job is in one of the states (`sbatch -W` backs off to tens of seconds)."""
        try:
            self.wait(lambda: self.job(job_id).get("JobState") in states, seconds, f"job {job_id} in {states}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.job(job_id)}\n{log.read_text() if log else ''}") from None
        return self.job(job_id)

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll a condition."""
        started = time.monotonic()
        while not done():
            # A slow or busy machine is no failure: the limit only ends a test that hangs.
            patience_s = seconds * max(4.0, 4.0 * os.getloadavg()[0] / (os.cpu_count() or 1))
            assert time.monotonic() - started < patience_s, f"waited {patience_s:.0f} s for {what}"
            time.sleep(0.1)

    def set_node(self, name: str, state: str, reason: str = "test") -> None:
        """`scontrol update`."""
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", f"reason={reason}")

    def cable(self, name: str, up: bool) -> None:
        """Plug or pull the node's cable."""
        _ip("link", "set", f"{self.tag}{name}", "up" if up else "down")

    def lose(self, name: str) -> None:
        """The node loses its power: all its processes are gone at the same moment, and nobody is told."""
        self.cable(name, up=False)
        self._kill_processes(name)
        self.slurmds[name].wait()

    def throttle(self, name: str, rate: str | None) -> None:
        """Make the node's link slow both ways, or as fast as it was."""
        for where, device in (([], f"{self.tag}{name}"), (["-n", self._space(name)], "eth0")):
            subprocess.run(["tc", *where, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
            if rate:
                shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
                subprocess.run(
                    ["tc", *where, "qdisc", "add", "dev", device, "root", *shape], capture_output=True, check=True
                )

    def mount_read_only(self, name: str, folder: Path, read_only: bool) -> None:
        """Let one node, and no other, see a folder read-only."""
        inside = ["nsenter", "-t", str(self.slurmds[name].pid), "-m"]
        if read_only:
            subprocess.run([*inside, "mount", "--bind", str(folder), str(folder)], check=True)
            subprocess.run([*inside, "mount", "-o", "remount,bind,ro", str(folder)], check=True)
        else:
            subprocess.run([*inside, "umount", str(folder)], check=True)

    def start_node(self, name: str) -> None:
        """Start the node's slurmd in its own namespaces."""
        inside = (
            f"hostname {name}; exec slurmd -D -N {name} -f {self.folder}/slurm.conf -L {self.folder}/slurmd.{name}.log"
        )
        command = ["ip", "netns", "exec", self._space(name), "unshare", "--uts", "sh", "-c", inside]
        self.slurmds[name] = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)

    # Construction -------------------------------------------------------------------------------------------------

    def _kill_processes(self, name: str) -> None:
        inside = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True).stdout
        for pid in inside.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _space(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def address(self, name: str) -> str:
        """The node's address on the bridge."""
        return f"{self.net}.{11 + self.names.index(name)}"

    def _network(self) -> None:
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("addr", "add", f"{self.net}.1/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")
        hosts = "127.0.0.1 localhost\n" + f"{self.net}.1 {socket.gethostname()}\n"
        hosts += "".join(f"{self.address(name)} {name}\n" for name in self.names)
        for name in self.names:
            space, cable = self._space(name), f"{self.tag}{name}"
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", self.tag, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(hosts)

    def _munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        # munged wants every parent of its socket to be reachable by others.
        for parent in self.folder.parents:
            if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)
        self.folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/socket"]
        command += [f"--pid-file={folder}/pid", f"--log-file={folder}/log", f"--seed-file={folder}/seed"]
        self._start_daemon("munged", command)
        self.wait((folder / "socket").exists, 5, "munge socket")

    def _configure(self) -> None:
        devices = self.folder / "devices"
        devices.mkdir()
        for i in range(self.gpus):
            # Slurm wants device files; these swallow what is written to them.
            os.mknod(devices / f"gpu{i}", 0o20666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={devices}/gpu[0-{self.gpus - 1}]\n")
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={self.folder}/cgroup\n"
        )
        for name in ["state", *(f"spool.{name}" for name in self.names)]:
            (self.folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.address(name)} CPUs=4 RealMemory=8000 Gres=gpu:{self.gpus}"
            for name in self.names
        )
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={socket.gethostname()}({self.net}.1)
SlurmctldPort={self.port}
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={self.folder}/munge/socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool.%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={self.folder}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
SlurmdTimeout=10
MessageTimeout=5
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
        )

    def _start_daemon(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.err").open("wb")
        self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        log.close()

    def _ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
