"""`--on ssh`: a run on two hosts through real sshd servers, and what is refused before anything is started."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.core.errors import ConfigError
from keepstep.core.ranks import RENDEZVOUS_SECRET
from keepstep.launch.job import load_record
from keepstep.launch.profiles import load_hosts, split_host
from keepstep.launch.ssh import _overall
from keepstep.launch.submit import state as job_state
from tests.launch.ssh_hosts import SOURCES, SshHosts, ssh_hosts

TINY = [
    "model=mpt-tiny", "model.vocab=512", "model.seq_len=32", "data=synthetic", "global_batch=4", "microbatch=2",
    "checkpoint.interval=1000ba", "evaluate.at_end=false", "observe.tensorboard=false", "compute.device=cpu",
    "compute.threads=1", "max_duration=100000ba",
]  # fmt: skip
LIMIT_S = 600


def wait(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def state(folder: Path) -> str:
    return job_state(load_record(folder / "runs", "pair"))


@contextmanager
def started(hosts: SshHosts, output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`keepstep train --on ssh`; at the end no agent is left over, whatever failed."""
    command = [sys.executable, "-m", "keepstep", "train", *words, "--on", f"ssh:{hosts.profile()}"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=hosts.folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for lock in hosts.folder.glob("runs/*/job/node-*.lock"):
            if not lock.with_suffix(".exit").exists():
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(lock.read_text()), signal.SIGKILL)


def agent_secret(folder: Path) -> str:
    """The secret that an agent got, from its first environment."""
    pid = (folder / "runs/pair/job/node-0.lock").read_text()
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(value.partition("=")[2] for value in variables if value.startswith(f"{RENDEZVOUS_SECRET}="))


def command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)


@pytest.mark.slow
def test_two_hosts_train_survive_a_cut_connection_and_stop_with_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with ssh_hosts(tmp_path) as hosts, started(hosts, tmp_path / "output", "name=pair", *TINY) as process:

        def printed(pattern: str) -> bool:
            return bool(re.search(pattern, (tmp_path / "output").read_text())) or process.poll() is not None

        wait(lambda: printed(r"\[[^]]*\] step [1-9]"), "a step, printed with its host")
        secret = agent_secret(tmp_path)
        assert len(secret) == 64
        assert secret not in command_lines()
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert secret.encode() not in path.read_bytes(), path

        hosts.cut(1)
        wait(lambda: printed(re.escape(f"[{hosts.names[1]}] connection lost")), "a report of the lost connection")
        wait(lambda: printed(re.escape(f"[{hosts.names[1]}] connected again")), "a new connection")
        assert state(tmp_path) == "running"

        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75, (tmp_path / "output").read_text()
        output = (tmp_path / "output").read_text()
        assert re.search(r"\] stopped on request after step \d+, saved", output)
        assert list(tmp_path.glob("runs/pair/checkpoints/step_*/_SUCCESS"))
        assert state(tmp_path) == "stopped"

        # Again, without this terminal; it stops on request before it needs to have trained.
        assert main(["resume", "pair"]) == 0
        assert main(["stop", "pair"]) == 0
        wait(lambda: state(tmp_path) != "running", "the end of the second attempt")
        assert state(tmp_path) == "stopped"
        capsys.readouterr()
        assert main(["logs", "pair"]) == 0
        assert re.search(r"\] stopped on request after step \d+, saved", capsys.readouterr().out)


def test_dry_run_prints_commands_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "name=a", "model=mpt-tiny", "data=demo", "global_batch=128", "--on", "ssh:me@gpu1,gpu2:2222"]
    assert main([*words, "--dry-run"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(f"-l me gpu1 'cd {tmp_path} && exec {sys.executable} -m keepstep launch host'")
    assert "-p 2222 gpu2 " in second
    assert "nodes: '2:2'" in rest or "nodes: 2:2" in rest
    assert RENDEZVOUS_SECRET not in "\n".join(rest)
    assert main([*words, "global_batch=192", "-N", "3", "--dry-run"]) == 2
    assert "-N is 3, but there are 2 hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-oProxyCommand=x", "a host is"),
        ("a,,b", "a host is"),
        ("a,a", "twice"),
        ("", "a host is"),
        ("a b", "a host is"),
    ],
)
def test_hosts_that_ssh_would_misread_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hosts(text)


def test_host_is_split_into_user_name_and_port() -> None:
    assert split_host("me@gpu-1.local:22") == ("me", "gpu-1.local", "22")
    assert split_host("[fe80::1]:22") == ("", "fe80::1", "22")


def test_unreachable_host_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.chdir(tmp_path)
    words = ["train", "name=a", "model=mpt-tiny", "data=demo", "global_batch=128", "--on", "ssh:gpu1"]
    assert main(words) == 5
    error = capsys.readouterr().err
    assert "gpu1: Permission denied (publickey)." in error
    assert "hint: ssh gpu1 must work without a password: ssh-copy-id gpu1" in error


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([75, 75], 75), ([75, 0], 75), ([1, 75], 1), ([5, 0], 0), ([5, 75], 5)]
)
def test_exit_code_of_a_run_follows_from_those_of_its_hosts(codes: list[int], code: int) -> None:
    assert _overall(codes) == code


def test_order_from_nobody_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["launch", "host"]) == 2
    assert "standard input is not an order" in capsys.readouterr().err
