"""From sample numbers to batches: `Loader` reads any row of any epoch, `build_loaders` opens the data of a run.

The order is a pure function of (seed, global sample index). A checkpoint therefore stores one number, and any number of
ranks sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.core.plugins import is_plugin
from keepstep.data.batch import Batch, RowSource, SyntheticRows, document_positions, to_batch
from keepstep.data.datasets import DataSet, RowOptions, check_vocabulary, split_documents
from keepstep.data.open_dataset import open_data
from keepstep.data.order import Blend, sample_order
from keepstep.data.plugins.sequence import PluginSet, open_sequence
from keepstep.data.tokenization import named_tokenizer

_ORDER_BLOCK = 4096


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
        # A source may have its own order, such as GPTDataset's.
        return {"rows": self._source.count, "shuffle": False, **getattr(self._source, "order_facts", {})}

    def read_so_far(self, samples: int) -> list[tuple[int, int]]:
        """For each data set: its rows among the first `samples` of the stream, and all its rows."""
        return [(samples, self.samples_per_epoch)]

    def state_at(self, samples: int) -> dict[str, Any] | None:  # noqa: ARG002 - streams of plug-ins need it
        """What a checkpoint must hold to continue after so many samples; None where their number is enough."""
        return None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state_at` returned."""

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        return to_batch(self._source.read(self._order(first_sample, count)), first_sample)

    def _order(self, first: int, count: int) -> NDArray[np.int64]:
        """The row of each sample. Computed a block at a time: one lookup costs nearly as much as a whole block."""
        facts = self._source.count, self._seed, self._shuffle, self._window
        number, start = divmod(first, _ORDER_BLOCK)
        if start + count > _ORDER_BLOCK:
            return sample_order(first, count, *facts)
        known, order = self._block
        if known != number:
            order = sample_order(first - start, _ORDER_BLOCK, *facts)
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
        """The facts of each data set, and how they are mixed."""
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
        # Rows of a set without documents, such as synthetic ones, are one document each.
        parts = [np.zeros_like(batch.inputs) if batch.documents is None else batch.documents for batch in batches]
        documents = np.concatenate(parts)[back]
        return Batch(inputs, targets, document_positions(documents), documents, first_sample)


def changed_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first difference between two loaders' `order_facts`, in words."""
    for name in sorted({*before, *now}):
        then, today = before.get(name), now.get(name)
        if then == today:
            continue
        if name == "parts" and then and today and len(then) == len(today):
            number = next(number for number, pair in enumerate(zip(then, today, strict=True)) if pair[0] != pair[1])
            return f"data set {number + 1}: {changed_order(then[number], today[number])}"
        return f"{name} {then} then, {today} now"
    return "nothing"


@dataclass(frozen=True)
class Loaders:
    """What a run reads: training data, held-out data (in one fixed order) and what is known about them."""

    train: Loader
    valid: Loader | None
    tokenizer: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    test: Loader | None = None
    names: tuple[str, ...] = ()
    """Name of each data set in the training data; several when they are blended."""
    prompts: Any = None
    """For reinforcement learning: the prompts that batches name by number (`data.chat.prompts.PromptSet`)."""

    def positions(self, samples: int) -> dict[str, dict[str, float]]:
        """How far each data set has been read after this many samples: rows of its own, and epochs of it."""
        read = zip(self.names, self.train.read_so_far(samples), strict=True)
        return {name: {"samples": count, "epoch": count / rows} for name, (count, rows) in read}


def build_loaders(config: DataConfig, seq_len: int, vocab: int, seed: int, cache_dir: Path) -> Loaders:
    """Open the data of a run; `demo` and raw text are prepared in `cache_dir` at first use."""
    options = RowOptions(config, seq_len, vocab, seed)
    if config.blend:
        opened = [_open(path, options, cache_dir) for path in config.blend]
        weights = list(config.blend.values())
        return Loaders(
            BlendedLoader([one.train for one in opened], weights),
            # A validation path of its own is the same for each set: a blend would repeat its rows.
            opened[0].valid if config.valid_path else _blended([one.valid for one in opened], weights),
            opened[0].tokenizer,
            {"kind": "blend", "parts": [one.facts for one in opened]},
            opened[0].test if config.test_path else _blended([one.test for one in opened], weights),
            tuple(config.blend),
        )
    return _open(config.path, options, cache_dir)


