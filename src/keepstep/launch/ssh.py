"""ssh: start an agent on each of a few machines without a scheduler, follow them, and stop them.

The run's secret goes to each host on ssh's standard input. It is in no command line, no file and no record.
"""

from __future__ import annotations

import json
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from keepstep import __version__
from keepstep.core.errors import EXIT_DONE, EXIT_HARDWARE, EXIT_STOPPED, HardwareError, KeepstepError, UsageError
from keepstep.core.files import write_json
from keepstep.core.interrupts import ONE_REQUEST_S
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.launch.environments import variables_for
from keepstep.launch.job import ENDED, Job, JobRecord, absolute, record_path, require_answer
from keepstep.launch.profile_kinds import SshProfile
from keepstep.launch.profiles import split_host
from keepstep.launch.quoting import shell_word, shell_words
from keepstep.launch.ssh_host import MARK
from keepstep.resilience.signals import AgentSignals

_ANSWER_S = 180
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=4")
_NO_CONNECTION = 255
"""ssh's exit code; no keepstep command has it."""
_RECONNECT_S = 3.0
_GIVE_UP_S = 120.0
"""How long a host may stay unreachable when all others have ended."""


@dataclass(frozen=True)
class _Plan:
    """What is started, and where: everything but the secret. It is saved with the job's record."""

    hosts: list[str]
    """The first `nodes` of them are used."""
    nodes: int
    least: int
    options: list[str]
    folder: str
    python: str
    order: dict[str, Any]
    """What a host needs to know in order to start its agent."""
    offsets: tuple[int, ...] = ()
    """Where the last start begins in the log of each node."""

    def command(self, node: int) -> list[str]:
        user, name, port = split_host(self.hosts[node])
        # ssh takes the first value of an option: the profile's before ours.
        options = [word for option in (*self.options, *_OPTIONS) for word in ("-o", option)]
        options += [*(["-l", user] if user else []), *(["-p", port] if port else [])]
        remote = f"cd {shell_word(self.folder)} && exec {shell_word(self.python)} -m keepstep launch host"
        return ["ssh", "-T", *options, name, remote]


def _planned(job: Job, profile: SshProfile) -> _Plan:
    if job.nodes > len(profile.hosts):
        known = ",".join(profile.hosts)
        raise UsageError(f"-N is {job.nodes}, but there are {len(profile.hosts)} hosts: {known}", "name more hosts")
    least = job.fewest_nodes or job.nodes
    order = {
        "job_folder": str(record_path(job.folder).parent),
        "nodes": f"{least}:{job.nodes}",
        "processes": profile.processes_per_node or max(1, profile.gpus_per_node),
        "gpus": profile.gpus_per_node,
        "max_restarts": profile.max_restarts,
        "words": list(job.words),
        "config": job.config_text,
        "variables": variables_for(profile.environment, profile.sharp, profile.variables),
        "secrets": dict(profile.secrets),
    }
    hosts = [host if "@" in host or not profile.user else f"{profile.user}@{host}" for host in profile.hosts]
    folder, python = profile.folder or str(job.working_dir), profile.python or sys.executable
    return _Plan(hosts, job.nodes, least, list(profile.options), folder, python, order)


def render(job: Job, profile: SshProfile) -> str:
    """The command for each host, and what it gets on its standard input."""
    plan = _planned(job, profile)
    commands = [shell_words(plan.command(node)) for node in range(plan.nodes)]
    note = "# Standard input of each, as JSON. Added at the start: the rendezvous address and the run's secret."
    return "\n".join([*commands, note, yaml.safe_dump(plan.order, sort_keys=False, allow_unicode=True)])


def submit(job: Job, profile: SshProfile, profile_name: str) -> JobRecord:
    """Start an agent on every host; they do not need this process any more."""
    plan, path = _planned(job, profile), absolute(record_path(job.folder).parent) / "ssh.json"
    return job.submitted("ssh", profile_name, _start(plan, path), script=str(path))


def resume(record: JobRecord, exclude: Sequence[str] = ()) -> str:
    """Start the agents again, without the hosts named; returns the new attempt."""
    current = state(record)
    require_answer(record, current)
    if current not in ENDED:
        raise UsageError(f"run {record.name} is {current}", f"keepstep stop {record.name} first")
    plan = _load(record)
    hosts = [host for host in plan.hosts if host not in exclude and split_host(host)[1] not in exclude]
    nodes = min(plan.nodes, len(hosts))
    if nodes < plan.least:
        raise UsageError(f"the run needs {plan.least} hosts, but {len(hosts)} are left", "name more in the profile")
    order = {**plan.order, "nodes": f"{plan.least}:{nodes}"}
    return _start(replace(plan, hosts=hosts, nodes=nodes, order=order), Path(record.script))


