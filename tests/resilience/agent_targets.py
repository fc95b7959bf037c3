"""What processes do in tests of the agent: each is a function that returns an exit code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from keepstep.config.schema import ResilienceConfig
from keepstep.core.ranks import from_environment
from keepstep.resilience.failure_cause import write_cause
from keepstep.resilience.heartbeat import Heartbeat


def _count(folder: Path) -> int:
    """How often this rank was started before."""
    rank = os.environ["RANK"]
    marks = len(list(folder.glob(f"{rank}-*")))
    (folder / f"{rank}-{marks}").touch()
    return marks


def _step(step: int) -> None:
    ranks = from_environment()
    Heartbeat(ranks.heartbeat_file, ranks.local_rank, ResilienceConfig()).stepped(step)


def killed_twice(words: list[str]) -> int:
    """Rank 1 is killed in its first two attempts; each gets one step further."""
    before = _count(Path(words[0]))
    _step(before)
    if os.environ["RANK"] == "1" and before < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def never_gets_anywhere(words: list[str]) -> int:
    _count(Path(words[0]))
    return 1


def refuses(words: list[str]) -> int:
    from keepstep.core.errors import DivergedError

    _count(Path(words[0]))
    write_cause(DivergedError("the loss is nan", "lower the rate"), 0)
    return 1


def leaves_a_helper(words: list[str]) -> int:
    """Starts a process that would outlive it, and is killed in its first attempt."""
    if _count(Path(words[0])) == 0:
        import subprocess

        helper = subprocess.Popen(["sleep", "600"])
        (Path(words[0]) / "helper").write_text(str(helper.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def stands_still(words: list[str]) -> int:
    """Makes progress, then stops; after the restart it ends."""
    ranks = from_environment()
    heartbeat = Heartbeat(ranks.heartbeat_file, ranks.local_rank, ResilienceConfig(hang_s=2))
    for step in range(4):
        heartbeat.stepped(step)
    if _count(Path(words[0])) == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def stops_on_request(words: list[str]) -> int:
    from keepstep.resilience.signals import stop_on_signals

    with stop_on_signals() as flag:
        (Path(words[0]) / f"ready-{os.environ['RANK']}").touch()
        while not flag.requested:
            time.sleep(0.01)
    return 75


def goes_on_without_the_unfit(words: list[str]) -> int:
    """Node 1 finds its hardware broken; node 0 loses its peer, and ends well once it is alone."""
    from keepstep.core.errors import HardwareError

    left = Path(words[0]) / "left"
    if os.environ["WORLD_SIZE"] == "1":
        # On a busy machine node 0 may start alone: its agent ends this attempt when node 1 arrives.
        while not left.exists():
            time.sleep(0.01)
        return 0
    if words[1] == "1":
        write_cause(HardwareError("a GPU has fallen off the bus"), int(os.environ["RANK"]))
        left.touch()
        return HardwareError.exit_code
    while not left.exists():
        time.sleep(0.01)
    write_cause(RuntimeError("Connection closed by peer"), int(os.environ["RANK"]))
    return 1


def announces(words: list[str]) -> int:
    _count(Path(words[0]))
    return 0


def finds_storage_broken(words: list[str]) -> int:
    import errno

    _count(Path(words[0]))
    write_cause(OSError(errno.EIO, "Input/output error"), 0)
    return 1


def fills_a_file(words: list[str]) -> int:
    """Needs a megabyte in the second folder; on a full disk it fails as a run would."""
    _count(Path(words[0]))
    try:
        with (Path(words[1]) / "state").open("wb") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        write_cause(error, 0)
        return 1
    return 0


def saves_slowly(words: list[str]) -> int:
    """Like a trainer with a checkpoint writer at work, which ignores stop signals. Its save takes until `asked_twice`
    is there, and three seconds more."""
    import subprocess
    import sys

    folder = Path(words[0])
    writer = (
        "import os, signal, sys, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "open(sys.argv[1] + '/writing', 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '/asked_twice'): time.sleep(0.02)\n"
        "time.sleep(3)\n"
        "open(sys.argv[1] + '/saved', 'w').close()\n"
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", writer, str(folder)])
    time.sleep(600)
    return 0


def loses_its_scratch_folder(words: list[str]) -> int:
    """A cleaner of temporary files comes by, then a crash; after the restart there must be a place again."""
    import shutil

    store = Path(os.environ["KEEPSTEP_STORE_FILE"])
    if _count(Path(words[0])) == 0:
        shutil.rmtree(store.parent)
        os.kill(os.getpid(), signal.SIGKILL)
    store.touch()
    return 0


def hangs_and_will_not_stop(words: list[str]) -> int:
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "0.5"
    return waits_for_others(words)


def waits_for_others(words: list[str]) -> int:
    """Before its first heartbeat, in code that no signal interrupts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark = Path(words[0]) / "pid.new"
    mark.write_text(str(os.getpid()))
    mark.rename(mark.with_name("pid"))
    while True:
        time.sleep(60)


def one_waits_for_data(words: list[str]) -> int:
    """Node 0 waits for data longer than a step may take, and node 1 silently for node 0; started again, it fails."""
    folder, node = Path(words[0]), words[1]
    if _count(folder):
        return 1
    ranks = from_environment()
    heartbeat = Heartbeat(ranks.heartbeat_file, ranks.local_rank, ResilienceConfig(hang_s=8))
    for step in range(4):
        heartbeat.stepped(step)
    came = folder / "came"
    if node == "0":
        for _ in range(30):
            heartbeat.waiting()
            time.sleep(0.5)
        came.touch()
    while not came.exists():
        time.sleep(0.05)
    return _leaves_after_the_other(node)


def _leaves_after_the_other(node: str) -> int:
    """Node 0 holds the meeting point, and the other may still be reading there what was agreed."""
    time.sleep(5 if node == "0" else 0)
    return 0


def one_says_nothing(words: list[str]) -> int:
    """As above, but node 0 does not say that it waits, as if it hung; started again, both end well."""
    folder, node = Path(words[0]), words[1]
    if _count(folder):
        return _leaves_after_the_other(node)
    ranks = from_environment()
    heartbeat = Heartbeat(ranks.heartbeat_file, ranks.local_rank, ResilienceConfig(hang_s=4))
    for step in range(4):
        heartbeat.stepped(step)
    while node:
        time.sleep(0.05)
    return 1


class SlowToArrive(str):
    """An argument that takes its time where a new process reads it, as a worker's on a busy machine does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive_late, (str(self),)


def _arrive_late(text: str) -> str:
    time.sleep(1.0)
    return text


def never_stops_by_itself(words: list[str]) -> int:
    (Path(words[0]) / "started").touch()
    time.sleep(20)
    return 0
