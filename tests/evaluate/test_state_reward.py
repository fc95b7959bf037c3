"""The page's simulated API rewards what an answer leads to, after the turns before it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from keepstep.data.chat.rows import canonical
from tests.doc_blocks import ROOT

ADD_2 = ("add_item", {"name": "tea", "count": 2})


def text(*calls: tuple[str, dict[str, Any]]) -> str:
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in written)


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        ([ADD_2], text(ADD_2), 1),
        ([ADD_2], text(("add_item", {"name": "tea"}), ("add_item", {"name": "tea", "count": 1})), 1),
        ([ADD_2], text(("remove_item", {"name": "milk"}), ("add_item", {"name": "milk"}), ADD_2), 1),
        ([ADD_2], text(("add_item", {"name": "tea", "count": 3})), 0),
        ([ADD_2], text(ADD_2, ("add_item", {"name": "milk"})), 0),
        ([ADD_2], text(ADD_2, ("remove_item", {"name": "bread"})), 0),
        ([ADD_2], text(ADD_2, ("__init__", {})), 0),
        ([ADD_2], text(("add_item", {"item": "tea"})), 0),
        ([ADD_2], "<tool_call>{</tool_call>", 0),
        ([ADD_2], "Done.", 0),
        ([("list_items", {})], text(("list_items", {})), 1),
        ([("list_items", {})], "There is milk.", 0),
        ([], "Which one?", 1),
        ([], text(("list_items", {})), 0),
    ],
)
def test_answers_are_worth_the_state_that_they_lead_to(expected: list[Any], answer: str, reward: float) -> None:
    block = next(
        found
        for found in re.findall(r"```python\n(.*?)```", (ROOT / "docs/rl.md").read_text(), re.S)
        if "Cart" in found
    )
    names: dict[str, Any] = {}
    exec(block, names)
    calls = [{"name": "add_item", "arguments": {"name": "milk"}}, {"name": "remove_item", "arguments": {"name": "ink"}}]
    before = [
        {"role": "user", "content": "Milk, please, and no ink."},
        {"role": "assistant", "tool_calls": [{"function": call} for call in calls], "weight": 0},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "-"},
    ]
    tools = [{"name": name, "parameters": {}} for name in ("add_item", "remove_item", "list_items")]
    messages = canonical(before, tools).messages[:-1]
    wanted = [{"name": name, "arguments": arguments} for name, arguments in expected]
    assert names["cart_state"](messages=messages, answer=answer, expected=wanted) == reward
