"""From sample numbers to batches: `Loader` reads any row of any epoch, `StepFeed` reads ahead for one rank.

The order is a pure function of (seed, global sample index), so all a checkpoint has to keep is one number, and any
number of ranks sees the same global batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.data.blend import Blend
from keepstep.data.opening import Cut, DataSet, open_data
from keepstep.data.order import sample_order
from keepstep.data.rows import NO_LOSS, Rows, RowSource, SyntheticRows, split_documents

_ORDER_BLOCK = 4096
_CLOSE_WAIT_S = 1.0
_WAITING_S = 1.0


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

    def __init__(self, source: RowSource, *, seed: int, shuffle: bool, window: int = 0) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._window = window
        self._block = (-1, np.empty(0, np.int64))

    @property
    def samples_per_epoch(self) -> int:
        """Rows before the data repeats."""
        return self._source.count

    @property
    def order_facts(self) -> dict[str, Any]:
        """Everything that decides which row a sample number names."""
        facts = {"rows": self._source.count, "seed": self._seed, "shuffle": self._shuffle, "window": self._window}
        if self._shuffle:
            return facts
        # Rows may come in an order of their own, which is no less one.
        return {"rows": self._source.count, "shuffle": False, **getattr(self._source, "order_facts", {})}

    def read_so_far(self, samples: int) -> list[tuple[int, int]]:
        """Of each data set, the rows among the first `samples` of the stream, and the rows it has."""
        return [(samples, self.samples_per_epoch)]

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        return to_batch(self._source.read(self._order(first_sample, count)), first_sample)

    def _order(self, first: int, count: int) -> NDArray[np.int64]:
        """Which rows these samples are. A block is worked out at once: looking up one costs nearly as much as all."""
        number, start = divmod(first, _ORDER_BLOCK)
        if start + count > _ORDER_BLOCK:
            return sample_order(first, count, self._source.count, self._seed, self._shuffle, self._window)
        known, order = self._block
        if known != number:
            order = sample_order(
                number * _ORDER_BLOCK, _ORDER_BLOCK, self._source.count, self._seed, self._shuffle, self._window
            )
            self._block = (number, order)
        return order[start : start + count]


class BlendedLoader(Loader):
    """Several loaders mixed by weight; each goes through its own epochs at its own pace."""

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float]) -> None:
        self._loaders = loaders
        self._blend = Blend(weights)

    @property
    def samples_per_epoch(self) -> int:
        """Rows of all data sets together, each counted once."""
        return sum(loader.samples_per_epoch for loader in self._loaders)

    @property
    def order_facts(self) -> dict[str, Any]:
        """Each data set's own, and how they are mixed."""
        return {"weights": self._blend.counts, "parts": [loader.order_facts for loader in self._loaders]}

    def read_so_far(self, samples: int) -> list[tuple[int, int]]:
        """Each data set's share of the first `samples`, in the blend's order."""
        taken = self._blend.taken(samples).tolist()
        return [(count, loader.samples_per_epoch) for count, loader in zip(taken, self._loaders, strict=True)]

    def rows(self, first_sample: int, count: int) -> Batch:
        """Each data set's share of the range, put back in the blend's order."""
        chosen = self._blend.chosen(first_sample, count)
        starts = self._blend.taken(first_sample)
        batches = []
        places = []
        for number in np.unique(chosen).tolist():
            here = np.flatnonzero(chosen == number)
            batches.append(self._loaders[number].rows(int(starts[number]), len(here)))
            places.append(here)
        back = np.argsort(np.concatenate(places))
        inputs = np.concatenate([batch.inputs for batch in batches])[back]
        targets = np.concatenate([batch.targets for batch in batches])[back]
        if all(batch.documents is None for batch in batches):
            return Batch(inputs, targets, None, None, first_sample)
        documents = np.concatenate([_documents_of(batch) for batch in batches])[back]
        return Batch(inputs, targets, _positions(documents), documents, first_sample)


def _documents_of(batch: Batch) -> NDArray[np.int64]:
    """The document of each token; rows of a set that has none, made-up ones say, are one document each."""
    return np.zeros_like(batch.inputs) if batch.documents is None else batch.documents


def changed_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first place where two loaders' `order_facts` differ, in words."""
    for name in sorted({*before, *now}):
        then, today = before.get(name), now.get(name)
        if then == today:
            continue
        if name == "parts" and then and today and len(then) == len(today):
            number = next(number for number, pair in enumerate(zip(then, today, strict=True)) if pair[0] != pair[1])
            return f"data set {number + 1}: {changed_order(then[number], today[number])}"
        return f"{name} {then} then, {today} now"
    return "nothing"


