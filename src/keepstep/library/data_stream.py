"""`keepstep.data.open`: the rows of a run as an iterator with exact state, for training loops of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from keepstep.config.load import load_config
from keepstep.core.errors import DataError, UsageError
from keepstep.core.messages import invalid_value
from keepstep.data.batch import Batch
from keepstep.data.loader import Loader, changed_order
from keepstep.library.overrides import hints_in_traceback, words_of


class DataStream:
    """Batches one after another. The state is one number, equal on every rank, and valid for any number of ranks."""

    def __init__(self, loader: Loader, batch: int, rank: int, ranks: int, *, endless: bool) -> None:
        self._loader, self._batch, self._rank, self._ranks = loader, batch, rank, ranks
        self._end = None if endless else loader.samples_per_epoch
        self._sample = 0

    @property
    def samples_per_epoch(self) -> int:
        """Rows before the data repeats."""
        return self._loader.samples_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return this rank's rows of the next batch: `inputs` and `targets` are int64 [rows, tokens]."""
        rows = self._batch if self._end is None else min(self._batch, self._end - self._sample)
        first, last = (rows * number // self._ranks for number in (self._rank, self._rank + 1))
        # Of the last rows a rank may get none: then the pass is over on all ranks.
        if rows < self._ranks:
            raise StopIteration
        batch = self._loader.rows(self._sample + first, last - first)
        self._sample += rows
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what decides the order, as values that JSON can hold."""
        return {"sample": self._sample, "order": self._loader.order_facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which `state_dict` was called; DataError if data or order are others now."""
        with hints_in_traceback():
            if state["order"] != self._loader.order_facts:
                changed = changed_order(state["order"], self._loader.order_facts)
                raise DataError(f"the state is of other data or another order: {changed}", "open the same data")
            self._sample = int(state["sample"])


def open_stream(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    split: Literal["train", "valid", "test"] = "train",
    batch: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    **fields: Any,
) -> DataStream:
    """Open the data of a run.yaml: the same rows in the same order as the run reads them.

    `overrides` and keyword arguments are those of `keepstep.train`. `batch` is the number of rows over all ranks, by
    default `global_batch`; each of `ranks` reads its share. Training rows have no end; `valid` and `test` are one pass.
    """
    from keepstep.interop.run_data import open_run_data

    with hints_in_traceback():
        loaded = load_config(None if config is None else Path(config), words_of(overrides, fields)).config
        rows = loaded.global_batch if batch is None else batch
        if not 0 <= rank < ranks <= rows:
            rule = f"must be at least 0 and below ranks ({ranks}), and ranks at most batch ({rows})"
            raise UsageError(invalid_value("rank", rank, rule), "rank=0, ranks=1")
        loader: Loader | None = getattr(open_run_data(loaded), split)
        if loader is None:
            raise DataError(f"the run has no {split} data", f"set data.{split}_path or data.{split}_share")
        return DataStream(loader, rows, rank, ranks, endless=split == "train")
