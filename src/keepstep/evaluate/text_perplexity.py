"""`keepstep eval ppl`: perplexity of a model on windows of text, as C4 is usually measured.

Documents are joined with the end-of-text token and split into windows that do not overlap. Every token of a window is
predicted except the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepstep.config.schema import DataConfig, RunConfig
from keepstep.core.errors import DataError, UsageError
from keepstep.core.messages import NOT_UTF8_HINT, invalid_value
from keepstep.data import tokenization
from keepstep.data.batch import Batch
from keepstep.data.loader import Loader, build_loaders
from keepstep.data.open_dataset import holds_tokens
from keepstep.data.prepare.records import RecordOptions, Rejects, require_texts, texts_of
from keepstep.data.prepare.sources import kind_of
from keepstep.data.prepare.stages import c4_split
from keepstep.evaluate.perplexity import PerplexityResult, perplexity
from keepstep.interop.full_model import load_full_model, load_initial_model, open_device
from keepstep.interop.hf_folder import is_hf_folder
from keepstep.interop.run_data import open_run_data
from keepstep.interop.run_source import find_tokenizer, read_run_facts
from keepstep.models.transformer import Transformer

_PLAIN = (".txt", ".jsonl", ".json")
_PACKED = tuple(f"{suffix}{packed}" for suffix in _PLAIN for packed in (".gz", ".zst"))
_TEXT = (*_PLAIN, *_PACKED, ".parquet")
"""Text files in a folder; a single file may be of any kind that `keepstep data build` reads."""


def text_perplexity(
    where: Path,
    data: str,
    *,
    windows: int,
    length: int = 0,
    batch: int = 32,
    tokenizer: Path | None = None,
    device: str = "auto",
    start: bool = False,
    field: str = "text",
) -> PerplexityResult:
    """Perplexity of a model on text files, on prepared tokens, or (no `data`) on its run's own held-out data.

    With `start`, of the weights that the run started from. `field` is the text field of a row.
    """
    for name, value, least in (("windows", windows, 1), ("length", length or 2, 2), ("batch", batch, 1)):
        if value < least:
            wrong = invalid_value(f"--{name}", value, f"must be at least {least}")
            raise UsageError(wrong, f"--{name} {max(least, 32)}")
    documents = 0
    if data.startswith("c4:"):
        data, documents = c4_split(data.removeprefix("c4:"))
    chosen = open_device(device)
    model, config, _ = load_initial_model(where) if start else load_full_model(where)
    if data and data != config.data.path and names_text(data):
        path = tokenizer or find_tokenizer(where)
        if path is None:
            raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
        texts = islice(read_texts(data, field), documents or None)
        rows = text_windows(texts, path, length or config.model.seq_len, windows)
        if rows.max() >= config.model.vocab:
            raise DataError(
                f"{path} has a token {rows.max()}, but model.vocab is {config.model.vocab}",
                "name the model's own tokenizer with --tokenizer",
            )
        parts = (rows[start : start + batch] for start in range(0, len(rows), batch))
        batches = (Batch(part[:, :-1], part[:, 1:], None, None, 0) for part in parts)
    else:
        loader = (
            _run_rows(where, config, length) if data in ("", config.data.path) else _token_rows(data, config, length)
        )
        count = min(windows, loader.samples_per_epoch)
        batches = (loader.rows(start, min(batch, count - start)) for start in range(0, count, batch))
    model.to(chosen)
    return perplexity(lambda part: _loss(model, part), batches)


def names_text(data: str) -> bool:
    """Whether a path holds text and not tokens, by the names of its files."""
    if "://" in data or not Path(data).is_dir():
        return data.startswith("hf://") or kind_of(data) is not None
    # A build has a dataset.json and a tokenizer.json next to its tokens, and neither is text.
    return not holds_tokens(Path(data)) and any(item.name.endswith(_TEXT) for item in Path(data).iterdir())


def read_texts(data: str | Path, field: str = "text") -> Iterator[str]:
    """Documents: each text file, and the `field` of each row of JSON lines or of a table."""
    if "://" in str(data):
        yield from _record_texts(str(data), field)
        return
    path = Path(data)
    for file in sorted(item for item in path.iterdir() if item.name.endswith(_TEXT)) if path.is_dir() else [path]:
        if not file.is_file():
            raise DataError(f"{file} is missing", "give .txt, .jsonl[.gz|.zst] or .parquet files, or a folder of them")
        if file.suffix not in _PLAIN:
            yield from _record_texts(str(file), field)
            continue
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            message = f"{file} is not UTF-8 text: {error.reason} at byte {error.start}"
            raise DataError(message, NOT_UTF8_HINT) from None
        yield from [text] if file.suffix == ".txt" else _rows(text, file, field)


def _record_texts(name: str, field: str) -> Iterator[str]:
    """Documents as a build reads them. A bad record is an error: without it, the perplexity is that of another text."""
    rejects, taken = Rejects(), 0
    for text in require_texts(texts_of([name], RecordOptions(text_field=field), rejects), rejects):
        if rejects.total > rejects.counts["empty"]:
            break
        taken += 1
        yield text
    if rejects.total > rejects.counts["empty"]:
        raise rejects.error(f"reading {name}", taken + rejects.total)


def _rows(lines: str, file: Path, field: str) -> Iterator[str]:
    example = f'rows look like {{"{field}": "…"}}'
    # Not splitlines, which also splits at characters that are legal inside JSON strings.
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file} line {number} is not JSON: {error}", example) from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise DataError(f"{file} line {number} has no {field}", f"{example}; --field names another")
        yield row[field]


def text_windows(texts: Iterable[str], tokenizer: Path, length: int, windows: int) -> NDArray[np.int64]:
    """The first windows of the joined text, [windows, length]; fewer if the text is short."""
    loaded = tokenization.load(tokenizer)
    end = next(
        (loaded.token_to_id(text) for text in _end_texts(tokenizer) if loaded.token_to_id(text) is not None), None
    )
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


def _end_texts(tokenizer: Path) -> list[str]:
    settings = tokenizer.parent / "tokenizer_config.json"
    named = json.loads(settings.read_text()).get("eos_token") if settings.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    return [*([text] if text else []), tokenization.END_OF_TEXT, "</s>"]


def _run_rows(where: Path, config: RunConfig, length: int) -> Loader:
    """The run's own held-out data, in the rows that the run evaluates."""
    if is_hf_folder(where) or "imported_from" in read_run_facts(where):
        raise UsageError(f"{where} was not trained here and has no held-out data", "name text files with --data")
    model = replace(config.model, seq_len=length - 1) if length else config.model
    # Next to the run, whatever folder this command is started in.
    loaders = open_run_data(replace(config, model=model, runs_dir=str(where.resolve().parent)))
    if loaders.valid is None:
        raise DataError(f"{where} holds out no data", "name text files with --data")
    return loaders.valid


def _token_rows(data: str, config: RunConfig, length: int) -> Loader:
    """All rows of prepared tokens; of generated data, the validation rows."""
    source = DataConfig(path=data, valid_share=0.0, column=config.data.column)
    size = (length or config.model.seq_len) - 1
    loaders = build_loaders(source, size, config.model.vocab, 0, Path(config.runs_dir) / ".data")
    return loaders.valid or loaders.train


@torch.no_grad()
def _loss(model: Transformer, batch: Batch) -> tuple[float, int]:
    device = next(model.parameters()).device

    def on_device(array: NDArray[np.int64] | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)

    loss_sum = model(
        on_device(batch.inputs),
        on_device(batch.targets),
        positions_bt=on_device(batch.positions),
        documents_bt=on_device(batch.documents),
    )
    return float(loss_sum), batch.num_targets