def to_batch(rows: Rows, first_sample: int) -> Batch:
    """Shift rows into inputs and targets; no target is padding or, with document numbers, in the next document."""
    inputs, targets = rows.tokens[:, :-1], rows.tokens[:, 1:]
    if rows.loss is not None:
        targets = np.where(rows.loss[:, 1:], targets, NO_LOSS)
    if rows.filled is not None:
        padding = np.arange(1, rows.tokens.shape[1]) >= rows.filled[:, None]
        targets = np.where(padding, NO_LOSS, targets)
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


class GivenUpError(Exception):
    """Data did not come for as long as somebody would wait for it."""


class StepFeed:
    """One rank's micro batches, step by step, read ahead by a thread.

    Micro batch j of a global batch belongs to rank j % ranks; `uneven` lets some ranks have one more. No step touches
    samples of the ranges (first, count) in `skipped`. An error in the thread is raised by `next_step`.
    """

    def __init__(
        self,
        loader: Loader,
        at: int,
        global_batch: int,
        microbatch: int,
        rank: int,
        ranks: int,
        prefetch: int,
        *,
        uneven: bool = False,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        if global_batch % microbatch or (not uneven and global_batch % (microbatch * ranks)):
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
        """Global samples consumed by the steps handed out so far, over all ranks; skipped ones before them count."""
        self._skipped = tuple(skipped)
        self._prefetch = max(1, prefetch)
        self._start_reading()

    def next_step(
        self, waiting: Callable[[], None] = lambda: None, given_up: Callable[[], bool] = lambda: False
    ) -> list[Batch]:
        """This rank's micro batches of the next step; calls `waiting` about each second that they are not here yet.

        GivenUpError where it was `given_up` by then to wait for them.
        """
        batches = [self._take(waiting, given_up) for _ in self._offsets]
        self.position = step_start(self.position, self._global_batch, self._skipped) + self._global_batch
        return batches

    def rewind(self, at: int, skipped: Sequence[tuple[int, int]]) -> None:
        """Go on from another place, and leave these samples out."""
        self.close()
        self.position, self._skipped = at, tuple(skipped)
        self._start_reading()

    def _start_reading(self) -> None:
        # Each thread has a queue and an end of its own: one that is still busy with a file cannot disturb the next.
        self._closed = threading.Event()
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=self._prefetch)
        arguments = (self.position, self._skipped, self._ready, self._closed)
        self._thread = threading.Thread(target=self._read_ahead, args=arguments, name="keepstep-data", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading ahead; safe to call twice. Nobody waits for a store that is away: the thread ends by itself."""
        self._closed.set()
        self._thread.join(timeout=_CLOSE_WAIT_S)

    def _take(self, waiting: Callable[[], None], given_up: Callable[[], bool]) -> Batch:
        if self._closed.is_set():
            raise RuntimeError("the feed is closed")
        while True:
            try:
                found = self._ready.get(timeout=_WAITING_S)
                break
            except queue.Empty:
                waiting()
                if given_up():
                    raise GivenUpError from None
        if isinstance(found, BaseException):
            # Keep it for a caller who tries again: the thread is gone and would never answer.
            self._ready.put(found)
            raise found
        return found

    def _read_ahead(
        self,
        at: int,
        skipped: Sequence[tuple[int, int]],
        ready: queue.Queue[Batch | BaseException],
        closed: threading.Event,
    ) -> None:
        try:
            while self._offsets and not closed.is_set():
                at = step_start(at, self._global_batch, skipped)
                for offset in self._offsets:
                    if not _offer(self._loader.rows(at + offset, self._microbatch), ready, closed):
                        return
                at += self._global_batch
        except BaseException as error:
            _offer(error, ready, closed)


def _offer(item: Batch | BaseException, ready: queue.Queue[Batch | BaseException], closed: threading.Event) -> bool:
    while not closed.is_set():
        try:
            ready.put(item, timeout=0.2)
            return True
        except queue.Full:
            continue
    return False


def step_start(at: int, count: int, skipped: Sequence[tuple[int, int]]) -> int:
    """The first place from `at` on where `count` samples in a row touch none that are left out."""
    for first, length in sorted(skipped):
        if at < first + length and first < at + count:
            at = first + length
    return at


@dataclass(frozen=True)
class Loaders:
    """What a run reads: training data, held-out data (in one fixed order) and what is known about them."""

    train: Loader
    valid: Loader | None
    tokenizer: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    test: Loader | None = None
    names: tuple[str, ...] = ()
    """What the data sets of the training data are called, one for each that is blended."""

    def positions(self, samples: int) -> dict[str, dict[str, float]]:
        """How far each data set has been read after so many samples: rows of its own, and epochs of it."""
        read = zip(self.names, self.train.read_so_far(samples), strict=True)
        return {name: {"samples": count, "epoch": count / rows} for name, (count, rows) in read}


def build_loaders(config: DataConfig, seq_len: int, vocab: int, seed: int, cache_dir: Path) -> Loaders:
    """Open the data of a run; `demo` and raw text are prepared in `cache_dir` at first use."""
    cut = Cut(config, seq_len, vocab, seed)
    if config.blend:
        opened = [_open(path, cut, cache_dir) for path in config.blend]
        weights = list(config.blend.values())
        return Loaders(
            BlendedLoader([one.train for one in opened], weights),
            # Files of their own are the same for each set: blended with themselves their rows would come many times.
            opened[0].valid if config.valid_path else _blended([one.valid for one in opened], weights),
            opened[0].tokenizer,
            {"kind": "blend", "parts": [one.facts for one in opened]},
            opened[0].test if config.test_path else _blended([one.test for one in opened], weights),
            tuple(config.blend),
        )
    return _open(config.path, cut, cache_dir)


def _blended(parts: Sequence[Loader | None], weights: Sequence[float]) -> Loader | None:
    """A blend of those parts that have rows."""
    known = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part is not None]
    return BlendedLoader([part for part, _ in known], [weight for _, weight in known]) if known else None


def _open(path: str, cut: Cut, cache_dir: Path) -> Loaders:
    config = cut.config
    match path:
        case "synthetic":
            rows = SyntheticRows(cut.seq_len, cut.vocab, cut.seed)
            sources: list[RowSource | None] = [rows, _SecondHalf(rows), None]
            tokenizer, facts = None, {"kind": "synthetic"}
        case "demo":
            from keepstep.data.corpus import prepare_demo, read_facts

            folder = prepare_demo(cache_dir, cut.vocab)
            sources = [_whole(open_data(str(folder / name), config, cache_dir), cut) for name in ("train", "valid")]
            tokenizer, facts = folder / "tokenizer.json", {"kind": "demo", "path": str(folder), **read_facts(folder)}
        case _:
            data = open_data(path, config, cache_dir)
            sources = _split(data, cut, cache_dir)
            tokenizer, facts = data.tokenizer, {"kind": data.kind, "path": path, **data.facts}
    train, valid, test = [*sources, None][:3]
    if train is None or not train.count:
        raise DataError(
            f"{path} holds no whole row of {cut.seq_len} + 1 tokens", "give more data or a smaller model.seq_len"
        )
    # Synthetic rows have no order worth shuffling; GPTDataset's rows are shuffled already.
    shuffle = config.shuffle and path != "synthetic" and config.order != "gpt"
    return Loaders(
        Loader(train, seed=cut.seed, shuffle=shuffle, window=config.shuffle_window),
        _held_out(valid),
        _tokenizer(config, tokenizer),
        facts,
        _held_out(test),
        (path,),
    )


def _split(data: DataSet, cut: Cut, cache_dir: Path) -> list[RowSource | None]:
    """Training, validation and test rows, by share of the documents or from files of their own."""
    config = cut.config
    files = [config.valid_path, config.test_path]
    shares = [
        0.0 if file else share for file, share in zip(files, (config.valid_share, config.test_share), strict=True)
    ]
    ranges = split_documents(data.counts, shares)
    if sum(data.counts) and not any(ranges[0]):
        raise DataError(
            f"the data is {sum(data.counts)} document(s), and data.valid_share and data.test_share hold out all of it",
            "set both to 0, or give more documents: raw text has one a file, or one a line with data build --lines",
        )
    # Held-out rows are read in a fixed order of their own, whatever order training follows.
    plain = replace(cut, config=replace(config, order="keepstep"))
    found: list[RowSource | None] = [data.rows(ranges[0], cut)]
    fields = ("data.valid_path", "data.test_path")
    for field_name, file, share, documents in zip(fields, files, shares, ranges[1:], strict=True):
        if file:
            found.append(_whole(open_data(file, config, cache_dir, field_name), plain))
        else:
            found.append(data.rows(documents, plain) if share > 0 else None)
    return found


def _whole(data: DataSet, cut: Cut) -> RowSource:
    return data.rows([range(count) for count in data.counts], cut)


def _held_out(source: RowSource | None) -> Loader | None:
    # One fixed shuffle for every run: the first rows stand for all, and are the same rows each time.
    return Loader(source, seed=0, shuffle=True) if source is not None and source.count else None


def _tokenizer(config: DataConfig, beside: Path | None) -> Path | None:
    """The tokenizer.json that was named, or else the one stored with the data."""
    if not config.tokenizer:
        return beside
    if not Path(config.tokenizer).is_file():
        raise DataError(f"data.tokenizer is {config.tokenizer!r}, which is missing", "give a tokenizer.json")
    return Path(config.tokenizer)


class _SecondHalf:
    """Validation rows of the same synthetic chain, from numbers that no training run reaches."""

    def __init__(self, source: SyntheticRows) -> None:
        self._source = source
        self.count = source.count // 2

    def read(self, indices: NDArray[np.int64]) -> Rows:
        """Read from the second half."""
        return self._source.read(indices + self.count)
