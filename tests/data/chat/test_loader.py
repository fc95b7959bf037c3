"""Packing, the generator, and rows with a loss mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from keepstep.config.schema import ChatConfig, DataConfig, ModelConfig
from keepstep.core.errors import DataError
from keepstep.core.tokens import IGNORE_INDEX
from keepstep.data.batch import Batch, to_batch
from keepstep.data.chat.generate import (
    CATEGORIES,
    generate_row,
    split_functions,
    split_words,
)
from keepstep.data.chat.generated import SMALL, generate_rows
from keepstep.data.chat.loader import ChatSource, build_chat_loaders, is_chat
from keepstep.data.chat.prepared_rows import ChatRows, FullLossFirstLoader
from keepstep.data.chat.rows import calls_of
from keepstep.data.chat.tokenizer import VOCAB
from keepstep.data.loader import Loader
from keepstep.data.packing import pack
from keepstep.evaluate.ast_check import Task, compare
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer

SEQ_LEN = 512
SOURCE = ChatSource(DataConfig(path="toolcalls"), ChatConfig(generated_rows=60), SEQ_LEN, VOCAB, seed=5)


@given(st.lists(st.integers(1, 64), max_size=80))
def test_packing_keeps_every_document_once_and_no_row_overflows(lengths: list[int]) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), 64)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    # Best fit: no two rows would fit into one.
    fills = sorted(sum(lengths[number] for number in row) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > 64


def test_a_document_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack(np.array([5, 65]), 64)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    loaders = build_chat_loaders(SOURCE, cache)
    return Path(loaders.facts["path"])


@pytest.mark.slow
def test_the_loss_of_packed_rows_equals_that_of_separate_rows(prepared: Path) -> None:
    config = ModelConfig(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=VOCAB, seq_len=SEQ_LEN, positions="rotary",
        norm="rmsnorm", activation="swiglu", bias=False,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, 3)

    def loss(rows: ChatRows) -> tuple[float, int]:
        total, count = 0.0, 0
        for index in range(rows.count):
            batch = to_batch(rows.read(np.array([index])), 0)
            total += float(
                model(*_tensors(batch)[:2], positions_bt=_tensors(batch)[2], documents_bt=_tensors(batch)[3])
            )
            count += int((batch.targets != IGNORE_INDEX).sum())
        return total, count

    with torch.no_grad():
        packed, packed_count = loss(ChatRows(prepared / "train", SEQ_LEN, packing=True))
        separate, separate_count = loss(ChatRows(prepared / "train", SEQ_LEN, packing=False))
    assert packed_count == separate_count
    assert packed == pytest.approx(separate, rel=1e-6)


def _tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    assert batch.positions is not None
    assert batch.documents is not None
    parts = (batch.inputs, batch.targets, batch.positions, batch.documents)
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in parts)


def test_packed_rows_are_nearly_full_and_padding_carries_no_loss(prepared: Path) -> None:
    rows = ChatRows(prepared / "train", SEQ_LEN, packing=True)
    assert rows.filled > 0.85
    read = rows.read(np.arange(rows.count))
    assert read.loss is not None
    assert read.documents is not None
    last = read.documents.max(axis=1)
    assert not read.loss[read.documents == last[:, None]][read.tokens[read.documents == last[:, None]] == 0].any()


def test_the_first_samples_are_read_whole_and_later_ones_by_the_mask(prepared: Path) -> None:
    rows = ChatRows(prepared / "train", SEQ_LEN, packing=True)
    loader = FullLossFirstLoader(rows, 3, seed=1, shuffle=True)
    batch = loader.rows(1, 4)
    masked = Loader(rows, seed=1, shuffle=True).rows(1, 4)
    learnt, answers = batch.targets != IGNORE_INDEX, masked.targets != IGNORE_INDEX
    assert (learnt[:2].sum(axis=1) > 3 * answers[:2].sum(axis=1)).all()
    assert (learnt[:2] | ~answers[:2]).all()
    assert np.array_equal(batch.targets[2:], masked.targets[2:])
    alone = loader.rows(2, 1)
    assert np.array_equal(alone.targets[0], batch.targets[1]), "what is learnt of a sample does not hang on its batch"


@pytest.mark.slow
def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab is 600"):
        build_chat_loaders(replace(SOURCE, vocab=600), tmp_path)


def test_a_tokenizer_that_leaves_numbers_out_needs_a_vocabulary_above_its_largest(tmp_path: Path) -> None:
    path, rows = tmp_path / "tokenizer.json", tmp_path / "rows.jsonl"
    Tokenizer(models.WordLevel({"Yes": 0, "[UNK]": 90}, unk_token="[UNK]")).save(str(path))
    rows.write_text('{"instruction": "Is it?", "output": "Yes"}\n')
    source = ChatSource(DataConfig(path=str(rows), tokenizer=str(path)), ChatConfig(), 64, vocab=50, seed=0)
    with pytest.raises(DataError, match=r"ids up to 90, but model\.vocab is 50"):
        build_chat_loaders(source, tmp_path)


def test_what_names_conversations_and_what_does_not(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "plain"}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')

    def asked(path: str, **chat: Any) -> bool:
        return is_chat(DataConfig(path=path), ChatConfig(**chat))

    assert asked("toolcalls")
    assert asked(str(tmp_path / "chat.jsonl"))
    assert asked(str(tmp_path))
    assert not asked(str(tmp_path / "text.jsonl"))
    assert asked(str(tmp_path / "text.jsonl"), format="alpaca")
    assert not asked("demo")
    assert not asked("synthetic")


def test_generated_rows_are_a_function_of_seed_split_and_number() -> None:
    once = list(generate_rows(SMALL, 40, 9, "train"))
    assert once == list(generate_rows(SMALL, 40, 9, "train"))
    assert once[17] == generate_row(17, 9, "train")
    assert once != list(generate_rows(SMALL, 40, 10, "train"))
    assert {row.category for row in once} == set(CATEGORIES)


def test_the_splits_share_neither_functions_nor_words() -> None:
    names = [{function.name for function in split_functions(split)} for split in ("train", "test")]
    assert not names[0] & names[1]
    assert len(names[0]) > 300
    assert len(names[1]) > 50
    assert not set(split_words("train")) & set(split_words("test"))


def test_generated_answers_are_right_by_our_own_judge() -> None:
    for row in generate_rows(SMALL, 100, 2, "test"):
        turn = next(message for message in row.conversation.messages if message["role"] == "assistant")
        task = Task(row.category, row.conversation.tools, calls_of(turn))
        assert compare(task, calls_of(turn), lenient=False) is None
        assert bool(task.expected) == (row.category != "irrelevance")
        request = row.conversation.messages[0]["content"]
        for _, arguments in task.expected:
            assert all(str(value).lower() in request.lower() for value in arguments.values())
