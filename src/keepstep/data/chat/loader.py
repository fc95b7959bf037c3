"""Conversations as training rows: rendered, encoded and masked once, cached on disk, packed by length.

Compared with pretraining, only the loss mask and the documents of a row differ: the loop gets the same `Batch`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import ChatConfig, DataConfig
from keepstep.core.errors import DataError
from keepstep.core.files import write_json
from keepstep.core.ranks import from_environment
from keepstep.core.verbosity import progress
from keepstep.data import tokenization
from keepstep.data.batch import Batch, Rows, RowSource, to_batch
from keepstep.data.cache_folder import FACTS, prepare_folder, read_facts
from keepstep.data.chat import files
from keepstep.data.chat.files import NumberedRow, RejectedRow
from keepstep.data.chat.generate import GENERATED
from keepstep.data.chat.masks import MaskedTokens, encode
from keepstep.data.chat.reasons import frequent_reasons
from keepstep.data.chat.rows import BadRow
from keepstep.data.chat.template import ChatTemplate, find_template
from keepstep.data.datasets import vocabulary_error
from keepstep.data.loader import Loader, Loaders, validation_loader
from keepstep.data.order import IndexArray
from keepstep.data.packing import pack

_VERSION = 12
_VALID_ROWS = 512
_Item = tuple[str, NumberedRow | RejectedRow]


def is_chat(data: DataConfig, chat: ChatConfig) -> bool:
    """Whether `data.path` holds conversations and not text or tokens: by name, by format, or by its first row."""
    if data.path == GENERATED:
        return True
    if data.blend or not files.conversation_files(Path(data.path)):
        return False
    return chat.format != "auto" or files.holds_conversations(Path(data.path))


def refuse_mixed_conversations(data: DataConfig) -> None:
    """Raise if one of several data sets holds conversations, which would be read as plain text."""
    for path in data.blend or (data.path.split(",") if "," in data.path else ()):
        if path == GENERATED or files.holds_conversations(Path(path), data.text_field):
            raise DataError(
                f"data.{'blend' if data.blend else 'path'} names {path}, which holds conversations, but only text and "
                "tokens can be mixed",
                "put the conversation files into one folder, and name that as data.path",
            )


class FullLossFirstLoader(Loader):
    """Every token of the first samples carries a loss; later samples follow their loss mask."""

    def __init__(self, source: RowSource, full_loss_samples: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(source, seed=seed, shuffle=shuffle)
        self._full_loss_samples = full_loss_samples

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        read = self._source.read(self._order(first_sample, count))
        full = np.arange(first_sample, first_sample + count) < self._full_loss_samples
        loss = None if read.loss is None else read.loss | full[:, None]
        return to_batch(replace(read, loss=loss), first_sample)


@dataclass(frozen=True)
class ChatSource:
    """Everything that decides the rows."""

    data: DataConfig
    chat: ChatConfig
    seq_len: int
    vocab: int
    seed: int
    tokenizer: Path | None = None
    """The tokenizer of the weights that training starts from; `data.tokenizer` has precedence."""
    full_loss_samples: int = 0
    """First samples in which every token carries a loss."""


def build_chat_loaders(given: ChatSource, cache_dir: Path) -> Loaders:
    """Prepare at first use, then open."""
    tokenizer = _tokenizer_path(given, cache_dir)
    size = tokenization.ids_below(tokenization.load(tokenizer))
    if size > given.vocab:
        raise vocabulary_error(f"the tokenizer {tokenizer} has ids up to {size - 1}", given.vocab, size)
    source = replace(given, tokenizer=tokenizer)
    folder = prepare_folder(cache_dir / f"chat-{_key(source, tokenizer)}", lambda part: _prepare(part, source))
    prepared = read_facts(folder)
    if prepared["rejected"] and not from_environment().rank:
        # At every start, not only when the rows are prepared: this run leaves them out, too.
        print(
            f"conversations: {prepared['rejected']:,} rows rejected, with reasons: {folder / 'rejects.jsonl'}",
            *frequent_reasons(folder / "rejects.jsonl"),
            sep="\n  ",
            file=sys.stderr,
        )
    packing = source.chat.packing
    train, valid = (ChatRows(folder / name, source.seq_len, packing=packing) for name in ("train", "valid"))
    if not train.count:
        raise DataError(
            f"{source.data.path} holds no conversation to train on",
            "; ".join([*frequent_reasons(folder / "rejects.jsonl"), f"all rejected rows: {folder / 'rejects.jsonl'}"]),
        )
    facts = {"kind": "chat", "path": str(folder), **prepared, "rows": train.count, "filled": train.filled}
    return Loaders(
        FullLossFirstLoader(train, source.full_loss_samples, seed=source.seed, shuffle=source.data.shuffle),
        validation_loader(valid),
        tokenizer,
        facts,
        names=(source.data.path,),
    )


def _tokenizer_path(source: ChatSource, cache_dir: Path) -> Path:
    found = tokenization.named_tokenizer(source.data.tokenizer) or source.tokenizer
    if found is not None:
        return found
    if source.data.path == GENERATED:
        from keepstep.data.chat.tokenizer import prepare_tokenizer

        return prepare_tokenizer(cache_dir, source.seed)
    raise DataError(
        "conversations need a tokenizer, and none was named",
        "data.tokenizer=PATH/tokenizer.json, or finetune.start_from a folder that has one",
    )


def _key(source: ChatSource, tokenizer: Path) -> str:
    paths = [] if source.data.path == GENERATED else files.conversation_files(Path(source.data.path))
    paths += files.conversation_files(Path(source.data.valid_path)) if source.data.valid_path else []
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    template = find_template(tokenizer, source.chat.template)
    named = [
        _VERSION, sys.version if source.data.path == GENERATED else "", source.data.path, source.data.valid_path,
        source.data.valid_share, source.seq_len, source.seed, source.chat.format, source.chat.loss_on,
        source.chat.generated_rows, stats, template.source, template.bos, template.eos,
        hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:12]


def _prepare(folder: Path, source: ChatSource) -> None:
    assert source.tokenizer is not None, "chosen before anything is prepared"
    template = find_template(source.tokenizer, source.chat.template)
    tokenizer = tokenization.load(source.tokenizer)
    progress(f"conversations: rendering and encoding {source.data.path}")
    splits: dict[str, list[MaskedTokens]] = {"train": [], "valid": []}
    rejected = 0
    with files.atomic_text_file(folder / "rejects.jsonl") as rejects:
        for name, item in _ahead(_items(source), template):
            row = item if isinstance(item, RejectedRow) else _encode(item, template, tokenizer, source)
            if isinstance(row, RejectedRow):
                rejects.write(row.line())
                rejected += 1
            else:
                splits[name].append(row)
    for name, rows in splits.items():
        np.save(folder / f"{name}.tokens.npy", np.concatenate([np.zeros(0, np.int32), *(row.tokens for row in rows)]))
        loss = np.concatenate([np.zeros(0, np.bool_), *(row.loss for row in rows)])
        np.save(folder / f"{name}.loss.npy", np.packbits(loss))
        np.save(folder / f"{name}.lengths.npy", np.array([len(row.tokens) for row in rows], dtype=np.int64))
    train = splits["train"]
    facts = {
        "conversations": len(train),
        "valid_conversations": len(splits["valid"]),
        "tokens": sum(len(row.tokens) for row in train),
        "loss_tokens": int(sum(row.loss.sum() for row in train)),
        "rejected": rejected,
        "template_marks_turns": template.marks_turns,
    }
    write_json(folder / FACTS, facts)
    progress(f"conversations: {facts['conversations']:,} to train on, {facts['tokens']:,} tokens")


def _ahead(items: Iterator[_Item], template: ChatTemplate) -> Iterator[_Item]:
    """The same items; their conversations are rendered a batch at a time."""
    while batch := list(islice(items, 64)):
        template.render_ahead([item.conversation for _, item in batch if isinstance(item, NumberedRow)])
        yield from batch


def _items(source: ChatSource) -> Iterator[_Item]:
    data = source.data
    if data.path == GENERATED:
        yield from (("train", row) for row in files.generated_rows(source.chat.generated_rows, source.seed, "train"))
        yield from (("valid", row) for row in files.generated_rows(_VALID_ROWS, source.seed, "test"))
        return
    for item in files.read_conversations(Path(data.path), source.chat.format):
        is_valid = (
            isinstance(item, NumberedRow)
            and not data.valid_path
            and files.is_validation_row(item.conversation, data.valid_share, source.seed)
        )
        yield "valid" if is_valid else "train", item
    if data.valid_path:
        yield from (("valid", item) for item in files.read_conversations(Path(data.valid_path), source.chat.format))


def _encode(
    item: NumberedRow, template: ChatTemplate, tokenizer: Any, source: ChatSource
) -> MaskedTokens | RejectedRow:
    room, loss_on = source.seq_len + 1, source.chat.loss_on
    try:
        row = encode(item.conversation, template, tokenizer, loss_on)
    except BadRow as bad:
        return item.reject(str(bad))
    if len(row.tokens) > room:
        return item.reject(f"{len(row.tokens)} tokens do not fit a row of {room} (model.seq_len + 1)")
    if not row.loss[1:].any():
        return item.reject(f"no token of it carries a loss (chat.loss_on is {loss_on})")
    return row


class ChatRows:
    """Prepared conversations as rows of `length` + 1 tokens; with packing, several in one row."""

    def __init__(self, prefix: Path, length: int, *, packing: bool) -> None:
        self._tokens = np.load(f"{prefix}.tokens.npy", mmap_mode="r")
        self._lengths = np.load(f"{prefix}.lengths.npy")
        self._loss = np.load(f"{prefix}.loss.npy", mmap_mode="r")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        self._width = length + 1
        self._rows = pack(self._lengths, self._width) if packing else [[i] for i in range(len(self._lengths))]
        self.count = len(self._rows)

    @property
    def filled(self) -> float:
        """Share of the rows that is tokens and not padding."""
        return float(self._lengths.sum()) / max(1, self.count * self._width)

    def read(self, indices: IndexArray) -> Rows:
        """Concatenate the conversations of each row; padding is a document of its own without loss."""
        tokens = np.zeros((len(indices), self._width), dtype=np.int64)
        documents = np.zeros_like(tokens)
        loss = np.zeros(tokens.shape, dtype=np.bool_)
        filled = np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            at = 0
            for place, number in enumerate(self._rows[index]):
                start, size = int(self._starts[number]), int(self._lengths[number])
                tokens[row, at : at + size] = self._tokens[start : start + size]
                documents[row, at : at + size] = place
                loss[row, at : at + size] = self._bits(start, size)
                at += size
            documents[row, at:] = len(self._rows[index])
            filled[row] = at
        return Rows(tokens, documents, filled, loss)

    def _bits(self, start: int, size: int) -> NDArray[np.bool_]:
        first = start // 8
        bits = np.unpackbits(self._loss[first : -(-(start + size) // 8)])
        return bits[start - first * 8 :][:size].astype(np.bool_)
