"""Two hosts on one machine: a network namespace each, and a cable between them that can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from keepstep.launch.rehearsal import Stage, kill_session, wait_for_step

PORT = 29511
CUT_S = 12.0
HANG_S = 5.0
RESTARTS = 8


class UnavailableError(Exception):
    """A fault that cannot be played on this machine, with the reason."""


class TwoHosts:
    """Start agents on them, pull the cable, kill a host."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._tag = f"kc{os.getpid() % 100000}"
        self._net = f"10.{140 + os.getpid() % 90}.{os.getpid() // 90 % 250}"
        self.spaces = [f"{self._tag}a", f"{self._tag}b"]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> TwoHosts:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise UnavailableError("network namespaces need root and the program ip (apt: iproute2)")
        try:
            for space in self.spaces:
                _ip("netns", "add", space)
            _ip("link", "add", self.spaces[0], "type", "veth", "peer", "name", self.spaces[1])
            for host, space in enumerate(self.spaces):
                _ip("link", "set", space, "netns", space)
                _ip("-n", space, "address", "add", f"{self._net}.{host + 1}/24", "dev", space)
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "link", "set", space, "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise UnavailableError(f"no network namespaces here: {error.stderr.decode().strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self.agents):
            self.kill(host)
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def start(self, host: int, processes: int, words: Sequence[str]) -> None:
        """Start a host's agent."""
        environment = {
            **os.environ,
            "KEEPSTEP_HEAD": f"{self._net}.1",
            "KEEPSTEP_PORT": str(PORT),
            "PET_NODE_RANK": str(host),
            "GLOO_SOCKET_IFNAME": self.spaces[host],
        }
        launch = ["launch", "node", "--nodes", "2", "--processes", str(processes), "--max-restarts", str(RESTARTS)]
        command = ["ip", "netns", "exec", self.spaces[host], sys.executable, "-m", "keepstep", *launch, "--", "train"]
        with self._log.open("ab") as file:
            self.agents[host] = subprocess.Popen(
                [*command, *words], env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def kill(self, host: int) -> None:
        """All processes of a host are gone from one moment to the next."""
        agent = self.agents.pop(host)
        kill_session(agent.pid)
        agent.wait()

    def pull_cable(self) -> None:
        """Packets are lost from now on."""
        _ip("-n", self.spaces[1], "link", "set", self.spaces[1], "down")

    def plug_in(self) -> None:
        """The way back."""
        _ip("-n", self.spaces[1], "link", "set", self.spaces[1], "up")

    def wait(self, timeout_s: float) -> int | None:
        """The exit code of the run: the worst of both hosts; None where one did not end in time."""
        deadline = time.monotonic() + timeout_s
        try:
            codes = [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            return None
        return max(codes, key=abs)


def lose_network(stage: Stage) -> tuple[float | None, int | None]:
    """The cable is pulled for a while; returns when, and how the run ended."""
    with _running(stage, "lost-network") as hosts:
        struck_at = None
        if wait_for_step(stage.run_folder("lost-network"), stage.middle, stage.timeout_s):
            struck_at = time.time()
            hosts.pull_cable()
            time.sleep(CUT_S)
            hosts.plug_in()
        return struck_at, hosts.wait(stage.timeout_s)


def lose_host(stage: Stage) -> tuple[float | None, int | None]:
    """A host is killed, and a fresh one takes its place."""
    with _running(stage, "lost-host") as hosts:
        struck_at = None
        if wait_for_step(stage.run_folder("lost-host"), stage.middle, stage.timeout_s):
            struck_at = time.time()
            hosts.kill(1)
            hosts.start(1, stage.processes // 2, _words(stage, "lost-host"))
        return struck_at, hosts.wait(stage.timeout_s)


@contextmanager
def _running(stage: Stage, name: str) -> Iterator[TwoHosts]:
    if stage.processes % 2:
        raise UnavailableError("two hosts need an even number of processes")
    stage.folder.mkdir(parents=True, exist_ok=True)
    with TwoHosts(stage.folder / f"{name}.log") as hosts:
        for host in (0, 1):
            hosts.start(host, stage.processes // 2, _words(stage, name))
        yield hosts


def _words(stage: Stage, name: str) -> list[str]:
    return [*stage.name_words(name), f"resilience.hang_s={HANG_S}"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)
