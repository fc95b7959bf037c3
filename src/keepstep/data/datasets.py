"""Opened data sets: documents in .bin/.idx pairs or MDS shards, rows over ranges of them, and a check of their ids.

A build records the largest id of its data. Otherwise the tokenizer next to the data gives a bound, and the data itself
is scanned, or sampled where it is large.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, NothingToReadError
from keepstep.core.ranks import from_environment
from keepstep.data import tokenization
from keepstep.data.batch import RowSource
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.gpt_order import GptRows
from keepstep.data.packing import BestFitRows, DocumentStore, OverflowRows, PackedRows, StreamRows, TruncRows
from keepstep.data.stores import MdsDocuments, MdsRecordRows, MdsStore, MegatronDocuments

_BLOCK_TOKENS = 1 << 16
_SCANNED_TOKENS = 1 << 26
_SCANNED_FOR_HINT = 1 << 31
_VOCAB_MULTIPLE = 64
"""A vocabulary size that is a multiple of this keeps the output matmul fast."""


@dataclass(frozen=True)
class RowOptions:
    """How documents become rows."""

    config: DataConfig
    seq_len: int
    vocab: int
    seed: int


@dataclass(frozen=True)
class MegatronSet:
    """One or more .bin/.idx pairs."""

    readers: Sequence[MegatronReader]
    tokenizer: Path | None
    build_facts: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "megatron"

    @property
    def counts(self) -> list[int]:
        """Documents of each pair."""
        return [reader.documents for reader in self.readers]

    @property
    def facts(self) -> dict[str, Any]:
        """Documents and tokens."""
        return {"documents": sum(self.counts), "tokens": sum(reader.token_count for reader in self.readers)}

    @property
    def largest_possible_id(self) -> int:
        """The largest id of any file's type."""
        return max(int(np.iinfo(reader.dtype).max) for reader in self.readers)

    def token_blocks(self, max_tokens: int) -> Iterator[NDArray[Any]]:
        """All tokens if they are at most `max_tokens`, else about as many, evenly spread; none of remote files."""
        local = [reader for reader in self.readers if not reader.is_remote]
        total = sum(reader.token_count for reader in local)
        step = _BLOCK_TOKENS * max(1, -(-total // max_tokens))
        for reader in local:
            for start in range(0, reader.token_count, step):
                yield reader.tokens[start : start + _BLOCK_TOKENS]

    def rows(self, ranges: Sequence[range], options: RowOptions) -> RowSource:
        """Rows over these documents."""
        config, seq_len, vocab = options.config, options.seq_len, options.vocab
        bounds = config.separate_documents
        if config.order == "gpt":
            if len(self.readers) != 1:
                raise ConfigError(
                    f"data.order is gpt, but the data is {len(self.readers)} files", "keepstep data merge joins them"
                )
            reader, documents, samples = self.readers[0], ranges[0], config.gpt_samples
            return GptRows(reader, documents, seq_len, samples, options.seed, vocab, bounds=bounds)
        if config.strategy == "pack":
            return PackedRows(self.readers, ranges, seq_len, vocab, bounds=bounds)
        return _document_rows(MegatronDocuments(self.readers, ranges), options)


@dataclass(frozen=True)
class MdsSet:
    """MDS shards under one index."""

    store: MdsStore
    tokenizer: Path | None
    build_facts: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "mds"
    largest_possible_id: int = int(np.iinfo(np.int64).max)

    @property
    def counts(self) -> list[int]:
        """All samples, as if in one file: an index numbers them consecutively."""
        return [self.store.samples]

    @property
    def facts(self) -> dict[str, Any]:
        """Samples and shards."""
        return {"documents": self.store.samples, "shards": len(self.store.entries)}

    def token_blocks(self, max_tokens: int) -> Iterator[NDArray[Any]]:
        """Samples of local shards; of a large set, those of some shards."""
        entries = [] if self.store.is_remote else self.store.entries
        numbers = [number for number, entry in enumerate(entries) if entry.samples]
        step = max(1, sum(entry.bytes for entry in entries) // (4 * max_tokens))
        for number in numbers[::step]:
            shard = self.store.shard(number)
            if shard.width:
                yield shard.table
            else:
                yield from map(shard.tokens, range(entries[number].samples))

    def rows(self, ranges: Sequence[range], options: RowOptions) -> RowSource:
        """Rows over these samples. Samples of the model's row length are used as they are."""
        config = options.config
        if config.order == "gpt":
            raise ConfigError("data.order is gpt, which needs .bin/.idx data, but this is MDS", "leave data.order out")
        if config.strategy == "pack" and self.store.width in (options.seq_len, options.seq_len + 1):
            if config.separate_documents:
                raise ConfigError(
                    "data.separate_documents needs the document boundaries, which concatenated MDS samples do not have",
                    "build .bin/.idx, or MDS without --concat",
                )
            return MdsRecordRows(self.store, ranges[0], options.seq_len, options.vocab)
        return _document_rows(MdsDocuments(self.store, ranges[0]), options)


DataSet = MegatronSet | MdsSet


def _document_rows(store: DocumentStore, options: RowOptions) -> RowSource:
    """Rows by the strategies that look at single documents."""
    config, seq_len, vocab = options.config, options.seq_len, options.vocab
    match config.strategy:
        case "trunc":
            return TruncRows(store, seq_len, vocab)
        case "overflow":
            return OverflowRows(store, seq_len, vocab, config.stride or seq_len)
        case "best_fit":
            return BestFitRows(store, seq_len, vocab)
        case "pack":
            return StreamRows(store, seq_len, vocab, bounds=config.separate_documents)


def split_documents(counts: Sequence[int], shares: Sequence[float]) -> list[list[range]]:
    """Split documents into training data and one part for each share, taken from the end in that order.

    A share above 0 gets at least one document. Returns one list of ranges for each part, with one range for each file.
    """
    total = sum(counts)
    sizes = [max(1, round(total * share)) if share > 0 else 0 for share in shares]
    bounds = [max(0, total - sum(sizes[number:])) for number in range(len(sizes))]
    bounds = [0, *bounds, total]
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return [
        [
            range(min(max(low - start, 0), count), min(max(high - start, 0), count))
            for start, count in zip(starts, counts, strict=False)
        ]
        for low, high in pairwise(bounds)
    ]


def check_vocabulary(data: DataSet, path: str, vocab: int, tokenizer: Path | None = None) -> None:
    """Raise if the data holds an id that `vocab` does not cover, or that the `tokenizer` of the run does not have."""
    recorded = data.build_facts.get("largest_id")
    if recorded is not None and tokenizer is not None:
        ids = tokenization.ids_below(tokenization.load(tokenizer))
        if recorded >= ids:
            raise NothingToReadError(
                f"{path} holds token {recorded}, but the tokenizer {tokenizer} has only {ids} ids",
                "name the tokenizer that the data was built with, or leave data.tokenizer out for the one next to the "
                "data",
            )
    known = data.largest_possible_id if recorded is None else recorded
    if known < vocab:
        return
    ids = tokenization.ids_below(tokenization.load(data.tokenizer)) if data.tokenizer else 0
    if recorded is None and 0 < ids <= vocab:
        return
    largest = _largest_id(data, _SCANNED_TOKENS) if recorded is None else recorded
    if largest >= vocab:
        # Without a tokenizer, only the data can tell which vocabulary is large enough.
        needed = ids or (largest if recorded is not None else _largest_id(data, _SCANNED_FOR_HINT)) + 1
        raise vocabulary_error(f"{path} holds token {largest}", vocab, max(needed, largest + 1))
    if ids and not from_environment().rank:
        print(
            f"notice: the tokenizer of {path} has ids up to {ids - 1}, but model.vocab is {vocab}; none of the tokens "
            f"that were checked is above {largest}",
            file=sys.stderr,
        )


def vocabulary_error(found: str, vocab: int, needed: int) -> NothingToReadError:
    """The error for ids that the vocabulary does not cover; `needed` is the number of ids that it has to cover."""
    enough = -(-needed // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    hint = f"model.vocab={enough} covers all {needed} ids; or use another tokenizer"
    return NothingToReadError(f"{found}, but model.vocab is {vocab}", hint)


def _largest_id(data: DataSet, max_tokens: int) -> int:
    """The largest id among the tokens of a scan, and the ids that the build put around each document."""
    largest = max((int(block.max()) for block in data.token_blocks(max_tokens) if block.size), default=-1)
    ends = [data.build_facts.get(key) for key in ("bos", "eos")]
    if data.tokenizer is None or not any(ends):
        return largest
    loaded = tokenization.load(data.tokenizer)
    return max([largest, *(tokenization.special_id(loaded, text, data.tokenizer) for text in ends if text)])
