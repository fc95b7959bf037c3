"""Inspect a data set: statistics, a histogram of lengths and a few decoded samples."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.data import tokenization
from keepstep.data.datasets import DataSet, MdsSet
from keepstep.data.open_dataset import open_data
from keepstep.data.stores import MdsDocuments, MegatronDocuments

_DOCUMENTS_HASHED = 200_000
"""Duplicates are counted among at most about this many documents, evenly spread over the set."""
_IDS_BELOW = 1 << 28
"""About a thousand times the largest vocabulary in use."""


def open_documents(
    path: str, cache_dir: Path, column: str = "tokens", tokenizer: Path | None = None
) -> tuple[DataSet, Any]:
    """A data set and its documents by number; raw text needs a tokenizer."""
    data = open_data(path, DataConfig(path=path, column=column, tokenizer=str(tokenizer or "")), cache_dir)
    if isinstance(data, MdsSet):
        return data, MdsDocuments(data.store, range(data.store.samples))
    for reader in data.readers:
        reader.check()
    return data, MegatronDocuments(data.readers, [range(count) for count in data.counts])


def inspect(data: DataSet, documents: Any) -> dict[str, Any]:
    """Statistics of a data set, from the lengths of all documents and the tokens of a sample of them."""
    lengths: NDArray[np.int64] = documents.lengths
    chosen = range(0, len(lengths), max(1, len(lengths) // _DOCUMENTS_HASHED))
    seen: set[bytes] = set()
    used = np.zeros(1 << 16, dtype=bool)
    for number in chosen:
        tokens = documents.part(number, 0, int(lengths[number]))
        seen.add(hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest())
        largest = _largest_id(tokens, documents.name)
        if largest >= len(used):
            used = np.concatenate([used, np.zeros(largest + 1 - len(used), dtype=bool)])
        used[np.asarray(tokens, dtype=np.int64)] = True
    some = lengths if len(lengths) else np.zeros(1, np.int64)
    ids = np.flatnonzero(used)
    return {
        "kind": data.kind,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "mean": float(some.mean()),
        "median": float(np.median(some)),
        "p95": float(np.percentile(some, 95)),
        "longest": int(some.max()),
        "shortest": int(some.min()),
        "vocab_used": len(ids),
        "largest_id": int(ids[-1]) if len(ids) else -1,
        "documents_hashed": len(chosen),
        "duplicates": len(chosen) - len(seen),
    }


def _largest_id(tokens: NDArray[Any], name: str) -> int:
    """The largest id, -1 without tokens; an impossible id is an error, so that it never becomes an array size."""
    if not len(tokens):
        return -1
    lowest, largest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or largest >= _IDS_BELOW:
        raise DataError(
            f"{name} holds token {lowest if lowest < 0 else largest}, but ids are from 0 to {_IDS_BELOW - 1:,}",
            "the data is damaged or does not hold tokens: build or copy it again",
        )
    return largest


def histogram(lengths: NDArray[np.int64]) -> list[str]:
    """Document lengths as bars of text, by powers of two."""
    if not len(lengths):
        return []
    bins = np.bincount(np.ceil(np.log2(np.maximum(1, lengths))).astype(np.int64))
    top = int(bins.max())
    first = int(np.flatnonzero(bins)[0])
    return [
        f"≤ {1 << power:>9,}  {'█' * round(40 * count / top):<40} {count:,}"
        for power, count in enumerate(bins.tolist())
        if power >= first
    ]


def plot_lengths(lengths: NDArray[np.int64], path: Path) -> None:
    """The histogram of lengths as an image."""
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
    """The start of these documents, decoded to text."""
    decode = tokenization.load(tokenizer).decode
    found = []
    for number in numbers:
        part = documents.part(number, 0, min(tokens, int(documents.lengths[number])))
        _largest_id(part, documents.name)
        found.append(decode(part.tolist(), skip_special_tokens=False))
    return found
