"""Rows of a plug-in (entry point group `keepstep.data`) that come one after the other.

The order is the plug-in's own. Every process reads the whole stream and keeps its own rows, so the order is the same
for any number of processes. A checkpoint holds the state of the stream at or before the next sample.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.core.plugins import checked_state
from keepstep.data.batch import Batch, to_batch
from keepstep.data.datasets import RowOptions
from keepstep.data.loader import Loader, Loaders, build_loaders
from keepstep.data.plugins.sequence import RowCheck, is_sequence, make_source
from keepstep.data.tokenization import named_tokenizer

_ENDLESS = 1 << 40
"""Rows of a stream, whose end is not known."""


class StreamLoader(Loader):
    """Rows of an iterator. It remembers the iterator's state at some samples, and reads forward from there."""

    def __init__(self, stream: Any, check: RowCheck) -> None:
        self._stream, self._check = stream, check
        self._at = 0
        self._states: dict[int, Any] = {0: checked_state(stream, check.name)}
        """The state before each of these samples."""
        self._asked = (0, 0)
        """The last two positions that a state was asked for."""
        self._lock = threading.Lock()

    @property
    def samples_per_epoch(self) -> int:
        """More than any run reads."""
        return _ENDLESS

    @property
    def order_facts(self) -> dict[str, Any]:
        """The plug-in alone decides the order."""
        return {"plugin": self._check.name}

    def rows(self, first_sample: int, count: int) -> Batch:
        """The next rows, or some that were read not long ago."""
        # The feed reads ahead in a thread of its own, while the trainer may look at earlier rows.
        with self._lock:
            if first_sample < self._at:
                self._load(self._newest(first_sample))
            while self._at < first_sample:
                self._next()
            self._states[first_sample] = checked_state(self._stream, self._check.name)
            return to_batch(self._check.rows([self._next() for _ in range(count)]), first_sample)

    def state_at(self, samples: int) -> dict[str, Any]:
        """The newest known state from which these samples can be reached, and the sample that comes next there.

        It does not wait for the row that a thread may be reading.
        """
        if samples != self._asked[1]:
            self._asked = (self._asked[1], samples)
        # Nothing before the last two positions is read again.
        for sample, after in pairwise(sorted(self._states)):
            if after <= min(self._asked):
                del self._states[sample]
        newest = self._newest(samples)
        return {"sample": newest, "state": self._states[newest]}

    def _newest(self, samples: int) -> int:
        return max(sample for sample in list(self._states) if sample <= samples)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state_at` returned, perhaps in another process."""
        with self._lock:
            sample = int(saved["sample"])
            self._states, self._asked = {sample: saved["state"]}, (sample, sample)
            self._load(sample)

    def _load(self, sample: int) -> None:
        self._stream.load_state_dict(self._states[sample])
        self._at = sample

    def _next(self) -> Any:
        try:
            row = next(self._stream)
        except StopIteration:
            raise DataError(
                f"{self._check.name} ended after {self._at:,} rows",
                "let it start again with its first row, or set a shorter max_duration",
            ) from None
        self._at += 1
        return row


def build_stream_loaders(options: RowOptions, cache_dir: Path) -> Loaders | None:
    """The data of a run whose `data.path` is a stream; None where that plug-in is a sequence."""
    config, name = options.config, options.config.path
    stream, check = make_source(name, options, "data.path"), RowCheck(name, options)
    if is_sequence(stream):
        return None
    _check_state(stream, check)
    valid, test = (_held_out(path, options, cache_dir) for path in (config.valid_path, config.test_path))
    tokenizer = named_tokenizer(config.tokenizer)
    return Loaders(StreamLoader(stream, check), valid, tokenizer, {"kind": "plugin"}, test, (name,))


def _held_out(path: str, options: RowOptions, cache_dir: Path) -> Loader | None:
    """Rows of another data set, in one fixed order: a stream itself has no rows to hold out."""
    if not path:
        return None
    plain = DataConfig(
        path, valid_share=0.0, tokenizer=options.config.tokenizer, cache_dir=options.config.cache_dir,
        options=options.config.options,
    )  # fmt: skip
    return build_loaders(plain, options.seq_len, options.vocab, 0, cache_dir).train


def _check_state(stream: Any, check: RowCheck) -> None:
    """Read the first row twice, from the same state, and leave the stream before it."""
    state = checked_state(stream, check.name)
    first = check.rows([next(stream)])
    stream.load_state_dict(state)
    again = check.rows([next(stream)])
    stream.load_state_dict(state)
    if not np.array_equal(first.tokens, again.tokens):
        raise ConfigError(
            f"data.path: {check.name} gives another row after load_state_dict, so no run could resume with it",
            "save in state_dict everything that the next row depends on",
        )
