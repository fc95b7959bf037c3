"""`make fuzz`: damaged files of every format, read as the commands read them, and hostile requests over HTTP.

None may end in a traceback. A file may be accepted or refused with an error that says why. An uncaught exception, more
than 5 seconds of work, more than 1 GiB of memory, or damage that a hash or a count could show and that is accepted all
the same, is a failure. A request may be answered or refused. Case n of a format depends on the seed, the format and n
alone, so `--only FORMAT --first N --cases 1` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from keepstep.cli import main as cli
from keepstep.core.errors import KeepstepError
from tests.fuzz.formats import FORMATS, Files, Format, put
from tests.fuzz.http_api import mutate_request
from tests.fuzz.mutators import mutate

MEMORY_BYTES = 1 << 30
"""What reading one case may use beyond what the worker has before it."""
LIMIT_S = 5.0
"""Of processor time of the worker, which other work on the machine does not change."""
WAIT_LIMIT_S = 600.0
"""Of waiting without working, for example for a pipe. On a loaded machine a worker may get no processor for minutes."""
_CASES_PER_WORKER = 400
"""A worker is replaced after this many, so that memory which a library keeps does not add up."""
OUTCOMES = ("accepted", "refused", "uncaught", "hang", "memory", "wrongly accepted")


@dataclass(frozen=True)
class Outcome:
    """How one case ended; `where` groups failures with the same cause."""

    name: str
    number: int
    kind: str
    where: str = ""
    detail: str = ""


def damaged_files(name: str, number: int, seed: int, files: Files) -> Files:
    """The files of case `number`: those of the format, one of them damaged."""
    form = FORMATS[name]
    rng = random.Random(f"{seed} {name} {number}")
    chosen = rng.choice(sorted(filter(form.damaged, files)))
    change = mutate_request(files[chosen], rng) if chosen.endswith(".http") else mutate(chosen, files[chosen], rng)
    return form.sign({**files, chosen: change})


def read_case(form: Format, number: int, folder: Path, out: Path, files: Files) -> tuple[str, str, str]:
    """Read one damaged folder; returns the kind of outcome, where it failed, and the details."""
    try:
        code = form.readers[number % len(form.readers)](folder, out)
    except KeepstepError:
        return "refused", "", ""
    except SystemExit:
        return "refused", "", ""
    except MemoryError as error:
        return "memory", _place(error), traceback.format_exc()[-3000:]
    except BaseException as error:  # a panic in a Rust library is no Exception
        if isinstance(error, OSError) and cli._user_can_fix(error):
            return "refused", "", ""
        return "uncaught", f"{type(error).__name__} at {_place(error)}", traceback.format_exc()[-3000:]
    try:
        wrong = form.accepted(folder, files) if code == 0 else ""
    except KeepstepError as error:
        wrong = f"accepted, but then: {error.message.rpartition('/')[2]}"
    return ("wrongly accepted", wrong, wrong) if wrong else ("accepted" if code == 0 else "refused", "", "")


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/keepstep/" in frame.filename]
    if not frames:
        return "unknown"
    return f"{frames[-1].filename.rpartition('/keepstep/')[2]}:{frames[-1].lineno} {frames[-1].name}"


def _work(cases: list[tuple[str, int]], seed: int, valid: dict[str, Files], pipe: Connection) -> None:
    """A worker: reads its cases and sends an outcome for each."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # As the command line does, which replaces what cannot be printed.
    streams = (open(number, "w", closefd=False, errors="backslashreplace") for number in (1, 2))  # noqa: SIM115
    sys.stdout, sys.stderr = streams
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    with _memory_folder() as root:
        os.environ["XDG_CACHE_HOME"] = str(Path(root) / "cache")
        os.chdir(root)
        for name, number in cases:
            pipe.send(("start", number))
            pipe.send(_outcome(Path(root), name, number, seed, valid[name]))
    pipe.send(("end", -1))


