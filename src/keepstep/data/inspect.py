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
from keepstep.data.opening import DataSet, MdsSet, MegatronSet, open_data
from keepstep.data.stores import MdsDocuments, MegatronDocuments

_DOCUMENTS_HASHED = 200_000
"""Duplicates are counted among this many documents, evenly spread over larger sets."""


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


def open_documents(path: str, cache_dir: Path, column: str = "tokens") -> tuple[DataSet, Any]:
    """A data set and its documents by number."""
    data = open_data(path, DataConfig(path=path, column=column), cache_dir)
    if isinstance(data, MdsSet):
        return data, MdsDocuments(data.store, range(data.store.samples))
    assert isinstance(data, MegatronSet)
    return data, MegatronDocuments(data.readers, [range(count) for count in data.counts])


def inspect(path: str, cache_dir: Path, column: str = "tokens") -> Inspection:
    """Read lengths and a sample of the documents."""
    data, documents = open_documents(path, cache_dir, column)
    lengths: NDArray[np.int64] = documents.lengths
    step = max(1, len(lengths) // _DOCUMENTS_HASHED)
    chosen = range(0, len(lengths), step)
    seen: set[bytes] = set()
    used = np.zeros(1 << 16, dtype=bool)
    for tokens in _documents(documents, chosen):
        seen.add(hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest())
        if len(tokens):
            largest = int(tokens.max())
            if largest >= len(used):
                used = np.concatenate([used, np.zeros(largest + 1 - len(used), dtype=bool)])
            used[np.asarray(tokens, dtype=np.int64)] = True
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
    count = len(documents.lengths)
    return [
        decode(
            documents.part(number, 0, min(tokens, int(documents.lengths[number]))).tolist(), skip_special_tokens=False
        )
        for number in (number % count for number in numbers if count)
    ]
