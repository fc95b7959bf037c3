"""`keepstep eval ppl`: perplexity of a model on windows of text, as C4 is usually measured.

Documents are joined with the end-of-text token between them and cut into windows that do not overlap; every token of a
window but its first is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data import tokenize
from keepstep.data.loader import build_loaders
from keepstep.evaluate.perplexity import PerplexityResult, perplexity
from keepstep.models.transformer import Transformer
from keepstep.train.start import find_tokenizer, whole_model

_TEXT = (".txt", ".jsonl", ".json")


def text_perplexity(
    where: Path,
    data: str,
    *,
    windows: int,
    length: int = 0,
    batch: int = 32,
    tokenizer: Path | None = None,
    device: str = "auto",
) -> PerplexityResult:
    """Perplexity of a model on text files, on prepared tokens, or (no `data`) on its run's own held-out data."""
    model, config, _ = whole_model(where)
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    model.to(chosen)
    length = length or config.model.seq_len
    if data and (data.endswith(_TEXT) or _has_texts(Path(data))):
        path = tokenizer or find_tokenizer(where)
        if path is None:
            raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
        rows = text_windows(read_texts(Path(data)), path, length, windows)
    else:
        rows = _prepared_windows(data or config.data.path, length, config.model.vocab, windows, config.runs_dir)
    return perplexity(lambda part: _loss(model, part), _batches(rows, batch))


def _has_texts(path: Path) -> bool:
    return path.is_dir() and any(item.suffix in _TEXT for item in path.iterdir())


def read_texts(path: Path) -> Iterator[str]:
    """Documents: a .txt file is one, a line of a .jsonl file is one (its `text`)."""
    files = sorted(item for item in path.iterdir() if item.suffix in _TEXT) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing", "give .txt or .jsonl files, or a folder of them")
        if file.suffix == ".txt":
            yield file.read_text(encoding="utf-8")
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            row = json.loads(line) if line.strip() else {"text": ""}
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise DataError(f"{file} line {number} has no text", 'rows look like {"text": "…"}')
            yield row["text"]


def text_windows(texts: Iterable[str], tokenizer: Path, length: int, windows: int) -> NDArray[np.int64]:
    """The first windows of the joined text, [windows, length]; fewer where the text is short."""
    loaded = tokenize.load(tokenizer)
    end = next((loaded.token_to_id(text) for text in _ends(tokenizer) if loaded.token_to_id(text) is not None), None)
    wanted, ids = windows * length, list[int]()
    for text in texts:
        ids += loaded.encode(text, add_special_tokens=False).ids
        ids += [] if end is None else [end]
        if len(ids) >= wanted:
            break
    count = min(windows, len(ids) // length)
    if not count:
        raise DataError(f"the text has {len(ids)} tokens, less than one window of {length}", "give a smaller --length")
    return np.array(ids[: count * length], dtype=np.int64).reshape(count, length)


def _ends(tokenizer: Path) -> list[str]:
    settings = tokenizer.parent / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("eos_token") if settings.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    return [*([text] if text else []), tokenize.END_OF_TEXT, "</s>"]


def _prepared_windows(path: str, length: int, vocab: int, windows: int, runs_dir: str) -> NDArray[np.int64]:
    loaders = build_loaders(DataConfig(path=path), length - 1, vocab, 0, Path(runs_dir) / ".data")
    if loaders.valid is None:
        raise DataError(f"{path} holds out no text", "name text files with --data")
    batch = loaders.valid.rows(0, min(windows, loaders.valid.samples_per_epoch))
    return np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)


def _batches(rows: NDArray[np.int64], size: int) -> Iterator[Tensor]:
    return (torch.from_numpy(rows[start : start + size]) for start in range(0, len(rows), size))


@torch.no_grad()
def _loss(model: Transformer, rows_bt: Tensor) -> tuple[float, int]:
    rows_bt = rows_bt.to(next(model.parameters()).device)
    targets_bt = rows_bt[:, 1:]
    return float(model(rows_bt[:, :-1], targets_bt)), targets_bt.numel()