def _memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory where there is one: most commands wait until their files are on disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def _outcome(root: Path, name: str, number: int, seed: int, files: Files) -> Outcome:
    folder, out = root / "files", root / "out"
    try:
        put(folder, damaged_files(name, number, seed, files))
        out.mkdir()
        with _limited_memory():
            return Outcome(name, number, *read_case(FORMATS[name], number, folder, out, files))
    finally:
        for each in (folder, out):
            shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """For the reader alone: pyarrow ends the process if it runs out of memory while a damaged table is written."""
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Pool:
    """Forked workers, each with a list of cases. One that fails is replaced and continues after the failed case."""

    def __init__(self, seed: int, valid: dict[str, Files]) -> None:
        self._seed, self._valid = seed, valid
        self._context = multiprocessing.get_context("fork")
        self._workers: dict[Connection, tuple[Any, list[tuple[str, int]], float]] = {}
        self._began: dict[Connection, float] = {}

    def start(self, cases: list[tuple[str, int]]) -> None:
        """Fork a worker for these cases."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(cases, self._seed, self._valid, theirs), daemon=True)
        process.start()
        theirs.close()
        self._workers[ours] = (process, cases, _used_s(process.pid))
        self._began[ours] = time.monotonic()

    @property
    def busy(self) -> int:
        """Workers that have cases left."""
        return len(self._workers)

    def outcomes(self) -> Iterator[Outcome]:
        """What has ended since the last call; waits at most half a second."""
        for pipe in wait(list(self._workers), timeout=0.5):
            assert isinstance(pipe, Connection)
            yield from self._receive(pipe)
        for pipe, (process, cases, used_s) in list(self._workers.items()):
            waited_s = time.monotonic() - self._began[pipe]
            if why := hang(_used_s(process.pid) - used_s, waited_s):
                process.kill()
                yield self._lost(pipe, cases, "hang", why)

    def _receive(self, pipe: Connection) -> Iterator[Outcome]:
        process, cases, _ = self._workers[pipe]
        try:
            message = pipe.recv()
        except EOFError:
            process.join()
            yield self._lost(pipe, cases, "uncaught", f"the process ended with {process.exitcode}")
            return
        self._began[pipe] = time.monotonic()
        if isinstance(message, Outcome):
            self._workers[pipe] = (process, cases[1:], _used_s(process.pid))
            yield message
        elif message[0] == "end":
            self._close(pipe)

    def _lost(self, pipe: Connection, cases: list[tuple[str, int]], kind: str, why: str) -> Outcome:
        self._close(pipe)
        if not cases:
            return Outcome("worker", 0, kind, why, why)
        if cases[1:]:
            self.start(cases[1:])
        return Outcome(*cases[0], kind, why, why)

    def _close(self, pipe: Connection) -> None:
        process, _, _ = self._workers.pop(pipe)
        del self._began[pipe]
        process.join()
        pipe.close()


def hang(worked_s: float, waited_s: float) -> str:
    """Why a case counts as a hang after this much work and time; empty while it does not."""
    if worked_s > LIMIT_S:
        return f"no end after {LIMIT_S:.0f} s of work"
    return f"no end after {WAIT_LIMIT_S:.0f} s of waiting" if waited_s > WAIT_LIMIT_S else ""


def _used_s(pid: int) -> float:
    """Processor time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def batches(names: list[str], first: int, cases: int) -> Iterator[list[tuple[str, int]]]:
    """Cases in turn over all formats, in pieces for one worker."""
    numbered = ((names[number % len(names)], number // len(names)) for number in range(first, first + cases))
    batch: list[tuple[str, int]] = []
    for case in numbered:
        batch.append(case)
        if len(batch) == _CASES_PER_WORKER:
            yield batch
            batch = []
    if batch:
        yield batch


def run(args: argparse.Namespace) -> list[Outcome]:
    """All cases; prints the progress and returns how each ended."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Building a parser takes longer than reading most files.
    cli.load_verb = functools.cache(cli.load_verb)
    names = args.only.split(",") if args.only else list(FORMATS)
    valid = {name: FORMATS[name].files() for name in names}
    for name in names:
        _check_sample(name, valid[name])
    pool, work = Pool(args.seed, valid), batches(names, args.first, args.cases)
    done: list[Outcome] = []
    began = shown_at = time.monotonic()
    left = True
    while left or pool.busy:
        left = left and (not args.minutes or time.monotonic() - began < 60 * args.minutes)
        while left and pool.busy < args.workers:
            batch = next(work, None)
            left = batch is not None
            if batch:
                pool.start(batch)
        for outcome in pool.outcomes():
            done.append(outcome)
            if outcome.kind not in ("accepted", "refused"):
                _keep(args.out, outcome, args.seed, valid)
        if time.monotonic() - shown_at > 10:
            shown_at = time.monotonic()
            failed = sum(outcome.kind not in ("accepted", "refused") for outcome in done)
            rate = len(done) / (shown_at - began)
            print(f"{len(done):,} cases, {rate:.0f} a second, {failed} failed", file=sys.stderr, flush=True)
    return done


def _check_sample(name: str, files: Files) -> None:
    """Read the sample without damage. It must be accepted; and the workers inherit the imported modules."""
    with _memory_folder() as root, Path(os.devnull).open("w") as null:
        folder, out = Path(root) / "files", Path(root) / "out"
        put(folder, files)
        out.mkdir()
        for number in range(len(FORMATS[name].readers)):
            with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                kind, where, detail = read_case(FORMATS[name], number, folder, out, files)
            if kind != "accepted":
                sys.exit(f"error: the undamaged sample of {name} was {kind} by reader {number} {where}\n{detail}")


def _keep(out: Path, outcome: Outcome, seed: int, valid: dict[str, Files]) -> None:
    """Write the files of a failed case; at most three with the same cause."""
    cause = "".join(char if char.isalnum() else "-" for char in outcome.where)[:80]
    folder = out / outcome.name / cause
    if outcome.name not in valid or (folder.is_dir() and len(list(folder.iterdir())) >= 3):
        return
    case = folder / str(outcome.number)
    files = damaged_files(outcome.name, outcome.number, seed, valid[outcome.name])
    put(case, {name: data for name, data in files.items() if data != valid[outcome.name][name]})
    (case / "outcome.json").write_text(json.dumps(asdict(outcome), indent=2))


def table(done: list[Outcome]) -> str:
    """Outcomes by format, and the failures by their cause."""
    counts = Counter((outcome.name, outcome.kind) for outcome in done)
    names = [*dict.fromkeys(outcome.name for outcome in done)]
    lines = [f"{'format':<20}" + "".join(f"{kind:>17}" for kind in OUTCOMES)]
    for name in names:
        lines.append(f"{name:<20}" + "".join(f"{counts[name, kind]:>17,}" for kind in OUTCOMES))
    totals = Counter(outcome.kind for outcome in done)
    lines.append(f"{'all ' + format(len(done), ','):<20}" + "".join(f"{totals[kind]:>17,}" for kind in OUTCOMES))
    causes = Counter(
        (outcome.name, outcome.kind, outcome.where) for outcome in done if outcome.kind not in ("accepted", "refused")
    )
    lines += [f"{count:>6}  {name}: {kind}, {where}" for (name, kind, where), count in causes.most_common()]
    return "\n".join(lines)


def results(done: list[Outcome], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The numbers of a run, for --output."""
    counts = Counter((outcome.name, outcome.kind) for outcome in done)
    totals = Counter(outcome.kind for outcome in done)
    return {
        "cases": len(done),
        "seed": args.seed,
        "first": args.first,
        "totals": {kind: totals[kind] for kind in OUTCOMES},
        "formats": {name: {kind: counts[name, kind] for kind in OUTCOMES} for name in FORMATS},
        "limits": {"cpu_s": LIMIT_S, "wait_s": WAIT_LIMIT_S, "memory_bytes": MEMORY_BYTES},
        "seconds": round(seconds),
        "machine": f"{os.cpu_count()} cores, {args.workers} workers, {platform.machine()} {platform.system()}",
        "passed": all(outcome.kind in ("accepted", "refused") for outcome in done),
    }


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0, help="start no more cases after this time")
    parser.add_argument("--cases", type=int, default=100_000, help="over all formats (default: 100,000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="A,B", help=f"formats: {', '.join(FORMATS)}")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder for the files of failed cases")
    parser.add_argument("--output", type=Path, help="write the numbers of the run to this JSON file")
    args = parser.parse_args()
    args.out = args.out.absolute()
    began = time.monotonic()
    done = run(args)
    print(table(done))
    seconds = time.monotonic() - began
    if args.output:
        args.output.write_text(json.dumps(results(done, args, seconds), indent=1) + "\n")
    print(f"seed {args.seed}, {seconds:.0f} s, {len(done) / max(1e-9, seconds):.0f} cases a second")
    failed = any(outcome.kind not in ("accepted", "refused") for outcome in done)
    if failed:
        print(f"the files of failed cases are in {args.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
