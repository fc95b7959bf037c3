"""From sample numbers to batches: `Loader` reads any row of any epoch, `StepFeed` reads ahead for one rank.

The order is a pure function of (seed, global sample index), so all a checkpoint has to keep is one number, and any
number of ranks sees the same global batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.data.formats.megatron import MegatronReader, find_prefixes, is_prefix
from keepstep.data.order import sample_order
from keepstep.data.rows import Rows, RowSource, SyntheticRows, packed, split_documents

NO_LOSS = -100
"""Target that takes no part in the loss."""


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass, int64 [rows, seq]. `inputs` and `targets` are two views of one array."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64] | None
    documents: NDArray[np.int64] | None
    first_sample: int


class Loader:
    """Rows by global sample index; epochs follow one another without end."""

    def __init__(self, source: RowSource, *, seed: int, shuffle: bool) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle

    @property
    def samples_per_epoch(self) -> int:
        """Rows before the data repeats."""
        return self._source.count

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        order = sample_order(first_sample, count, self._source.count, self._seed, self._shuffle)
        return to_batch(self._source.read(order), first_sample)


def to_batch(rows: Rows, first_sample: int) -> Batch:
    """Shift rows into inputs and targets; with document numbers, no target reaches into the next document."""
    inputs, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    if rows.loss is not None:
        targets = np.where(rows.loss[:, 1:], targets, NO_LOSS)
    if rows.documents is None:
        return Batch(inputs, targets, None, None, first_sample)
    documents = rows.documents[:, :-1]
    crosses = documents != rows.documents[:, 1:]
    return Batch(inputs, np.where(crosses, NO_LOSS, targets), _positions(documents), documents, first_sample)


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places counted from the start of each document inside its row."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    starts = np.zeros_like(documents)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)


class StepFeed:
    """One rank's micro batches, step by step, read ahead by a thread.

    Micro batch j of a global batch belongs to rank j % ranks. An error in the thread is raised by `next_step`.
    """

    def __init__(
        self, loader: Loader, at: int, global_batch: int, microbatch: int, rank: int, ranks: int, prefetch: int
    ) -> None:
        if global_batch % (microbatch * ranks):
            raise ConfigError(
                f"global_batch is {global_batch}, but it must be a multiple of microbatch × data ranks "
                f"({microbatch} × {ranks})",
                f"global_batch={-(-global_batch // (microbatch * ranks)) * microbatch * ranks} would fit",
            )
        self._loader = loader
        self._global_batch = global_batch
        self._microbatch = microbatch
        self._offsets = [microbatch * number for number in range(rank, global_batch // microbatch, ranks)]
        self.position = at
        """Global samples consumed by the steps handed out so far, over all ranks."""
        self._closed = threading.Event()
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, prefetch))
        self._thread = threading.Thread(target=self._read_ahead, args=(at,), name="keepstep-data", daemon=True)
        self._thread.start()

    def next_step(self) -> list[Batch]:
        """This rank's micro batches of the next step."""
        batches = [self._take() for _ in self._offsets]
        self.position += self._global_batch
        return batches

    def close(self) -> None:
        """Stop reading ahead; safe to call twice."""
        self._closed.set()
        # The thread may be waiting for room in the queue.
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def _take(self) -> Batch:
        if self._closed.is_set():
            raise RuntimeError("the feed is closed")
        found = self._ready.get()
        if isinstance(found, BaseException):
            # Keep it for a caller who tries again: the thread is gone and would never answer.
            self._ready.put(found)
            raise found
        return found

    def _read_ahead(self, at: int) -> None:
        try:
            while not self._closed.is_set():
                for offset in self._offsets:
                    batch = self._loader.rows(at + offset, self._microbatch)
                    if not self._offer(batch):
                        return
                at += self._global_batch
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Batch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


@dataclass(frozen=True)
class Loaders:
    """What a run reads: training data, validation data (in one fixed order) and what is known about them."""

    train: Loader
    valid: Loader | None
    tokenizer: Path | None
    facts: dict[str, Any] = field(default_factory=dict)


