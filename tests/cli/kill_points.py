"""Runs commands that write, each killed by SIGKILL at one change of a file after the other and then repeated.

    python -m tests.cli.kill_points FOLDER POINTS [NAME...]

Prints a line of JSON for each, by name: what the folder holds after an undisturbed command, and after each killed one
was repeated. Every command is forked from this process, so that torch is imported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "open")
COMMANDS = {
    "gc": ("trained", "ckpt gc run --keep 1 --yes"),
    "sharded": ("trained", "ckpt convert run out --to sharded --shards 2 --parity"),
    "dcp": ("trained", "ckpt convert run out --to dcp"),
    "safetensors": ("trained", "ckpt convert run out --to safetensors"),
    "export": ("trained", "export run --hf out"),
    "import": ("exported", "import hf --name imported --runs-dir ."),
    "merge": ("pairs", "data merge pairs --out merged"),
    "pipeline": ("raw", "data pipeline raw --out out --tokenizer tokenizer.json --into 2 --workers 1"),
    "dedup": ("raw", "data dedup raw --out unique.jsonl"),
}


class Killer:
    """An audit hook that counts changes below the working directory, and kills its process before one of them."""

    def __init__(self, point: int, log: Path) -> None:
        self._point, self._log, self._root = point, log, str(Path.cwd())
        self._owner, self._count = os.getpid(), 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or os.getpid() != self._owner or (event == "open" and not _writes(arguments)):
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = str(Path(os.fsdecode(arguments[0])).absolute())
        if not path.startswith(self._root + os.sep):
            return
        self._count += 1
        self._log.write_text(f"{self._count} {event} {os.path.relpath(path, self._root)}")
        if self._count == self._point:
            os.kill(self._owner, signal.SIGKILL)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def forked(work: Path, output: Path, action: Callable[[], int]) -> int:
    """The exit code of `action`, called in a fork with `work` as its directory; minus the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99
    try:
        os.chdir(work)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)
        code = action()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keepstep(command: str) -> int:
    """Run one command in this process."""
    from keepstep.cli.main import main

    return main(command.split())


def raw() -> int:
    Path("raw").mkdir()
    for number in range(3):
        rows = [json.dumps({"text": f"text {number} {line} and some more words"}) for line in range(40)]
        Path("raw", f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    return keepstep("data train-tokenizer raw --vocab 300 --out tokenizer.json")


def pairs() -> int:
    return raw() or keepstep("data build raw --out pairs --tokenizer tokenizer.json --workers 1 --task-per-file")


def trained() -> int:
    from tests.train.tiny_runs import run_here

    run_here(Path.cwd(), "max_duration=3ba", "checkpoint.interval=1ba", "checkpoint.keep=9")
    return 0


def exported() -> int:
    return trained() or keepstep("export run --hf hf")


def import_all(names: list[str]) -> None:
    """Import what a command needed, so that the next forks have it already: most of their time otherwise."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def content(work: Path) -> dict[str, str]:
    """Every file, with a hash."""
    files = (path for path in sorted(work.rglob("*")) if path.is_file())
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def try_command(root: Path, before: Path, command: str, points: int) -> dict[str, Any]:
    """Count the changes of an undisturbed command, then kill it before evenly spread ones, the last one included."""
    work, log, output = root / "work", root / "last", root / "output"

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(before, work, symlinks=True)
        output.unlink(missing_ok=True)
        log.write_text("0")

    def killed_before(point: int) -> int:
        sys.addaudithook(Killer(point, log))
        code = keepstep(command)
        (root / "modules").write_text("\n".join(sys.modules))
        return code

    fresh()
    code = forked(work, output, lambda: killed_before(0))
    import_all((root / "modules").read_text().split())
    changes = int(log.read_text().split()[0])
    found: dict[str, Any] = {"code": code, "changes": changes, "content": content(work), "kills": []}
    found["output"] = output.read_text()[-3000:]
    for number in sorted({max(1, round(changes * part / points)) for part in range(1, points + 1)}):
        fresh()
        killed = forked(work, output, lambda point=number: killed_before(point))  # type: ignore[misc]
        kill = {"where": log.read_text(), "killed": killed, "left": content(work)}
        kill["again"] = forked(work, output, lambda: keepstep(command))
        found["kills"].append({**kill, "content": content(work), "output": output.read_text()[-3000:]})
    return found


def main() -> None:
    """Prepare what the commands start from, and try each."""
    import torch

    import keepstep.cli.main  # noqa: F401 - imported once, for all forks

    # A fork of a process whose threads have started would wait for them.
    torch.set_num_threads(1)
    root, points, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(COMMANDS)
    for name in names:
        start, command = COMMANDS[name]
        before = root / start
        if not before.exists():
            before.mkdir()
            if forked(before, root / "output", globals()[start]):
                sys.exit((root / "output").read_text())
        print(json.dumps({name: try_command(root, before, command, points)}), flush=True)


if __name__ == "__main__":
    main()
