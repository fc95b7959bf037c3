"""Kills a small GRPO run again and again, rollouts included, and compares it with an undisturbed one.

    PYTHONPATH=src python benchmarks/rl_kills.py [--kills 100] [--output FILE]

SIGKILL comes at random moments: to the worker, which the agent restarts, or to all processes together, after which the
same command is started again. Losses and rewards of every step must be bitwise equal, also of steps that were done
again (`rl_mismatches`). Every prompt is in the data once, and the run is shorter than one epoch: an answer that the
undisturbed run has not got means that a prompt was asked at another place (`prompts_doubled`), one that is missing
that a prompt was left out (`prompts_skipped`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keepstep.data.chat.tokenizer import VOCAB, prepare_tokenizer

ROOT = Path(__file__).resolve().parents[1]
LOG = "RL_KILLS_LOG"
STEPS, PROMPTS_A_STEP, ANSWERS = 120, 2, 4
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
COMPARED = ("loss", "grad_norm", "samples", "kl", "response_length", "truncated_share", "sampler_difference")
LONGEST_WAIT_S = 3600.0


def logged_reward(messages: list[dict[str, Any]], answer: str, expected: list[dict[str, Any]]) -> float:  # noqa: ARG001
    """A reward that every model can raise, and a line about the answer for the comparison."""
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps([messages[-1]["content"], answer]) + "\n")
    return answer.count("e") / max(1, len(answer))


def words(folder: Path, steps: int) -> list[str]:
    """The overrides of a small run on prompts of its own."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]}
    asked = ({"role": "user", "content": f"Weather {number}?"} for number in range(PROMPTS_A_STEP * steps + 16))
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"messages": [one, call], "tools": [TOOL]}) for one in asked))
    return [
        "model.layers=2", "model.hidden=32", "model.heads=4", f"model.vocab={VOCAB}", "model.seq_len=384",
        f"data.path={rows}", f"data.tokenizer={prepare_tokenizer(folder / 'cache', 1)}", "data.valid_share=0",
        f"global_batch={PROMPTS_A_STEP * ANSWERS}", f"microbatch={ANSWERS}", f"max_duration={steps}ba",
        "rl.method=grpo", f"rl.num_generations={ANSWERS}", "rl.max_new_tokens=48", "rl.beta=0.05",
        "rl.rewards={rl_kills:logged_reward: 1.0, format: 0.5}", "optimizer.lr=1e-3", "schedule.warmup=2ba",
        "checkpoint.interval=5ba", "evaluate.interval=0ba", "evaluate.at_end=false", "observe.tensorboard=false",
        "resilience.max_restarts=1000", "compute.threads=1", "compute.device=cpu", f"runs_dir={folder}",
    ]  # fmt: skip


def start(folder: Path, name: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", LOG: str(folder / f"{name}.jsonl")}
    with (folder / f"{name}.out").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "keepstep", "train", *overrides, f"name={name}", "--procs", "1"],
            env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def steps_of(folder: Path, name: str) -> dict[int, list[dict[str, float]]]:
    """What each step reported, each time that it was done."""
    found: dict[int, list[dict[str, float]]] = {}
    path = folder / name / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        if "loss" in record:
            kept = {key: value for key, value in record.items() if key in COMPARED or key.startswith("reward")}
            found.setdefault(record["step"], []).append(kept)
    return found


def kill_often(folder: Path, name: str, overrides: list[str], kills: int, chance: random.Random) -> dict[str, int]:
    """Run to the end, with up to so many kills at random moments."""
    done = {"worker": 0, "all": 0}
    process = start(folder, name, overrides)
    deadline = time.monotonic() + LONGEST_WAIT_S
    while process.poll() is None:
        time.sleep(chance.uniform(0.0, 5.0))
        if sum(done.values()) >= kills:
            process.wait(LONGEST_WAIT_S)
            break
        assert time.monotonic() < deadline, "no end in sight"
        # Workers are forked by a process that has imported torch.
        workers = [worker for parent in children(process.pid) for worker in children(parent)]
        if chance.random() < 0.1 and (folder / name / "metrics.jsonl").exists():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done["all"] += 1
            process = start(folder, name, overrides)
        elif workers:
            os.kill(chance.choice(workers), signal.SIGKILL)
            done["worker"] += 1
    if process.returncode:
        raise RuntimeError((folder / f"{name}.out").read_text()[-3000:])
    return done


def compare(folder: Path, name: str) -> dict[str, int]:
    whole, killed = steps_of(folder, "whole"), steps_of(folder, name)
    different = [step for step in whole if any(again != whole[step][0] for again in killed.get(step, [{}]))]
    lines = [(folder / f"{one}.jsonl").read_text().splitlines() for one in ("whole", name)]
    asked = [set(some) for some in lines]
    return {
        "answers_written_again": len(lines[1]) - len(lines[0]),
        "rl_mismatches": len(different) + len(killed.keys() - whole.keys()),
        "steps_done_again": sum(len(times) - 1 for times in killed.values()),
        "prompts_skipped": len(asked[0] - asked[1]),
        "prompts_doubled": len(asked[1] - asked[0]),
    }


def measure(folder: Path, kills: int, steps: int) -> dict[str, int]:
    overrides, chance = words(folder, steps), random.Random(kills)
    if start(folder, "whole", overrides).wait(LONGEST_WAIT_S):
        raise RuntimeError((folder / "whole.out").read_text()[-3000:])
    totals: dict[str, int] = {"rl_kills": 0, "steps": steps, "runs": 0}
    while totals["rl_kills"] < kills:
        name = f"killed-{totals['runs']}"
        struck = kill_often(folder, name, overrides, kills - totals["rl_kills"], chance)
        found = {"rl_kills": sum(struck.values()), "runs": 1, "kills_of_all_processes": struck["all"]}
        for key, value in {**found, **compare(folder, name)}.items():
            totals[key] = totals.get(key, 0) + value
        print(json.dumps(totals), file=sys.stderr, flush=True)
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), options.kills, options.steps)
    text = json.dumps(results, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return int(any(results[key] for key in ("rl_mismatches", "prompts_skipped", "prompts_doubled")))


if __name__ == "__main__":
    sys.exit(main())
