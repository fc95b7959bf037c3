"""The demo: raw text to a trained model on this machine, with a stop and a kill on the way."""

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

from keepstep.config.dump import run_yaml, written
from keepstep.core.errors import EXIT_STOPPED, KeepstepError
from keepstep.core.verbosity import progress
from keepstep.data.batch import Batch
from keepstep.data.corpus import unigram_perplexity
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.loader import build_loaders
from keepstep.data.tokenization import load as load_tokenizer
from keepstep.evaluate.chat_model import cached_forward
from keepstep.evaluate.generate import generate
from keepstep.evaluate.perplexity import perplexity
from keepstep.interop.full_model import load_full_model
from keepstep.models.transformer import Transformer
from keepstep.observe.plot import Curve, png_plot
from keepstep.observe.run_folder import JsonLines, RunFolder, read_last_step, split_kinds
from keepstep.resilience.fault_injection import Fault, to_environment

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


def run_demo(runs_dir: Path, name: str, steps: int) -> DemoResult:
    """Train, stop with a signal, resume, survive a kill, evaluate and generate. Raises where any of it fails."""
    folder = RunFolder(runs_dir / name)
    config_path = runs_dir / f"{folder.name}.yaml"
    config_path.parent.mkdir(parents=True, exist_ok=True)
    config_path.write_text(run_yaml(folder.name, str(config_path), steps))
    words = [str(config_path), *([] if runs_dir == Path("runs") else [f"runs_dir={written(str(runs_dir))}"])]

    stopped_at = _interrupt(words, folder, at_step=steps * 2 // 5)
    say(f"stopped by SIGTERM after step {stopped_at} and saved; the same command resumes from there")
    with tempfile.TemporaryDirectory() as marks:
        # A worse fault, injected as `keepstep chaos` does: the run recovers by itself, without a second command.
        killed_at = steps * 4 // 5
        say(f"this time one of its {PROCESSES} processes is killed with SIGKILL after step {killed_at}")
        fault = Fault("kill", killed_at, PROCESSES - 1)
        with _started(words, to_environment([fault], Path(marks))) as process:
            _expect(process.wait(), 0)

    model, config, step = load_full_model(folder.root)
    loaders = build_loaders(config.data, config.model.seq_len, config.model.vocab, 0, runs_dir / ".data")
    assert loaders.valid is not None, "the demo's data has held-out text"
    assert loaders.tokenizer is not None, "the demo's data has a tokenizer"
    batch = loaders.valid.rows(0, min(VALID_ROWS, loaders.valid.samples_per_epoch))
    train_tokens = MegatronReader(loaders.tokenizer.parent / "train").tokens
    lines = split_kinds(JsonLines(folder.metrics).read())["train"]
    curve = Curve("loss", [line["step"] for line in lines], [line["loss"] for line in lines], smooth_weight=0.9)
    picture = folder.root / "loss.png"
    png_plot([curve], picture, title=f"{folder.name}: training loss")
    return DemoResult(
        folder=folder,
        config_path=config_path,
        stopped_at=stopped_at,
        killed_at=killed_at,
        baseline_perplexity=unigram_perplexity(train_tokens, batch.targets.reshape(-1), config.model.vocab),
        perplexity=perplexity(lambda rows: _loss(model, rows), _split(batch, 8)).perplexity,
        samples=_write_samples(model, step, loaders.tokenizer, JsonLines(folder.samples)),
        curve=curve,
        picture=picture,
    )


def say(text: str) -> None:
    """Print a line about what the demo does."""
    progress(f"── {text}")


def free_name(runs_dir: Path) -> str:
    """A name that no run has yet: the demo never touches existing runs."""
    names = ["demo", *(f"demo-{number}" for number in range(2, 1000))]
    return next(name for name in names if not (runs_dir / name).exists())


@contextmanager
def _started(words: list[str], environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The demo's training as a process that ends with the demo."""
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
            # A second interrupt means: do not wait for the save.
            process.kill()
            process.wait()


def _interrupt(words: list[str], folder: RunFolder, at_step: int) -> int:
    with _started(words) as process:
        while process.poll() is None and read_last_step(folder.metrics) < at_step:
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _expect(process.wait(), EXIT_STOPPED)
    return read_last_step(folder.metrics)


def _expect(code: int, wanted: int) -> None:
    if code != wanted:
        raise KeepstepError(
            f"the demo's training ended with exit code {code} instead of {wanted}", "its own message is above"
        )


def _split(batch: Batch, rows: int) -> list[Batch]:
    slices = [slice(start, start + rows) for start in range(0, len(batch.inputs), rows)]
    return [Batch(batch.inputs[part], batch.targets[part], None, None, part.start) for part in slices]


@torch.no_grad()
def _loss(model: Transformer, batch: Batch) -> tuple[float, int]:
    inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in (batch.inputs, batch.targets))
    return float(model(inputs, targets)), targets.numel()


def _write_samples(model: Transformer, step: int, tokenizer_path: Path, file: JsonLines) -> list[str]:
    tokenizer = load_tokenizer(tokenizer_path)
    samples = []
    for seed, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt).ids
        forward = cached_forward(model, model.config.seq_len)
        new = generate(forward, ids, max_new_tokens=40, temperature=0.7, top_p=0.9, seed=seed)
        samples.append(tokenizer.decode([*ids, *new]))
        file.append({"step": step, "time": time.time(), "prompt": prompt, "text": tokenizer.decode(new)})
    return samples
