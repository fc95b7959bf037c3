"""`keepstep eval ppl`: perplexity of a model on windows of text, as C4 is usually measured.

Documents are joined with the end-of-text token between them and cut into windows that do not overlap; every token of a
window but its first is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepstep.config.schema import DataConfig, RunConfig
from keepstep.core.errors import DataError, UsageError
from keepstep.data import tokenize
from keepstep.data.loader import Batch, Loader, build_loaders
from keepstep.evaluate.perplexity import PerplexityResult, perplexity
from keepstep.models.hf_folder import is_hf_folder
from keepstep.models.transformer import Transformer
from keepstep.train.losses import count_targets
from keepstep.train.run import open_data
from keepstep.train.start import find_tokenizer, open_device, run_facts, whole_model

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
    _check_sizes(windows, length, batch)
    chosen = open_device(device)
    model, config, _ = whole_model(where)
    if data and data != config.data.path and (data.endswith(_TEXT) or _has_texts(Path(data))):
        path = tokenizer or find_tokenizer(where)
        if path is None:
            raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
        rows = text_windows(read_texts(Path(data)), path, length or config.model.seq_len, windows)
        if rows.max() >= config.model.vocab:
            raise DataError(
                f"{path} has a token {rows.max()}, but the model knows {config.model.vocab} only",
                "name the model's own with --tokenizer",
            )
        batches = _cut(rows, batch)
    else:
        loader = _own_rows(where, config, length) if data in ("", config.data.path) else _rows_of(data, config, length)
        batches = _batches(loader, min(windows, loader.samples_per_epoch), batch)
    model.to(chosen)
    return perplexity(lambda part: _loss(model, part), batches)


def _check_sizes(windows: int, length: int, batch: int) -> None:
    for name, value, least in (("windows", windows, 1), ("length", length or 2, 2), ("batch", batch, 1)):
        if value < least:
            raise UsageError(f"--{name} is {value}, but it must be at least {least}", f"--{name} {max(least, 32)}")


def _has_texts(path: Path) -> bool:
    return path.is_dir() and any(item.suffix in _TEXT for item in path.iterdir())


def read_texts(path: Path) -> Iterator[str]:
    """Documents: a .txt file is one, a line of a .jsonl file is one (its `text`)."""
    files = sorted(item for item in path.iterdir() if item.suffix in _TEXT) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing", "give .txt or .jsonl files, or a folder of them")
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        yield from [text] if file.suffix == ".txt" else _rows(text, file)


def _rows(lines: str, file: Path) -> Iterator[str]:
    # Not splitlines: JSON may hold other signs that it takes for the end of a line.
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file} line {number} is no JSON: {error}", 'rows look like {"text": "…"}') from None
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


def _own_rows(where: Path, config: RunConfig, length: int) -> Loader:
    """What the run itself holds out, opened and cut into rows as it does."""
    if is_hf_folder(where) or "imported_from" in run_facts(where):
        raise UsageError(f"{where} was not trained here and has no held-out data", "name text files with --data")
    model = replace(config.model, seq_len=length - 1) if length else config.model
    # Beside the run, wherever it was started from.
    loaders = open_data(replace(config, model=model, runs_dir=str(where.resolve().parent)))
    if loaders.valid is None:
        raise DataError(f"{where} holds out no data", "name text files with --data")
    return loaders.valid


def _rows_of(data: str, config: RunConfig, length: int) -> Loader:
    """All rows of prepared tokens; of what is generated, those that training leaves out."""
    source = DataConfig(path=data, valid_share=0.0, column=config.data.column)
    size = (length or config.model.seq_len) - 1
    loaders = build_loaders(source, size, config.model.vocab, 0, Path(config.runs_dir) / ".data")
    return loaders.valid or loaders.train


def _batches(loader: Loader, count: int, size: int) -> Iterator[Batch]:
    return (loader.rows(start, min(size, count - start)) for start in range(0, count, size))


def _cut(rows: NDArray[np.int64], size: int) -> Iterator[Batch]:
    parts = (rows[start : start + size] for start in range(0, len(rows), size))
    return (Batch(part[:, :-1], part[:, 1:], None, None, 0) for part in parts)


@torch.no_grad()
def _loss(model: Transformer, batch: Batch) -> tuple[float, int]:
    device = next(model.parameters()).device

    def there(array: NDArray[np.int64] | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    loss_sum = model(
        there(batch.inputs),
        there(batch.targets),
        positions_bt=there(batch.positions),
        documents_bt=there(batch.documents),
    )
    return float(loss_sum), count_targets(batch)
