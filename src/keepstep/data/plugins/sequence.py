"""Rows of a plug-in (entry point group `keepstep.data`) that can be read by number.

Their order is ours, as for any other data, so a checkpoint needs to hold nothing about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import ConfigError
from keepstep.core.plugins import load_plugin
from keepstep.data.batch import Rows, RowSource, check_vocab
from keepstep.data.datasets import RowOptions
from keepstep.data.order import IndexArray

_STREAM = ("__next__", "state_dict", "load_state_dict")


class RowCheck:
    """Turns what a plug-in gives into rows, or says what is wrong with it."""

    def __init__(self, name: str, options: RowOptions) -> None:
        self.name, self._length, self._vocab = name, options.seq_len + 1, options.vocab

    def rows(self, given: Sequence[Any]) -> Rows:
        """Rows of seq_len + 1 token ids each."""
        tokens = np.stack([self._row(row) for row in given])
        check_vocab(tokens, self._vocab, self.name)
        return Rows(tokens)

    def _row(self, row: Any) -> NDArray[np.int64]:
        tokens = np.asarray(row)
        if tokens.shape == (self._length,) and np.issubdtype(tokens.dtype, np.integer):
            return tokens.astype(np.int64)
        raise ConfigError(
            f"{self.name} gives a row of shape {list(tokens.shape)} and type {tokens.dtype}",
            f"give rows of seq_len + 1 = {self._length} whole numbers: the last token is only a target",
        )


@dataclass(frozen=True)
class PluginSet:
    """A plug-in that has `__len__` and `__getitem__`. Each row counts as a document, so shares are held out of rows."""

    source: Any
    check: RowCheck
    kind: str = "plugin"
    tokenizer: Path | None = None

    @property
    def counts(self) -> list[int]:
        """All rows."""
        return [len(self.source)]

    @property
    def facts(self) -> dict[str, Any]:
        """Rows, which are whole as they are."""
        return {"rows": len(self.source)}

    def rows(self, ranges: Sequence[range], options: RowOptions) -> RowSource:  # noqa: ARG002 - as other data sets
        """Some of the rows."""
        return _PluginRows(self.source, self.check, ranges[0])


class _PluginRows:
    def __init__(self, source: Any, check: RowCheck, rows: range) -> None:
        self._source, self._check, self._rows = source, check, rows
        self.count = len(rows)

    def read(self, indices: IndexArray) -> Rows:
        """The rows with these numbers, in this order."""
        return self._check.rows([self._source[self._rows[index]] for index in indices.tolist()])


def make_source(name: str, options: RowOptions, field: str) -> Any:
    """What the plug-in returns: it is called with the run's sizes and `data.options`."""
    config = options.config
    if config.order == "gpt" or config.strategy != "pack" or config.separate_documents:
        raise ConfigError(
            f"{field} is {name}, whose rows are whole, but data.order, data.strategy or data.separate_documents is set",
            "leave these three out: the plug-in itself decides what is in a row",
        )
    factory = load_plugin("data", name, config.options, field)
    source = factory(seq_len=options.seq_len, vocab=options.vocab, seed=options.seed, **config.options)
    missing = [method for method in _STREAM if not hasattr(source, method)]
    if missing and not is_sequence(source):
        raise ConfigError(
            f"{field}: {name} returns a {type(source).__name__}, which has no {' and no '.join(missing)}",
            "return a sequence of rows, or an iterator of rows with state_dict and load_state_dict",
        )
    return source


def is_sequence(source: Any) -> bool:
    """Whether rows can be read by number; otherwise it is a stream."""
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def open_sequence(name: str, options: RowOptions, field: str) -> PluginSet:
    """A plug-in whose rows are read by number, with its first row checked."""
    source, check = make_source(name, options, field), RowCheck(name, options)
    if not is_sequence(source):
        raise ConfigError(
            f"{field}: {name} is a stream, but these rows must be read by number",
            "give it __len__ and __getitem__; a stream can only be data.path, not validation data or part of a blend",
        )
    if len(source):
        check.rows([source[0]])
    return PluginSet(source, check)
