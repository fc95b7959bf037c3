"""Two hosts on one machine: two network namespaces and a link between them that can be cut. Needs root."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keepstep.chaos.experiment import (
    Experiment,
    Strike,
    UnavailableError,
    kill_session,
    release_when_all_are_back,
    wait_for_replacement,
    wait_for_step,
)
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.resilience.fault_injection import to_environment

PORT = 29511
CUT_S = 12.0
SPLIT_S = 8.0
"""Longer than replicas wait for a node that says nothing."""
HANG_S = 5.0
RESTARTS = 8


def survive_words(experiment: Experiment) -> list[str]:
    """The overrides of a run whose replicas survive each other; there are as many as the processes make."""
    groups = ["parallel.replicate=-1"] if experiment.replica_size > 1 else []
    return ["reproducible=elastic", "resilience.survive=true", *groups]


class TwoHosts:
    """Start an agent on each, cut the link, kill a host."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """`environment` is that of the agents, in addition."""
        self._log, self._more = log, environment
        self._tag = f"kc{os.getpid() % 100000}"
        self._net = f"10.{140 + os.getpid() % 90}.{os.getpid() // 90 % 250}"
        self._secret = secrets.token_hex(16)
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
            **self._more,
            "KEEPSTEP_HEAD": f"{self._net}.1",
            "KEEPSTEP_PORT": str(PORT),
            RENDEZVOUS_SECRET: self._secret,
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
        """Kill all processes of a host at the same moment."""
        agent = self.agents.pop(host)
        kill_session(agent.pid)
        agent.wait()

    def set_link(self, state: str) -> None:
        """Let packets pass between the hosts (`up`), or drop them all (`down`)."""
        _ip("-n", self.spaces[1], "link", "set", self.spaces[1], state)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code of the run: the worst of both hosts; None where one did not end in time."""
        deadline = time.monotonic() + timeout_s
        try:
            codes = [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            return None
        return max(codes, key=abs)


def lose_network(experiment: Experiment) -> Strike:
    """Cut the link for some seconds."""

    def cut(hosts: TwoHosts) -> None:
        hosts.set_link("down")
        time.sleep(CUT_S)
        hosts.set_link("up")

    return _run(experiment, "lost-network", cut)


def lose_host(experiment: Experiment) -> Strike:
    """Kill a host and start a new one in its place."""

    def replace(hosts: TwoHosts) -> None:
        hosts.kill(1)
        words = [*experiment.run_words("lost-host"), f"resilience.hang_s={HANG_S}"]
        hosts.start(1, experiment.processes // 2, words)

    return _run(experiment, "lost-host", replace)


def split_network(experiment: Experiment) -> Strike:
    """Cut the link between replicas that survive: those without the coordinator stop, and join the others later."""

    if experiment.processes % (2 * experiment.replica_size):
        raise UnavailableError("two hosts need an even number of replicas")
    kind = "split-network"

    def cut(hosts: TwoHosts) -> None:
        hosts.set_link("down")
        time.sleep(SPLIT_S)
        hosts.set_link("up")
        release_when_all_are_back(experiment, hosts.agents[0], kind)

    marks = experiment.folder / "marks" / kind
    marks.mkdir(parents=True, exist_ok=True)
    # From the step at which the network splits, so that the run is not over before the hosts see each other again.
    wait = wait_for_replacement(experiment, kind, experiment.middle)
    return _run(experiment, kind, cut, survive_words(experiment), to_environment([wait], marks))


def _run(
    experiment: Experiment,
    name: str,
    strike: Callable[[TwoHosts], None],
    overrides: Sequence[str] = (f"resilience.hang_s={HANG_S}",),
    environment: Mapping[str, str] | None = None,
) -> Strike:
    if experiment.processes % 2:
        raise UnavailableError("two hosts need an even number of processes")
    experiment.folder.mkdir(parents=True, exist_ok=True)
    with TwoHosts(experiment.log(name), environment or {}) as hosts:
        for host in (0, 1):
            hosts.start(host, experiment.processes // 2, [*experiment.run_words(name), *overrides])
        struck_at = None
        if wait_for_step(experiment.run_folder(name), experiment.middle, experiment.timeout_s):
            struck_at = time.time()
            strike(hosts)
        return struck_at, hosts.wait(experiment.timeout_s)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)
