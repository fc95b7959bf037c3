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
from keepstep.data.opening import holds_tokens
from keepstep.data.records import RecordOptions, Rejects, not_nothing, texts_of
from keepstep.data.sources import kind_of
from keepstep.evaluate.perplexity import PerplexityResult, perplexity
from keepstep.models.hf_folder import is_hf_folder
from keepstep.models.transformer import Transformer
from keepstep.train.losses import count_targets
from keepstep.train.run import open_data
from keepstep.train.start import find_tokenizer, open_device, run_facts, start_model, whole_model

_PLAIN = (".txt", ".jsonl", ".json")
_PACKED = tuple(f"{suffix}{packed}" for suffix in _PLAIN for packed in (".gz", ".zst"))
_TEXT = (*_PLAIN, *_PACKED, ".parquet")
"""What counts as text in a folder; a file that is named may be of any kind that `keepstep data build` reads."""


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

    With `start` it is that of the weights the run began with. `field` holds the text of a row.
    """
    _check_sizes(windows, length, batch)
    chosen = open_device(device)
    model, config, _ = start_model(where) if start else whole_model(where)
    if data and data != config.data.path and names_text(data):
        path = tokenizer or find_tokenizer(where)
        if path is None:
            raise DataError(f"{where} has no tokenizer.json", "name one with --tokenizer")
        rows = text_windows(read_texts(data, field), path, length or config.model.seq_len, windows)
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


def names_text(data: str) -> bool:
    """Whether text lies there rather than tokens, by the names of the files."""
    if "://" in data or not Path(data).is_dir():
        return data.startswith("hf://") or kind_of(data) is not None
    # What was built has a dataset.json and a tokenizer.json beside its tokens, and neither is text.
    return not holds_tokens(Path(data)) and any(item.name.endswith(_TEXT) for item in Path(data).iterdir())


def read_texts(data: str | Path, field: str = "text") -> Iterator[str]:
    """Documents: a text file is one, and so is each row of JSON lines or of a table, by its `field`."""
    if "://" in str(data):
        yield from _packed_texts(str(data), field)
        return
    path = Path(data)
    for file in sorted(item for item in path.iterdir() if item.name.endswith(_TEXT)) if path.is_dir() else [path]:
        if not file.is_file():
            raise DataError(f"{file} is missing", "give .txt, .jsonl[.gz|.zst] or .parquet files, or a folder of them")
        if file.suffix not in _PLAIN:
            yield from _packed_texts(str(file), field)
            continue
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        yield from [text] if file.suffix == ".txt" else _rows(text, file, field)


def _packed_texts(name: str, field: str) -> Iterator[str]:
    """Documents as a build reads them. One that cannot be used is an error: another text has another perplexity."""
    rejects, taken = Rejects(), 0
    for text in not_nothing(texts_of([name], RecordOptions(text_field=field), rejects), rejects):
        if rejects.total > rejects.counts["empty"]:
            break
        taken += 1
        yield text
    if rejects.total > rejects.counts["empty"]:
        raise rejects.complaint(f"reading {name}", taken + rejects.total)


def _rows(lines: str, file: Path, field: str) -> Iterator[str]:
    example = f'rows look like {{"{field}": "…"}}'
    # Not splitlines: JSON may hold other signs that it takes for the end of a line.
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file} line {number} is no JSON: {error}", example) from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise DataError(f"{file} line {number} has no {field}", f"{example}; --field names another")
        yield row[field]


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
