"""Conversations as training rows: rendered, encoded and masked once, kept on disk, packed by length.

Only what the loss mask and the documents of a row are differs from pretraining: the loop sees the same `Batch`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import ChatConfig, DataConfig
from keepstep.core.errors import DataError
from keepstep.core.files import write_json
from keepstep.core.ranks import from_environment
from keepstep.data import tokenize
from keepstep.data.chat_files import (
    NumberedRow,
    Reject,
    conversation_files,
    held_out,
    holds_conversations,
    read_conversations,
    reject_line,
    written_whole,
)
from keepstep.data.chat_generate import Split, generate_rows
from keepstep.data.chat_masks import encode
from keepstep.data.chat_packing import pack
from keepstep.data.chat_rows import BadRow
from keepstep.data.chat_template import ChatTemplate, find_template
from keepstep.data.corpus import FACTS, prepare_folder, read_facts
from keepstep.data.loader import Batch, Loader, Loaders, to_batch
from keepstep.data.order import IndexArray
from keepstep.data.rows import Rows, RowSource

GENERATED = "toolcalls"
"""The data.path of the generated function-calling set."""
_VERSION = 11
_VALID_ROWS = 512


def is_chat(data: DataConfig, chat: ChatConfig) -> bool:
    """Whether `data.path` names conversations rather than text or tokens: by name, by format, or by its first row."""
    if data.path == GENERATED:
        return True
    if data.blend or not conversation_files(Path(data.path)):
        return False
    return chat.format != "auto" or holds_conversations(Path(data.path))


def refuse_several(data: DataConfig) -> None:
    """Raise where several sets are named and one is of conversations: read as plain text they would hold none."""
    for path in data.blend or (data.path.split(",") if "," in data.path else ()):
        if path == GENERATED or holds_conversations(Path(path), data.text_field):
            raise DataError(
                f"data.{'blend' if data.blend else 'path'} names {path}, which holds conversations: of several sets, "
                "only text and tokens can be mixed",
                "put the conversation files into one folder, and name that as data.path",
            )


class ReadingLoader(Loader):
    """Learns the whole text of its first samples, and what the mask says of all later ones."""

    def __init__(self, source: RowSource, whole_samples: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(source, seed=seed, shuffle=shuffle)
        self._whole_samples = whole_samples

    def rows(self, first_sample: int, count: int) -> Batch:
        """The samples [first_sample, first_sample + count) of the endless stream."""
        read = self._source.read(self._order(first_sample, count))
        whole = np.arange(first_sample, first_sample + count) < self._whole_samples
        loss = None if read.loss is None else read.loss | whole[:, None]
        return to_batch(replace(read, loss=loss), first_sample)


@dataclass(frozen=True)
class ChatSource:
    """Everything that decides what the rows are."""

    data: DataConfig
    chat: ChatConfig
    seq_len: int
    vocab: int
    seed: int
    tokenizer: Path | None = None
    """The one of the weights that training starts from; `data.tokenizer` goes before it."""
    whole_samples: int = 0
    """Samples that are learnt whole before the loss mask counts."""


def build_chat_loaders(given: ChatSource, cache_dir: Path) -> Loaders:
    """Prepare at first use, then open."""
    tokenizer = _tokenizer_path(given, cache_dir)
    size = tokenize.ids_below(tokenize.load(tokenizer))
    if size > given.vocab:
        raise DataError(
            f"the tokenizer {tokenizer} has ids up to {size - 1}, but model.vocab is {given.vocab}",
            f"set model.vocab={size}",
        )
    source = replace(given, tokenizer=tokenizer)
    folder = prepare_folder(cache_dir / f"chat-{_key(source, tokenizer)}", lambda aside: _prepare(aside, source))
    prepared = read_facts(folder)
    if prepared["rejected"] and not from_environment().rank:
        # At every start: rows prepared by an earlier one are as much left out of this one.
        print(
            f"conversations: {prepared['rejected']:,} rows refused, with reasons: {folder / 'rejects.jsonl'}",
            file=sys.stderr,
        )
    packing = source.chat.packing
    train, valid = (ChatRows(folder / name, source.seq_len, packing=packing) for name in ("train", "valid"))
    if not train.count:
        raise DataError(
            f"{source.data.path} holds no conversation to train on",
            f"{folder / 'rejects.jsonl'} says why rows were refused",
        )
    facts = {"kind": "chat", "path": str(folder), **prepared, "rows": train.count, "filled": train.filled}
    return Loaders(
        ReadingLoader(train, source.whole_samples, seed=source.seed, shuffle=source.data.shuffle),
        Loader(valid, seed=0, shuffle=True) if valid.count else None,
        tokenizer,
        facts,
        names=(source.data.path,),
    )


def _tokenizer_path(source: ChatSource, cache_dir: Path) -> Path:
    named = source.data.tokenizer
    if named:
        if not Path(named).is_file():
            raise DataError(f"data.tokenizer is {named!r}, which is missing", "give a tokenizer.json")
        return Path(named)
    if source.tokenizer is not None:
        return source.tokenizer
    if source.data.path == GENERATED:
        from keepstep.data.chat_tokenizer import prepare_tokenizer

        return prepare_tokenizer(cache_dir, source.seed)
    raise DataError(
        "conversations need a tokenizer, and none was named",
        "data.tokenizer=PATH/tokenizer.json, or finetune.start_from a folder that has one",
    )


def _key(source: ChatSource, tokenizer: Path) -> str:
    files = [] if source.data.path == GENERATED else conversation_files(Path(source.data.path))
    files += conversation_files(Path(source.data.valid_path)) if source.data.valid_path else []
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
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
    encoder = _Encoder(template, tokenize.load(source.tokenizer), source)
    print(f"conversations: rendering and encoding {source.data.path}", file=sys.stderr)
    sides: dict[str, _Side] = {"train": _Side(), "valid": _Side()}
    with written_whole(folder / "rejects.jsonl") as refused:
        for side, item in _items(source):
            kept = encoder.add(sides[side], item)
            if isinstance(kept, Reject):
                refused.write(reject_line(kept))
    for name, one in sides.items():
        one.write(folder / name)
    facts = {
        "conversations": len(sides["train"].lengths),
        "valid_conversations": len(sides["valid"].lengths),
        "tokens": sum(sides["train"].lengths),
        "loss_tokens": int(sum(mask.sum() for mask in sides["train"].losses)),
        "rejected": encoder.rejected,
        "template_marks_turns": template.marks_turns,
    }
    write_json(folder / FACTS, facts)
    print(f"conversations: {facts['conversations']:,} to train on, {facts['tokens']:,} tokens", file=sys.stderr)


def _items(source: ChatSource) -> Iterator[tuple[str, NumberedRow | Reject]]:
    data = source.data
    if data.path == GENERATED:
        yield from (("train", row) for row in _generated(source.chat.generated_rows, source.seed, "train"))
        yield from (("valid", row) for row in _generated(_VALID_ROWS, source.seed, "test"))
        return
    for item in read_conversations(Path(data.path), source.chat.format):
        aside = (
            isinstance(item, NumberedRow)
            and not data.valid_path
            and held_out(item.conversation, data.valid_share, source.seed)
        )
        yield "valid" if aside else "train", item
    if data.valid_path:
        yield from (("valid", item) for item in read_conversations(Path(data.valid_path), source.chat.format))


def _generated(count: int, seed: int, split: Split) -> Iterable[NumberedRow]:
    return (
        NumberedRow(GENERATED, number, row.conversation)
        for number, row in enumerate(generate_rows(count, seed, split), start=1)
    )


class _Side:
    """Conversations of one side, encoded."""

    def __init__(self) -> None:
        self.tokens: list[NDArray[np.int32]] = []
        self.losses: list[NDArray[np.bool_]] = []
        self.lengths: list[int] = []

    def write(self, prefix: Path) -> None:
        np.save(f"{prefix}.tokens.npy", np.concatenate(self.tokens or [np.zeros(0, np.int32)]))
        np.save(f"{prefix}.loss.npy", np.packbits(np.concatenate(self.losses or [np.zeros(0, np.bool_)])))
        np.save(f"{prefix}.lengths.npy", np.array(self.lengths, dtype=np.int64))


class _Encoder:
    def __init__(self, template: ChatTemplate, tokenizer: Any, source: ChatSource) -> None:
        self._template, self._tokenizer, self._source = template, tokenizer, source
        self.rejected = 0

    def add(self, side: _Side, item: NumberedRow | Reject) -> NumberedRow | Reject:
        """Encode one row onto its side; what cannot be used comes back as a reject."""
        checked = item if isinstance(item, Reject) else self._encode(side, item)
        self.rejected += isinstance(checked, Reject)
        return checked

    def _encode(self, side: _Side, item: NumberedRow) -> NumberedRow | Reject:
        room = self._source.seq_len + 1
        try:
            row = encode(item.conversation, self._template, self._tokenizer, self._source.chat.loss_on)
        except BadRow as bad:
            return item.reject(str(bad))
        if len(row.tokens) > room:
            return item.reject(f"{len(row.tokens)} tokens do not fit a row of {room} (model.seq_len + 1)")
        if not row.loss[1:].any():
            return item.reject(f"no token of it carries a loss (chat.loss_on is {self._source.chat.loss_on})")
        side.tokens.append(row.tokens)
        side.losses.append(row.loss)
        side.lengths.append(len(row.tokens))
        return item


class ChatRows:
    """Prepared conversations as rows of `length` + 1 tokens, several in one where packing is on."""

    def __init__(self, prefix: Path, length: int, *, packing: bool) -> None:
        self._tokens = np.load(f"{prefix}.tokens.npy", mmap_mode="r")
        self._lengths = np.load(f"{prefix}.lengths.npy")
        self._loss = np.load(f"{prefix}.loss.npy", mmap_mode="r")
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        self._width = length + 1
        self._rows = pack(self._lengths, self._width) if packing else [[i] for i in range(len(self._lengths))]

    @property
    def count(self) -> int:
        """Rows in one epoch."""
        return len(self._rows)

    @property
    def filled(self) -> float:
        """Share of the rows' places that hold a token rather than padding."""
        return float(self._lengths.sum()) / max(1, self.count * self._width)

    def read(self, indices: IndexArray) -> Rows:
        """Put the documents of each row one after the other; padding is a document of its own without loss."""
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
