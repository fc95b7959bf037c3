"""Preference rows: every published format gives the same prompt and answers, and bad rows a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import DataError
from keepstep.data.chat.files import RejectedRow
from keepstep.data.chat.preference import AnswerPair, parse_row, read_pairs
from keepstep.data.chat.rows import BadRow

ASKED = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOL = {"name": "add", "parameters": {"a": {"type": "int"}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
UNKNOWN = {"role": "assistant", "tool_calls": [{"function": {"name": "nothing", "arguments": {}}}]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "2 + 2?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 9.0},
    ],
)
def test_formats_give_the_same_pair(row: dict[str, Any]) -> None:
    prompt, answers = parse_row(row, labelled=False)
    assert prompt.messages == (ASKED,)
    assert answers == [((GOOD,), True), ((BAD,), False)]


def test_earlier_turns_are_context_without_loss() -> None:
    row = {"chosen": [*EARLIER, ASKED, GOOD], "rejected": [*EARLIER, ASKED, BAD]}
    prompt, _ = parse_row(row, labelled=False)
    assert prompt.messages == (EARLIER[0], {**EARLIER[1], "weight": 0}, ASKED)
    calls = {"prompt": [ASKED], "chosen": [CALL, {"role": "tool", "content": "4"}, GOOD], "tools": [TOOL]}
    prompt, answers = parse_row({**calls, "rejected": [CALL, {"role": "tool", "content": "4"}, BAD]}, labelled=False)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.messages[1]["weight"] == 0
    assert answers[1] == ((BAD,), False)


def test_only_unwanted_answers_may_call_unknown_tools() -> None:
    wrong = {"prompt": [ASKED], "chosen": [CALL], "rejected": [UNKNOWN], "tools": json.dumps([TOOL])}
    prompt, answers = parse_row(wrong, labelled=False)
    assert prompt.tools[0]["function"]["name"] == "add"
    assert answers[1][0][0]["tool_calls"][0]["function"]["name"] == "nothing"
    with pytest.raises(BadRow, match="nothing is called, but it is not among the tools"):
        parse_row({**wrong, "chosen": [UNKNOWN], "rejected": [CALL]}, labelled=False)
    parse_row({"prompt": [ASKED], "completion": [UNKNOWN], "label": False, "tools": [TOOL]}, labelled=True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "?", "chosen": "4", "rejected": "4"}, "chosen and rejected are equal"),
        ({"chosen": "4", "rejected": "5"}, "it has no prompt"),
        ({"prompt": "?", "chosen": "", "rejected": "5"}, "chosen: message 0 of the assistant has neither text nor"),
        ({"chosen": [ASKED], "rejected": [ASKED, BAD]}, "one answer continues the other"),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [ASKED]}, "rejected continues with a message of the user"),
        ({"prompt": "?", "completion": "4", "label": True}, "no chosen and rejected: label is for kto"),
        ([1], "the row is list, not an object"),
    ],
)
def test_bad_rows_have_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse_row(row, labelled=False)


def test_labels_are_true_or_false() -> None:
    with pytest.raises(BadRow, match="its label is 'good', which is neither true nor false"):
        parse_row({"prompt": "?", "completion": "4", "label": "good"}, labelled=True)
    with pytest.raises(BadRow, match="neither chosen and rejected nor completion and label"):
        parse_row({"prompt": "?", "completion": "4"}, labelled=True)


def test_kto_compares_with_an_answer_to_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "a1", "rejected": "a2"}, {"prompt": "b", "completion": "b1", "label": 0}]
    found = list(read_pairs(write(tmp_path / "rows.jsonl", *rows), kto=True))
    assert all(isinstance(item, AnswerPair) for item in found)
    said = [[each.messages[-1]["content"] for each in item.conversations] for item in found]  # type: ignore[union-attr]
    assert said == [["a1", "b1"], ["a2", "b1"], ["b1", "a2"]]
    assert [item.label for item in found] == [True, False, False]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="answers to one prompt alone"):
        list(read_pairs(write(tmp_path / "one.jsonl", rows[0]), kto=True))


def test_unreadable_rows_are_rejected_with_their_place(tmp_path: Path) -> None:
    good = {"prompt": "?", "chosen": "4", "rejected": "5"}
    half = {"prompt": "?", "chosen": "\ud83d", "rejected": "5"}
    found = list(read_pairs(write(tmp_path / "rows.jsonl", good, "{", half), kto=False))
    assert isinstance(found[0], AnswerPair)
    assert [(item.row, item.reason[:20]) for item in found[1:] if isinstance(item, RejectedRow)] == [
        (2, "the line is not JSON"),
        (3, "it holds half of a c"),
    ]
