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

from keepstep.config.schema import ChatConfig, DataConfig, RLConfig
from keepstep.core.errors import DataError
from keepstep.core.files import write_atomic, write_json
from keepstep.core.ranks import from_environment
from keepstep.core.verbosity import progress
from keepstep.data import tokenization
from keepstep.data.cache_folder import FACTS, prepare_folder, read_facts
from keepstep.data.chat import files
from keepstep.data.chat.files import NumberedRow, RejectedRow
from keepstep.data.chat.generated import GENERATED
from keepstep.data.chat.masks import MaskedTokens, encode_all, render
from keepstep.data.chat.preference import AnswerPair, PreferenceMethod, read_pairs
from keepstep.data.chat.prepared_rows import ChatRows, FullLossFirstLoader
from keepstep.data.chat.prompts import PromptLoader, PromptSet, until_answer
from keepstep.data.chat.rows import BadRow
from keepstep.data.chat.template import ChatTemplate, Rendered, find_template
from keepstep.data.datasets import vocabulary_error
from keepstep.data.loader import Loaders, validation_loader

_VERSION = 12
_VALID_ROWS = 512
_TOGETHER = 256
"""Conversations that are encoded together."""
_Item = tuple[str, NumberedRow | AnswerPair | RejectedRow]


def is_chat(data: DataConfig, chat: ChatConfig) -> bool:
    """Whether `data.path` holds conversations and not text or tokens: by name, by format, or by its first row."""
    if data.path in GENERATED:
        return True
    if data.blend or not files.conversation_files(Path(data.path)):
        return False
    return chat.format != "auto" or files.holds_conversations(Path(data.path))


def refuse_mixed_conversations(data: DataConfig) -> None:
    """Raise if one of several data sets holds conversations, which would be read as plain text."""
    for path in data.blend or (data.path.split(",") if "," in data.path else ()):
        if path in GENERATED or files.holds_conversations(Path(path), data.text_field):
            raise DataError(
                f"data.{'blend' if data.blend else 'path'} names {path}, which holds conversations, but only text and "
                "tokens can be mixed",
                "put the conversation files into one folder, and name that as data.path",
            )


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
    preference: PreferenceMethod = "none"
    """With a method, rows are pairs of answers."""
    rl: RLConfig = RLConfig()  # noqa: RUF009 - frozen
    """With a method, rows are prompts that leave room for an answer."""


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
            *files.frequent_reasons(folder / "rejects.jsonl"),
            sep="\n  ",
            file=sys.stderr,
        )
    packing = source.chat.packing
    paired = source.preference != "none"
    train, valid = (
        ChatRows(folder / name, source.seq_len, packing=packing, paired=paired) for name in ("train", "valid")
    )
    if not train.count:
        reasons = (line.strip().removeprefix("hint: ") for line in files.frequent_reasons(folder / "rejects.jsonl"))
        raise DataError(
            f"{source.data.path} holds no {'pair of answers' if paired else 'conversation'} to train on",
            "; ".join([*reasons, f"all rejected rows: {folder / 'rejects.jsonl'}"]),
        )
    facts = {"kind": "chat", "path": str(folder), **prepared, "rows": train.count, "filled": train.filled}
    if source.rl.method != "none":
        return _prompt_loaders(source, folder, tokenizer, facts)
    return Loaders(
        FullLossFirstLoader(train, source.full_loss_samples, seed=source.seed, shuffle=source.data.shuffle),
        validation_loader(valid),
        tokenizer,
        facts,
        names=(source.data.path,),
    )


def _prompt_loaders(source: ChatSource, folder: Path, tokenizer: Path, facts: dict[str, Any]) -> Loaders:
    group, data = source.rl.num_generations, source.data
    train, valid = (ChatRows(folder / name, source.seq_len, packing=False) for name in ("train", "valid"))
    prompts = PromptSet([(train, folder / "train.jsonl"), (valid, folder / "valid.jsonl")])
    held_out = PromptLoader(valid, group, seed=0, shuffle=True, first_number=train.count) if valid.count else None
    return Loaders(
        PromptLoader(train, group, seed=source.seed, shuffle=data.shuffle),
        held_out,
        tokenizer,
        {**facts, "rows": train.count},
        names=(data.path,),
        prompts=prompts,
    )


def _tokenizer_path(source: ChatSource, cache_dir: Path) -> Path:
    found = tokenization.named_tokenizer(source.data.tokenizer) or source.tokenizer
    if found is not None:
        return found
    if source.data.path in GENERATED:
        from keepstep.data.chat.tokenizer import prepare_tokenizer

        return prepare_tokenizer(cache_dir, source.seed)
    raise DataError(
        "conversations need a tokenizer, and none was named",
        "data.tokenizer=PATH/tokenizer.json, or finetune.start_from a folder that has one; "
        f"{tokenization.MAKES_TOKENIZER_JSON}",
    )


def _key(source: ChatSource, tokenizer: Path) -> str:
    paths = [] if source.data.path in GENERATED else files.conversation_files(Path(source.data.path))
    paths += files.conversation_files(Path(source.data.valid_path)) if source.data.valid_path else []
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    template = find_template(tokenizer, source.chat.template)
    named = [
        _VERSION, sys.version if source.data.path in GENERATED else "", source.data.path, source.data.valid_path,
        source.data.valid_share, source.seq_len, source.seed, source.chat.format, source.chat.loss_on,
        source.chat.generated_rows, stats, template.source, template.bos, template.eos,
        hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        *([] if source.preference == "none" else [source.preference == "kto"]),
        *([] if source.rl.method == "none" else ["prompts", source.rl.max_new_tokens]),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:12]


