"""Documents of a data set that can be read by number, from local or remote files."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError
from keepstep.core.threads import in_threads
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Rows, check_vocab
from keepstep.data.formats.mds_reader import ShardEntry, TokenShard
from keepstep.data.formats.megatron import MegatronReader
from keepstep.data.order import IndexArray


class MegatronDocuments:
    """Ranges of documents of several .bin/.idx pairs, numbered consecutively."""

    def __init__(self, readers: Sequence[MegatronReader], ranges: Sequence[range]) -> None:
        self._readers = readers
        self._ranges = ranges
        self.name = str(readers[0].prefix)
        self._ends = np.cumsum([len(documents) for documents in ranges])
        pairs = zip(readers, ranges, strict=True)
        parts = [reader.document_lengths()[documents.start : documents.stop] for reader, documents in pairs]
        self.lengths: NDArray[np.int64] = np.concatenate(parts)

    def part(self, document: int, offset: int, count: int) -> NDArray[Any]:
        """Tokens of one document."""
        file = int(np.searchsorted(self._ends, document, side="right"))
        number = document - (int(self._ends[file - 1]) if file else 0) + self._ranges[file].start
        found = self._readers[file].document(number)[offset : offset + count]
        if len(found) != count:
            raise DataError(f"{self._readers[file].prefix} ends document {number} early", "build or copy it again")
        return found


class MdsStore:
    """The shards of an MDS data set, opened when they are first read, at most `open_limit` at a time."""

    def __init__(
        self,
        name: str,
        entries: Sequence[ShardEntry],
        open_shard: Callable[[ShardEntry], TokenShard],
        open_limit: int,
        *,
        is_remote: bool = False,
    ) -> None:
        self.name = name
        self.entries = entries
        self._open_shard = open_shard
        self.open_limit = open_limit
        self.is_remote = is_remote
        self._open: OrderedDict[int, TokenShard] = OrderedDict()
        self._lock = threading.Lock()
        self.ends: NDArray[np.int64] = np.cumsum([entry.samples for entry in entries], dtype=np.int64)

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def shard(self, number: int) -> TokenShard:
        """An open shard."""
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found
        shard = self._open_shard(self.entries[number])
        with self._lock:
            self._open[number] = shard
            while self.open_limit and len(self._open) > self.open_limit:
                self._open.popitem(last=False)
        return shard

    def open_together(self, numbers: Sequence[int]) -> dict[int, TokenShard]:
        """Several shards; those that are not open are fetched at the same time."""
        with self._lock:
            found = {number: self._open[number] for number in numbers if number in self._open}
        absent = [number for number in numbers if number not in found]
        if absent:
            found.update(zip(absent, in_threads(self.shard, absent, min(8, len(absent))), strict=True))
        return found

    @functools.cached_property
    def width(self) -> int:
        """Tokens of each sample if all samples are equally long, else 0.

        It follows from the first shard and the sizes of the others, and is checked when a shard is read.
        """
        first = next((number for number, entry in enumerate(self.entries) if entry.samples), None)
        if first is None:
            return 0
        shard = self.shard(first)
        # Apart from its samples and their offsets, a shard holds a header, which is the same in all shards.
        headers = {entry.bytes - entry.samples * (shard.sample_bytes + 4) for entry in self.entries if entry.samples}
        return shard.width if len(headers) == 1 else 0


class MdsRecordRows:
    """One row for each sample, for data that was built with the model's row length."""

    def __init__(self, store: MdsStore, samples: range, length: int, vocab: int) -> None:
        self._store = store
        self._first = samples.start
        self._length = length
        self._vocab = vocab
        self._width = store.width
        self._starts: IndexArray = store.ends - np.array([entry.samples for entry in store.entries], dtype=np.int64)
        self.count = len(samples)

    def read(self, indices: IndexArray) -> Rows:
        """Copy samples out of the mapped shards."""
        places = indices + self._first
        owners = np.searchsorted(self._store.ends, places, side="right")
        inside = places - self._starts[np.minimum(owners, len(self._starts) - 1)]
        tokens = np.empty((len(indices), self._length + 1), dtype=np.int64)
        text = tokens[:, : self._width]
        # Referenced until the rows are read: one batch may need more shards than stay open.
        shards = self._store.open_together(np.unique(owners).tolist())
        tables = {number: self._table(number, shard) for number, shard in shards.items()}
        for row, (owner, sample) in enumerate(zip(owners.tolist(), inside.tolist(), strict=True)):
            text[row] = tables[owner][sample]
        tokens[:, self._width :] = 0
        check_vocab(tokens, self._vocab, self._store.name)
        tokens[:, self._width :] = IGNORE_INDEX
        return Rows(tokens)

    def _table(self, number: int, shard: TokenShard) -> NDArray[Any]:
        if shard.width != self._width:
            raise DataError(
                f"{self._store.name} {self._store.entries[number].basename} holds samples of other lengths than "
                f"{self._width}",
                "build the data again with one --concat",
            )
        return shard.table


class MdsDocuments:
    """A range of samples of an MDS data set as documents of any length."""

    def __init__(self, store: MdsStore, samples: range) -> None:
        self._store = store
        self._first = samples.start
        self.name = store.name
        width = store.width
        if width and store.is_remote:
            # Reading the lengths would fetch every shard. A shard with other lengths is noticed when it is read.
            self.lengths: NDArray[np.int64] = np.full(len(samples), width, dtype=np.int64)
        else:
            sizes = [store.shard(number).lengths() for number in range(len(store.entries))]
            self.lengths = np.concatenate([*sizes, np.empty(0, np.int64)])[samples.start : samples.stop]

    def part(self, document: int, offset: int, count: int) -> NDArray[Any]:
        """Tokens of one sample."""
        place = document + self._first
        number = int(np.searchsorted(self._store.ends, place, side="right"))
        start = int(self._store.ends[number]) - self._store.entries[number].samples
        found = self._store.shard(number).tokens(place - start)
        if len(found) != self.lengths[document]:
            raise DataError(
                f"{self._store.name} {self._store.entries[number].basename} has a sample of another length "
                "than the rest",
                "build the data again",
            )
        return found[offset : offset + count]
