"""A data set in numbers, a picture and a few decoded samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data.opening import DataSet, MdsSet, MegatronSet, open_data
from keepstep.data.stores import MdsDocuments, MegatronDocuments

_DOCUMENTS_HASHED = 200_000
"""Duplicates are counted among this many documents, evenly spread over larger sets."""
_IDS_BELOW = 1 << 28
"""A thousand times the largest vocabulary in use."""


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    kind: str
    documents: int
    tokens: int
    mean: float
    median: float
    p95: float
    longest: int
    shortest: int
    vocab_used: int
    largest_id: int
    documents_hashed: int
    duplicates: int
    lengths: NDArray[np.int64]


def open_documents(
    path: str, cache_dir: Path, column: str = "tokens", tokenizer: Path | None = None
) -> tuple[DataSet, Any]:
    """A data set and its documents by number; raw text needs a tokenizer."""
    data = open_data(path, DataConfig(path=path, column=column, tokenizer=str(tokenizer or "")), cache_dir)
    if isinstance(data, MdsSet):
        return data, MdsDocuments(data.store, range(data.store.samples))
    assert isinstance(data, MegatronSet)
    return data, MegatronDocuments(data.readers, [range(count) for count in data.counts])


def inspect(data: DataSet, documents: Any) -> Inspection:
    """Read lengths and a sample of the documents of what `open_documents` found."""
    lengths: NDArray[np.int64] = documents.lengths
    step = max(1, len(lengths) // _DOCUMENTS_HASHED)
    chosen = range(0, len(lengths), step)
    seen: set[bytes] = set()
    used = np.zeros(1 << 16, dtype=bool)
    for tokens in _documents(documents, chosen):
        seen.add(hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest())
        used = _with_ids(used, tokens, documents.name)
    some = lengths if len(lengths) else np.zeros(1, np.int64)
    ids = np.flatnonzero(used)
    return Inspection(
        data.kind,
        len(lengths),
        int(lengths.sum()),
        float(some.mean()),
        float(np.median(some)),
        float(np.percentile(some, 95)),
        int(some.max()),
        int(some.min()),
        len(ids),
        int(ids[-1]) if len(ids) else -1,
        len(chosen),
        len(chosen) - len(seen),
        lengths,
    )


def _with_ids(used: NDArray[np.bool_], tokens: NDArray[Any], name: str) -> NDArray[np.bool_]:
    """The ids in use, those of one more document with them."""
    largest = _largest_id(tokens, name)
    if largest >= len(used):
        used = np.concatenate([used, np.zeros(largest + 1 - len(used), dtype=bool)])
    used[np.asarray(tokens, dtype=np.int64)] = True
    return used


def _largest_id(tokens: NDArray[Any], name: str) -> int:
    """-1 where there is no token; a number that can be none is an error, and never the size of an array."""
    if not len(tokens):
        return -1
    lowest, largest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or largest >= _IDS_BELOW:
        raise DataError(
            f"{name} holds token {lowest if lowest < 0 else largest}, and ids are from 0 to {_IDS_BELOW - 1:,}",
            "the data is damaged, or its numbers are no tokens: build or copy it again",
        )
    return largest


def _documents(documents: Any, chosen: range) -> Iterator[NDArray[Any]]:
    for number in chosen:
        yield documents.part(number, 0, int(documents.lengths[number]))


def histogram(lengths: NDArray[np.int64], width: int = 40) -> list[str]:
    """Document lengths as bars of text, by powers of two."""
    if not len(lengths):
        return []
    bins = np.bincount(np.ceil(np.log2(np.maximum(1, lengths))).astype(np.int64))
    top = int(bins.max())
    first = int(np.flatnonzero(bins)[0])
    return [
        f"≤ {1 << power:>9,}  {'█' * round(width * int(count) / top):<{width}} {int(count):,}"
        for power, count in enumerate(bins.tolist())
        if power >= first
    ]


def plot_lengths(lengths: NDArray[np.int64], path: Path) -> None:
    """The same histogram as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    edges = np.geomspace(1, max(2, int(lengths.max(initial=1))), 40)
    axes.hist(np.maximum(1, lengths), bins=edges.tolist(), color="#2a6f97")
    axes.set_xscale("log")
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    axes.set_title(f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def decoded_samples(documents: Any, tokenizer: Path, numbers: list[int], tokens: int) -> list[str]:
    """The start of these documents as text."""
    from keepstep.data.tokenize import load

    decode = load(tokenizer).decode
    found = []
    for number in numbers:
        part = documents.part(number, 0, min(tokens, int(documents.lengths[number])))
        _largest_id(part, documents.name)
        found.append(decode(part.tolist(), skip_special_tokens=False))
    return found