def _prepare(folder: Path, source: ChatSource) -> None:
    assert source.tokenizer is not None, "chosen before anything is prepared"
    template = find_template(source.tokenizer, source.chat.template)
    tokenizer = tokenization.load(source.tokenizer)
    progress(f"conversations: rendering and encoding {source.data.path}")
    splits: dict[str, list[MaskedTokens]] = {"train": [], "valid": []}
    labels: dict[str, list[bool]] = {"train": [], "valid": []}
    questions: dict[str, list[str]] = {"train": [], "valid": []}
    rejected = 0
    with files.atomic_text_file(folder / "rejects.jsonl") as rejects:
        for name, item, rows in _encoded(_items(source), template, tokenizer, source):
            if isinstance(rows, RejectedRow):
                rejects.write(rows.line())
                rejected += 1
            else:
                splits[name] += rows
                labels[name].append(getattr(item, "label", True))
                if source.rl.method != "none" and isinstance(item, NumberedRow):
                    questions[name].append(json.dumps(item.conversation.row()) + "\n")
    for name, rows in splits.items():
        write_atomic(folder / f"{name}.jsonl", "".join(questions[name]))
        np.save(folder / f"{name}.labels.npy", np.array(labels[name], dtype=np.int64))
        np.save(folder / f"{name}.tokens.npy", np.concatenate([np.zeros(0, np.int32), *(row.tokens for row in rows)]))
        loss = np.concatenate([np.zeros(0, np.bool_), *(row.loss for row in rows)])
        np.save(folder / f"{name}.loss.npy", np.packbits(loss))
        np.save(folder / f"{name}.lengths.npy", np.array([len(row.tokens) for row in rows], dtype=np.int64))
    train = splits["train"]
    facts = {
        "conversations": len(labels["train"]),
        "valid_conversations": len(labels["valid"]),
        "tokens": sum(len(row.tokens) for row in train),
        "loss_tokens": int(sum(row.loss.sum() for row in train)),
        "rejected": rejected,
        "template_marks_turns": template.marks_turns,
    }
    write_json(folder / FACTS, facts)
    progress(f"conversations: {facts['conversations']:,} to train on, {facts['tokens']:,} tokens")


def _encoded(
    items: Iterator[_Item], template: ChatTemplate, tokenizer: Any, source: ChatSource
) -> Iterator[tuple[str, Any, list[MaskedTokens] | RejectedRow]]:
    """The items with their rows, or rejected; rendered and encoded many at a time."""
    while batch := list(islice(items, _TOGETHER)):
        template.render_ahead([each for _, item in batch for each in getattr(item, "conversations", ())])
        texts = [_rendered(item, template, source) for _, item in batch]
        encoded = iter(encode_all([text for each in texts if isinstance(each, list) for text in each], tokenizer))
        for (name, item), text in zip(batch, texts, strict=True):
            if isinstance(text, RejectedRow):
                yield name, item, text
            elif not isinstance(item, RejectedRow):
                yield name, item, _checked(item, [next(encoded) for _ in text], source)


def _rendered(
    item: NumberedRow | AnswerPair | RejectedRow, template: ChatTemplate, source: ChatSource
) -> list[Rendered] | RejectedRow:
    if isinstance(item, RejectedRow):
        return item
    try:
        return [render(conversation, template, source.chat.loss_on) for conversation in item.conversations]
    except BadRow as bad:
        return item.reject(str(bad))


def _items(source: ChatSource) -> Iterator[_Item]:
    data = source.data
    if source.rl.method != "none":
        answered = _items(replace(source, rl=RLConfig()))
        yield from ((name, until_answer(item)) for name, item in answered if not isinstance(item, AnswerPair))
        return
    if data.path in GENERATED and source.preference == "none":
        yield from (
            ("train", row) for row in files.generated_rows(data.path, source.chat.generated_rows, source.seed, "train")
        )
        yield from (("valid", row) for row in files.generated_rows(data.path, _VALID_ROWS, source.seed, "test"))
        return
    for item in _read(source, data.path):
        is_valid = (
            not isinstance(item, RejectedRow)
            and not data.valid_path
            and files.is_validation_row(
                item.prompt if isinstance(item, AnswerPair) else item.conversation, data.valid_share, source.seed
            )
        )
        yield "valid" if is_valid else "train", item
    if data.valid_path:
        yield from (("valid", item) for item in _read(source, data.valid_path))


def _read(source: ChatSource, path: str) -> Iterator[NumberedRow | AnswerPair | RejectedRow]:
    if source.preference != "none":
        return read_pairs(Path(path), kto=source.preference == "kto")
    return files.read_conversations(Path(path), source.chat.format)


def _checked(
    item: NumberedRow | AnswerPair, rows: list[MaskedTokens], source: ChatSource
) -> list[MaskedTokens] | RejectedRow:
    """The rows, or rejected because they are too long or have no loss."""
    room, loss_on = source.seq_len + 1, source.chat.loss_on
    tokens = sum(len(row.tokens) for row in rows)
    if tokens > room:
        both = ": both answers are in one row" if len(rows) > 1 else ""
        return item.reject(f"{tokens} tokens do not fit a row of {room} (model.seq_len + 1){both}")
    asked = int(rows[0].loss.argmax())
    if source.rl.method != "none" and asked + source.rl.max_new_tokens > room:
        answer = f"answer of up to {source.rl.max_new_tokens} (rl.max_new_tokens)"
        return item.reject(f"a prompt of {asked} tokens and an {answer} do not fit a row of {room} (model.seq_len + 1)")
    if not all(row.loss[1:].any() for row in rows):
        return item.reject(f"no token of it carries a loss (chat.loss_on is {loss_on})")
    return rows