def build_loaders(config: DataConfig, seq_len: int, vocab: int, seed: int, cache_dir: Path) -> Loaders:
    """Open the data of a run; `demo` is prepared in `cache_dir` at first use."""
    train: RowSource
    valid: RowSource
    match config.path:
        case "synthetic":
            rows = SyntheticRows(seq_len, vocab, seed)
            train, valid, tokenizer, facts = rows, _SecondHalf(rows), None, {"kind": "synthetic"}
        case "demo":
            train, valid, tokenizer, facts = _open_demo(seq_len, vocab, cache_dir)
        case _:
            train, valid, tokenizer, facts = _open_files(config, seq_len, vocab)
    if not train.count:
        raise DataError(
            f"{config.path} holds no whole row of {seq_len} + 1 tokens", "give more data or a smaller model.seq_len"
        )
    return Loaders(
        # Synthetic rows have no order worth shuffling.
        Loader(train, seed=seed, shuffle=config.shuffle and config.path != "synthetic"),
        # One fixed shuffle for every run: the first rows stand for all, and are the same rows each time.
        Loader(valid, seed=0, shuffle=True) if valid.count else None,
        tokenizer,
        facts,
    )


_Opened = tuple[RowSource, RowSource, Path | None, dict[str, Any]]


def _open_demo(seq_len: int, vocab: int, cache_dir: Path) -> _Opened:
    from keepstep.data.corpus import prepare_demo, read_facts

    folder = prepare_demo(cache_dir, vocab)
    readers = [MegatronReader(folder / name) for name in ("train", "valid")]
    train, valid = (packed([reader], [range(reader.documents)], seq_len, vocab) for reader in readers)
    return train, valid, folder / "tokenizer.json", {"kind": "demo", "path": str(folder), **read_facts(folder)}


def _open_files(config: DataConfig, seq_len: int, vocab: int) -> _Opened:
    path = Path(config.path)
    readers = open_readers(path)
    ranges, held_out = split_documents(readers, 0.0 if config.valid_path else config.valid_share)
    valid_readers = readers
    if config.valid_path:
        valid_readers = open_readers(Path(config.valid_path))
        held_out = [range(reader.documents) for reader in valid_readers]
    facts = {
        "kind": "megatron",
        "path": config.path,
        "documents": sum(map(len, ranges)),
        "tokens": sum(len(reader.tokens) for reader in readers),
    }
    train = packed(readers, ranges, seq_len, vocab)
    valid = packed(valid_readers, held_out, seq_len, vocab)
    return train, valid, _tokenizer_of(config, path), facts


def _tokenizer_of(config: DataConfig, path: Path) -> Path | None:
    """The tokenizer.json that was named, or else the one in the data's folder."""
    if config.tokenizer:
        if not Path(config.tokenizer).is_file():
            raise DataError(f"data.tokenizer is {config.tokenizer!r}, which is missing", "give a tokenizer.json")
        return Path(config.tokenizer)
    for folder in (path, path.parent):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None


class _SecondHalf:
    """Validation rows of the same synthetic chain, from numbers that no training run reaches."""

    def __init__(self, source: SyntheticRows) -> None:
        self._source = source
        self.count = source.count // 2

    def read(self, indices: NDArray[np.int64]) -> Rows:
        """Read from the second half."""
        return self._source.read(indices + self.count)


def open_readers(path: Path) -> Sequence[MegatronReader]:
    """Every .bin/.idx pair that `path` names: one prefix, or all in a folder."""
    prefixes = [path] if is_prefix(path) else find_prefixes(path) if path.is_dir() else []
    if path.suffix in (".bin", ".idx") and is_prefix(path.with_suffix("")):
        prefixes = [path.with_suffix("")]
    if not prefixes:
        raise DataError(
            f"data.path is {str(path)!r}, but no data is there",
            "give a folder or prefix that keepstep data build wrote, or demo, or synthetic",
        )
    return [MegatronReader(prefix) for prefix in prefixes]
