"""The demo: raw text to a trained model on this very machine, interrupted twice and none the worse for it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from keepstep.config.dump import written
from keepstep.config.template import run_yaml
from keepstep.core.errors import EXIT_STOPPED, KeepstepError
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.loader import Batch, build_loaders
from keepstep.data.stats import unigram_perplexity
from keepstep.data.tokenize import load as load_tokenizer
from keepstep.evaluate.generate import generate
from keepstep.evaluate.perplexity import perplexity
from keepstep.observe.folder import JsonLines, Record, RunFolder, read_from, split_kinds
from keepstep.observe.plot import Curve, png_plot
from keepstep.resilience.chaos import Fault, to_environment
from keepstep.train.trained import TrainedModel, open_trained

PROCESSES = 2
PROMPTS = ("def __init__(self", "import ", "    for ")
VALID_ROWS = 256


@dataclass(frozen=True)
class DemoResult:
    """What the demo showed."""

    folder: RunFolder
    config_path: Path
    stopped_at: int
    killed_at: int
    baseline_perplexity: float
    perplexity: float
    samples: list[str]
    curve: Curve
    picture: Path


def run_demo(runs_dir: Path, steps: int) -> DemoResult:
    """Train, stop halfway with a signal, go on, survive a kill, evaluate and generate. Raises where any of it fails."""
    folder = _free_folder(runs_dir)
    config_path = runs_dir / f"{folder.name}.yaml"
    config_path.parent.mkdir(parents=True, exist_ok=True)
    config_path.write_text(run_yaml(folder.name, str(config_path), steps))
    words = [str(config_path), *([] if runs_dir == Path("runs") else [f"runs_dir={written(str(runs_dir))}"])]

    stopped_at = _interrupt(words, folder, at_step=steps * 2 // 5)
    say(f"stopped by SIGTERM after step {stopped_at} and saved; the same command again goes on from there")
    with tempfile.TemporaryDirectory() as marks:
        # A worse fault, as `keepstep chaos` plays it: nobody stops the run this time, and nobody starts it again.
        killed_at = steps * 4 // 5
        say(f"this time one of its {PROCESSES} processes is killed with SIGKILL after step {killed_at}")
        fault = Fault("kill", killed_at, PROCESSES - 1)
        with _started(words, to_environment([fault], Path(marks))) as process:
            _expect(process.wait(), 0)

    trained = open_trained(folder)
    loaders = build_loaders(
        trained.config.data, trained.config.model.seq_len, trained.config.model.vocab, 0, runs_dir / ".data"
    )
    assert loaders.valid is not None, "the demo's data has held-out text"
    assert loaders.tokenizer is not None, "the demo's data has a tokenizer"
    batch = loaders.valid.rows(0, min(VALID_ROWS, loaders.valid.samples_per_epoch))
    train_tokens = MegatronReader(loaders.tokenizer.parent / "train").tokens
    lines = _train_lines(folder)
    curve = Curve("loss", [line["step"] for line in lines], [line["loss"] for line in lines])
    picture = folder.root / "loss.png"
    png_plot([curve], picture, title=f"{folder.name}: training loss")
    return DemoResult(
        folder=folder,
        config_path=config_path,
        stopped_at=stopped_at,
        killed_at=killed_at,
        baseline_perplexity=unigram_perplexity(train_tokens, batch.targets.reshape(-1), trained.config.model.vocab),
        perplexity=perplexity(lambda rows: _loss(trained, rows), _split(batch, 8)).perplexity,
        samples=_write_samples(trained, loaders.tokenizer, JsonLines(folder.samples)),
        curve=curve,
        picture=picture,
    )


def say(text: str) -> None:
    """A line about what the demo is doing."""
    print(f"── {text}", file=sys.stderr, flush=True)


def _free_folder(runs_dir: Path) -> RunFolder:
    """A name that no run has yet: a demo never touches what is there."""
    names = ["demo", *(f"demo-{number}" for number in range(2, 1000))]
    return next(RunFolder(runs_dir / name) for name in names if not (runs_dir / name).exists())


@contextmanager
def _started(words: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The demo's training as a process, which does not go on without the demo: asked to end it saves, as any run."""
    command = ["train", *words, "--procs", str(PROCESSES)]
    say(f"keepstep {shlex.join(command)}")
    process = subprocess.Popen([sys.executable, "-m", "keepstep", *command], env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                process.terminate()
            process.wait()
        finally:
            # Whoever interrupts a second time does not want to wait for that.
            process.kill()
            process.wait()


def _interrupt(words: list[str], folder: RunFolder, at_step: int) -> int:
    with _started(words) as process:
        while process.poll() is None and _last_step(folder) < at_step:
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _expect(process.wait(), EXIT_STOPPED)
    return _last_step(folder)


def _expect(code: int, wanted: int) -> None:
    if code != wanted:
        raise KeepstepError(
            f"the demo's training ended with exit code {code} instead of {wanted}", "its own message stands above"
        )


def _train_lines(folder: RunFolder) -> list[Record]:
    return split_kinds(read_from(folder.metrics)[0])["train"]


def _last_step(folder: RunFolder) -> int:
    lines = _train_lines(folder)
    return int(lines[-1]["step"]) if lines else 0


def _split(batch: Batch, rows: int) -> list[Batch]:
    slices = [slice(start, start + rows) for start in range(0, len(batch.inputs), rows)]
    return [Batch(batch.inputs[part], batch.targets[part], None, None, part.start) for part in slices]


@torch.no_grad()
def _loss(trained: TrainedModel, batch: Batch) -> tuple[float, int]:
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in (batch.inputs, batch.targets))
    return float(trained.model(inputs, targets)), targets.numel()


def _write_samples(trained: TrainedModel, tokenizer_path: Path, told: JsonLines) -> list[str]:
    tokenizer = load_tokenizer(tokenizer_path)
    samples = []
    for seed, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt).ids
        new = generate(trained.next_token_logits(), ids, max_new_tokens=40, temperature=0.7, top_p=0.9, seed=seed)
        samples.append(tokenizer.decode([*ids, *new]))
        told.append({"step": trained.step, "time": time.time(), "prompt": prompt, "text": tokenizer.decode(new)})
    return samples