def _start(plan: _Plan, path: Path) -> str:
    facts = _ask_all(plan, lambda _: {"action": "check"})
    for host, fact in zip(plan.hosts, facts, strict=False):
        if fact["version"] != __version__:
            message = f"{host} has keepstep {fact['version']}, this machine {__version__}"
            raise UsageError(message, "install the same version on all of them")
        if fact["gpus"] < plan.order["gpus"]:
            message = f"{host} has {fact['gpus']} GPUs, but gpus_per_node is {plan.order['gpus']}"
            raise UsageError(message, f"gpus_per_node: {fact['gpus']} in a profile (keepstep launch profiles ssh)")
    attempt = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    head = {"KEEPSTEP_HEAD": _head_address(plan), "KEEPSTEP_PORT": str(facts[0]["port"]), "KEEPSTEP_ATTEMPT": attempt}
    variables = {**plan.order["variables"], **head, RENDEZVOUS_SECRET: secrets.token_hex(32)}
    # Before the start: whatever happens then, the run can be found and stopped.
    write_json(path, asdict(replace(plan, offsets=tuple(fact["offset"] for fact in facts))))
    try:
        _ask_all(plan, lambda node: {"action": "start", "variables": {**variables, "PET_NODE_RANK": str(node)}})
    except KeepstepError:
        _send(plan, signal.SIGTERM)
        raise
    return attempt


def _head_address(plan: _Plan) -> str:
    """The address of the first host: other hosts do not know its name in our ~/.ssh/config."""
    command = ["ssh", "-G", *plan.command(0)[1:-1]]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in found.splitlines() if line.startswith("hostname "))


def _load(record: JobRecord) -> _Plan:
    return _Plan(**json.loads(Path(record.script).read_text()))


def _ask(plan: _Plan, node: int, question: Mapping[str, Any]) -> dict[str, Any]:
    """Send an order to a host and return its answer."""
    host, text = plan.hosts[node], json.dumps({**plan.order, "node": node, **question}).encode()
    options: dict[str, Any] = {"capture_output": True, "timeout": _ANSWER_S, "start_new_session": True}
    try:
        done = subprocess.run(plan.command(node), input=text, check=False, **options)
    except FileNotFoundError:
        raise UsageError("there is no ssh on this machine", "apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise HardwareError(
            f"{host} did not answer within {_ANSWER_S} s", f"try it yourself: ssh {host} true"
        ) from None
    if done.returncode == 0 and MARK in done.stdout:
        facts: dict[str, Any] = json.loads(done.stdout.rpartition(MARK)[2])
        return facts
    said = done.stderr.decode(errors="replace").strip() or f"it ended with {done.returncode}"
    if done.returncode == _NO_CONNECTION:
        raise HardwareError(f"{host}: {said}", f"ssh {host} must work without a password: ssh-copy-id {host}")
    remedy = f"{plan.folder}, and {plan.python} with keepstep, must be on every host: see folder and python"
    raise UsageError(f"{host}: {said}", remedy)


def _ask_all(
    plan: _Plan, question: Callable[[int], Mapping[str, Any]], *, patient: bool = False
) -> list[dict[str, Any]]:
    """The answers of all hosts. All their errors are raised together; with `patient` a silent host answers {}."""
    problems: list[KeepstepError] = []

    def ask(node: int) -> dict[str, Any]:
        try:
            return _ask(plan, node, question(node))
        except KeepstepError as error:
            problems.append(error)
            return {}

    with ThreadPoolExecutor(plan.nodes) as pool:
        answers = list(pool.map(ask, range(plan.nodes)))
    if problems and not patient:
        raise type(problems[0])("\n".join(problem.message for problem in problems), problems[0].hint)
    return answers


def _send(plan: _Plan, number: int) -> None:
    """Send a signal to every agent that can be reached; a stop request that reaches one stops the whole run."""
    answers = _ask_all(plan, lambda _: {"action": "signal", "signal": number}, patient=True)
    for host in [host for host, answer in zip(plan.hosts, answers, strict=False) if not answer]:
        print(f"warning: {host} does not answer", file=sys.stderr, flush=True)


def stop(record: JobRecord, immediately: bool) -> None:
    """Ask the run to save and stop; `immediately` ends it without a save."""
    current = state(record)
    if current in ENDED:
        raise UsageError(
            f"run {record.name} is not running: {current or 'it never started'}", "keepstep jobs lists all"
        )
    _send(_load(record), signal.SIGINT if immediately else signal.SIGTERM)
    if immediately:
        # The agent ends its processes without a save at the second Ctrl-C.
        time.sleep(1.5 * ONE_REQUEST_S)
        _send(_load(record), signal.SIGINT)


def state(record: JobRecord) -> str:
    """running, finished, stopped, failed or unreachable; empty where no agent was ever started."""
    answers = _ask_all(_load(record), lambda _: {"action": "state"}, patient=True)
    if any(answer.get("running") for answer in answers):
        return "running"
    if not all(answers):
        return "unreachable"
    codes = [answer["code"] for answer in answers if answer["code"] is not None]
    words = {EXIT_DONE: "finished", EXIT_STOPPED: "stopped", 130: "stopped", 143: "stopped"}
    return words.get(_overall(codes), "failed") if codes else ""


def log_text(record: JobRecord) -> str:
    """Everything the agents have printed so far."""
    lines: list[str] = []
    _Follower(_load(record), [0] * record.nodes, lines.append, to_the_end=False).run(None)
    return "\n".join([*lines, ""])