def _blended(parts: Sequence[Loader | None], weights: Sequence[float]) -> Loader | None:
    """A blend of those parts that have rows."""
    known = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part is not None]
    return BlendedLoader([part for part, _ in known], [weight for _, weight in known]) if known else None


def _open(path: str, options: RowOptions, cache_dir: Path) -> Loaders:
    config = options.config
    match path:
        case "synthetic":
            # Validation rows are from row numbers that no training run reaches.
            shape = options.seq_len, options.vocab, options.seed
            sources: list[RowSource | None] = [SyntheticRows(*shape, first) for first in (0, 1 << 39)]
            tokenizer, facts = None, {"kind": "synthetic"}
        case "demo":
            from keepstep.data.cache_folder import read_facts
            from keepstep.data.corpus import prepare_demo

            folder = prepare_demo(cache_dir, options.vocab)
            near = replace(config, cache_dir="")
            sources = [
                _all_rows(open_data(str(folder / name), near, cache_dir), options) for name in ("train", "valid")
            ]
            tokenizer, facts = folder / "tokenizer.json", {"kind": "demo", "path": str(folder), **read_facts(folder)}
        case _:
            data = _open_checked(path, options, cache_dir)
            sources = _split(data, options, cache_dir)
            tokenizer, facts = data.tokenizer, {"kind": data.kind, "path": path, **data.facts}
    train, valid, test = [*sources, None][:3]
    if train is None or not train.count:
        raise DataError(
            f"{path} holds no whole row of {options.seq_len} + 1 tokens", "give more data or a smaller model.seq_len"
        )
    # Synthetic rows have no order worth shuffling; GPTDataset's rows are shuffled already.
    shuffle = config.shuffle and path != "synthetic" and config.order != "gpt"
    return Loaders(
        Loader(train, seed=options.seed, shuffle=shuffle, window=config.shuffle_window),
        validation_loader(valid),
        named_tokenizer(config.tokenizer) or tokenizer,
        facts,
        validation_loader(test),
        (path,),
    )


def _open_checked(
    path: str, options: RowOptions, cache_dir: Path, field_name: str = "data.path"
) -> DataSet | PluginSet:
    """Open a data set and compare its ids with the vocabulary and the tokenizer of the run."""
    if is_plugin("data", path):
        return open_sequence(path, options, field_name)
    data = open_data(path, options.config, cache_dir, field_name)
    check_vocabulary(data, path, options.vocab, named_tokenizer(options.config.tokenizer))
    return data


def _split(data: DataSet | PluginSet, options: RowOptions, cache_dir: Path) -> list[RowSource | None]:
    """Training, validation and test rows, by share of the documents or from files of their own."""
    config = options.config
    held_out = (
        ("data.valid_path", config.valid_path, config.valid_share),
        ("data.test_path", config.test_path, config.test_share),
    )
    ranges = split_documents(data.counts, [0.0 if file else share for _, file, share in held_out])
    if sum(data.counts) and not any(ranges[0]):
        raise DataError(
            f"the data is {sum(data.counts)} document(s), and data.valid_share and data.test_share hold out all of it",
            "set both to 0, or give more documents: raw text has one a file, or one a line with data build --lines",
        )
    # Held-out rows have a fixed order of their own, whatever order training follows.
    plain = replace(options, config=replace(config, order="keepstep"))
    found: list[RowSource | None] = [data.rows(ranges[0], options)]
    for (field_name, file, share), documents in zip(held_out, ranges[1:], strict=True):
        if file:
            found.append(_all_rows(_open_checked(file, options, cache_dir, field_name), plain))
        else:
            found.append(data.rows(documents, plain) if share > 0 else None)
    return found


def _all_rows(data: DataSet | PluginSet, options: RowOptions) -> RowSource:
    return data.rows([range(count) for count in data.counts], options)


def validation_loader(source: RowSource | None) -> Loader | None:
    """One fixed shuffle for every run: the first rows represent all of them, and are the same rows each time."""
    return Loader(source, seed=0, shuffle=True) if source is not None and source.count else None
