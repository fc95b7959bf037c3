"""Many faults in one run, at random, and nobody there to help."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace

from keepstep.core.errors import EXIT_STOPPED
from keepstep.launch.rehearsal import (
    ORPHANS_S,
    Outcome,
    Stage,
    losses,
    session_members,
    started,
    undisturbed,
    wait_for,
    wait_until_gone,
)
from keepstep.observe.folder import JsonLines, number
from keepstep.resilience.chaos import ALL_RANKS, Fault, happened_at, to_environment

KINDS = ("kill", "kill", "kill_all", "exception", "oom", "terminate", "kill_launcher")
"""What strikes, more often what is more frequent in life."""
_TAIL_STEPS = 5
_CACHES = ("torchinductor_",)
"""What torch leaves in the folder for temporary files on purpose."""


def sample_faults(count: int, mean_steps: float, processes: int, seed: int) -> list[Fault]:
    """Faults with exponential gaps between them: the same seed gives the same ones."""
    chance = random.Random(seed)
    faults, step = [], 3
    for _ in range(count):
        step += 1 + round(chance.expovariate(1 / mean_steps))
        kind = chance.choice(KINDS)
        rank = ALL_RANKS if kind == "kill_all" else 0 if kind in ("terminate", "kill_launcher") else None
        chosen = chance.randrange(processes) if rank is None else rank
        faults.append(Fault(kind.replace("kill_all", "kill"), step, chosen))
    return faults


def soak(stage: Stage, count: int, mean_steps: float, seed: int, say: Callable[[str], None]) -> list[Outcome]:
    """Play `count` random faults in one run; an outcome for each, and one for what was left behind."""
    faults = sample_faults(count, mean_steps, stage.processes, seed)
    stage = replace(stage, steps=faults[-1].step + _TAIL_STEPS, timeout_s=stage.timeout_s * max(1, count / 20))
    say(f"an undisturbed run of {stage.steps} steps")
    wanted = undisturbed(stage)
    marks = stage.folder / "marks"
    marks.mkdir()
    words = [*stage.name_words("soak"), "resilience.max_restarts=20"]
    starts, left_over = 0, 0
    scratch = stage.folder / "tmp"
    scratch.mkdir()
    environment = {**to_environment(faults, marks), "TMPDIR": str(scratch)}
    code: int | None = EXIT_STOPPED
    while code in (EXIT_STOPPED, -signal.SIGKILL) and starts <= count:
        starts += 1
        with started(stage, words, "soak", environment) as process:
            code = wait_for(process, stage.timeout_s)
            gone = wait_until_gone(process.pid, ORPHANS_S)
            left_over += 0 if gone else len(session_members(process.pid))
        struck = sum(happened_at(fault, marks) is not None for fault in faults)
        say(f"{struck} of {count} faults struck, start {starts} ended with {code}")
    folder = stage.run_folder("soak")
    equal = losses(folder) == wanted
    events = JsonLines(folder.events).read()
    resumed_at = [number(event["time"]) for event in events if event.get("kind") == "resume"]
    outcomes = []
    for fault in faults:
        at = happened_at(fault, marks)
        back = next((moment - at for moment in resumed_at if at is not None and moment > at), None)
        title = f"{fault.kind} after step {fault.step}, rank {'all' if fault.rank == ALL_RANKS else fault.rank}"
        outcomes.append(Outcome(fault.kind, title, at is not None and equal, None, back, None, equal))
    leaked = left_over + sum(not path.name.startswith(_CACHES) for path in scratch.iterdir())
    note = "" if code == 0 and not leaked else f"ended with {code}, {leaked} processes or folders left"
    outcomes.append(Outcome("leaks", "nothing left behind", not note, None, None, None, equal, note))
    return outcomes