def follow(record: JobRecord, *, attached: bool) -> int:
    """Print the logs of all hosts until the run ends; `attached`: a stop request here is one for the run."""
    plan, signals = _load(record), AgentSignals() if attached else None
    offsets = plan.offsets if attached else [0] * plan.nodes
    with signals.handled() if signals else nullcontext():
        return _Follower(plan, offsets, lambda line: print(line, flush=True)).run(signals)


class _Follower:
    """Reads the logs of all hosts, one thread and one connection each; a lost connection is opened again."""

    def __init__(
        self, plan: _Plan, offsets: Sequence[int], write: Callable[[str], object], *, to_the_end: bool = True
    ) -> None:
        self._plan, self._offsets, self._write, self._to_the_end = plan, list(offsets), write, to_the_end
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lost_at: dict[int, float] = {}
        self._closed = threading.Event()

    def run(self, signals: AgentSignals | None) -> int:
        """Until every agent has ended; returns the run's exit code. Signals are forwarded to the agents."""
        for node in range(self._plan.nodes):
            threading.Thread(target=self._read, args=(node,), daemon=True).start()
        codes: dict[int, int] = {}
        forwarded, stopping = 0, False
        try:
            while len(codes) < self._plan.nodes:
                try:
                    node, code = self._ended.get(timeout=0.25)
                    # An agent that was still starting had nothing to save.
                    codes[node] = EXIT_STOPPED if stopping and code == 128 + signal.SIGTERM else code
                except queue.Empty:
                    self._give_up(codes)
                failed = sum(code not in (EXIT_DONE, EXIT_STOPPED) for code in codes.values())
                if self._to_the_end and not stopping and self._plan.nodes - failed < self._plan.least:
                    # The others would wait for this node until their rendezvous times out.
                    stopping = True
                    _send(self._plan, signal.SIGTERM)
                for number in signals.numbers[forwarded:] if signals else ():
                    if number == signal.SIGHUP:
                        return EXIT_DONE  # The terminal is gone. The run does not need it.
                    forwarded, stopping = forwarded + 1, True
                    print("asking all hosts to save and stop", file=sys.stderr, flush=True)
                    _send(self._plan, number)
        finally:
            self._closed.set()
            for process in list(self._processes.values()):
                process.terminate()
        return _overall(list(codes.values()))

    def _give_up(self, codes: dict[int, int]) -> None:
        missing, now = [node for node in range(self._plan.nodes) if node not in codes], time.monotonic()
        if codes and all(now - self._lost_at.get(node, now) > _GIVE_UP_S for node in missing):
            for node in missing:
                self._print(node, f"error: no connection for {_GIVE_UP_S:.0f} s, and the other hosts have ended")
                codes[node] = EXIT_HARDWARE

    def _read(self, node: int) -> None:
        while not self._closed.is_set():
            code, said = self._read_once(node)
            if code != _NO_CONNECTION or not self._to_the_end:
                for line in said.splitlines():
                    self._print(node, line)
                self._ended.put((node, code))
                return
            if node not in self._lost_at and not self._closed.is_set():
                self._lost_at[node] = time.monotonic()
                self._print(node, f"connection lost ({said.strip()}); the agent there runs on; connecting again")
            self._closed.wait(_RECONNECT_S)

    def _read_once(self, node: int) -> tuple[int, str]:
        """Read through one connection until it ends; returns ssh's exit code and what it said."""
        order = {**self._plan.order, "action": "follow", "node": node, "offset": self._offsets[node]}
        with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as said:
            question.write(json.dumps({**order, "to_the_end": self._to_the_end}).encode())
            question.seek(0)
            # In a session of its own: Ctrl-C in the terminal would end ssh.
            streams: dict[str, Any] = {"stdin": question, "stdout": subprocess.PIPE, "stderr": said}
            with subprocess.Popen(self._plan.command(node), start_new_session=True, **streams) as process:
                self._processes[node] = process
                self._copy(node, process.stdout or ())
            said.seek(0)
            return process.returncode, said.read().decode(errors="replace")

    def _copy(self, node: int, output: Iterable[bytes]) -> None:
        marked = False
        for line in output:
            if not marked:
                marked = line.endswith(MARK + b"\n")
                if marked and self._lost_at.pop(node, 0.0):
                    self._print(node, "connected again")
            elif line.endswith(b"\n"):
                # Half a line, where the connection broke, is read again.
                self._offsets[node] += len(line)
                self._print(node, line.decode(errors="replace").rstrip("\n"))

    def _print(self, node: int, line: str) -> None:
        self._write(f"[{self._plan.hosts[node]}] {line}")


def _overall(codes: Sequence[int]) -> int:
    """The run's exit code, from those of its agents in the order in which they ended."""
    if EXIT_DONE in codes and all(code in (EXIT_DONE, EXIT_HARDWARE) for code in codes):
        # A run that does not need all its nodes finished without the ones that failed.
        return EXIT_DONE
    return next((code for code in codes if code not in (EXIT_DONE, EXIT_STOPPED)), max(codes))
