"""Published function-calling rows become canonical ones; what cannot be read is refused with its number and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.data.chat.files import NumberedRow, RejectedRow, is_validation_row, read_conversations, write_canonical
from keepstep.data.chat.published_sets import bracketed_calls, convert, detect
from keepstep.data.chat.rows import BadRow, calls_of, canonical

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps({"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}, indent=4),
    "chat": 'USER: What is the weather in Oslo?\n\n\nASSISTANT: <functioncall> {"name": "get_weather", '
    '"arguments": \'{"city": "Oslo"}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"degrees": 7}\n\n\n'
    "ASSISTANT: It is 7 degrees in Oslo. <|endoftext|>\n\n\nUSER: Thanks!\n\n\nASSISTANT: You're welcome!",
}
XLAM = {
    "id": 0,
    "query": "Where can I find live giveaways?",
    "answers": '[{"name": "live_giveaways", "arguments": {"type": "beta", "limit": 3}}]',
    "tools": json.dumps([{
        "name": "live_giveaways",
        "description": "Live giveaways",
        "parameters": {
            "type": {"description": "kind", "type": "str", "default": "game"},
            "limit": {"description": "most", "type": "int, optional"},
            "tags": {"description": "tags", "type": "List[str]"},
        },
    }]),
}  # fmt: skip
HERMES = {
    "conversations": [
        {"from": "system", "value": "You call functions. <tools> [" + json.dumps(
            {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}) + "] </tools>"},
        {"from": "human", "value": "Add it."},
        {"from": "gpt", "value": "<tool_call>\n{'arguments': {'city': 'Rome'}, 'name': 'add'}\n</tool_call>\n"
                                 '<tool_call>\n{"name": "add", "arguments": {"city": "Bonn"}}\n</tool_call>'},
        {"from": "tool", "value": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"},
        {"from": "gpt", "value": "Both are in."},
    ]
}  # fmt: skip
TOOLACE = {
    "system": "You can call functions. Here is a list of functions in JSON format:\n" + json.dumps([
        {"name": "Market Trends API", "description": "d",
         "parameters": {"type": "dict", "properties": {"country": {"type": "string"}}, "required": ["country"]}},
        {"name": "g", "description": "d", "parameters": {"type": "dict", "properties": {"n": {"type": "float"}}}},
    ]) + ". Should you decide to return calls, use [f(a=1)].",
    "conversations": [
        {"from": "user", "value": "Trends?"},
        {"from": "assistant", "value": '[Market Trends API(country="us (all)"), g(n=1.5, deep=[true, {"a": null}])]'},
        {"from": "tool", "value": "[1]"},
        {"from": "assistant", "value": "They go up."},
    ],
}  # fmt: skip


def calls(row: dict[str, Any]) -> list[list[tuple[str, dict[str, Any]]]]:
    return [calls_of(message) for message in convert(row).messages if message["role"] == "assistant"]


def test_glaive() -> None:
    made = convert(GLAIVE)
    assert detect(GLAIVE) == "glaive"
    roles = [message["role"] for message in made.messages]
    assert roles[-6:] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert calls(GLAIVE)[0] == [("get_weather", {"city": "Oslo"})]
    assert made.messages[-3]["content"] == "It is 7 degrees in Oslo."
    assert made.tools[0]["function"]["parameters"] == SCHEMA


def test_xlam_types_become_json_schema() -> None:
    made = convert(XLAM)
    assert calls(XLAM) == [[("live_giveaways", {"type": "beta", "limit": 3})]]
    schema = made.tools[0]["function"]["parameters"]
    assert {name: value["type"] for name, value in schema["properties"].items()} == {
        "type": "string", "limit": "integer", "tags": "array"}  # fmt: skip
    assert schema["properties"]["tags"]["items"] == {"type": "string"}
    assert schema["required"] == ["tags"]


def test_hermes_with_python_quotes_and_several_calls() -> None:
    assert calls(HERMES)[0] == [("add", {"city": "Rome"}), ("add", {"city": "Bonn"})]
    assert [message["content"] for message in convert(HERMES).messages if message["role"] == "tool"] == ["1", "2"]


def test_calls_and_answers_in_turns_of_their_own() -> None:
    """As LLaMA-Factory writes them: tools and system beside the turns, calls as turns, one or several."""
    asked = [{"name": "add", "arguments": {"city": city}} for city in ("Rome", "Bonn")]
    tool = {"name": "add", "description": "", "parameters": SCHEMA}
    for said in (asked, asked[:1], asked[0]):
        turns = [("human", "Add."), ("function_call", json.dumps(said)), ("observation", "1"), ("gpt", "It is in.")]
        row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
        made = convert({**row, "system": "Be brief.", "tools": json.dumps([tool])})
        assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert made.messages[0]["content"] == "Be brief."
        listed = said if isinstance(said, list) else [said]
        assert calls_of(made.messages[2]) == [(item["name"], item["arguments"]) for item in listed]


def test_a_system_text_beside_plain_turns_is_kept() -> None:
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "[Enters (left)]"}]
    made = convert({"system": "You are a pirate.", "conversations": turns})
    assert [message["content"] for message in made.messages] == ["You are a pirate.", "Hello", "[Enters (left)]"]
    named = convert(
        {"system": "You are a pirate.", "conversations": [turns[0], {**turns[1], "value": "Ahoy"}]}, "toolace"
    )
    assert named.messages[0] == {"role": "system", "content": "You are a pirate."}


def test_calls_are_read_whoever_holds_the_system_text_and_whatever_the_roles_are_called() -> None:
    """The same rows with the system text beside the turns, as many tools write them."""
    listed, *turns = HERMES["conversations"]
    beside = {"system": listed["value"], "conversations": turns}
    assert detect(beside) == "hermes"
    assert convert(beside) == convert(HERMES)
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    renamed = [{**turn, "from": names[turn["from"]]} for turn in TOOLACE["conversations"]]  # type: ignore[index]
    assert convert({**TOOLACE, "conversations": renamed}) == convert(TOOLACE)


def test_arguments_that_are_called_parameters_are_arguments() -> None:
    """As Llama 3 writes calls, in every format that holds them."""
    asked = {"name": "add", "parameters": {"city": "Rome"}}
    tools = [{"name": "add", "description": "", "parameters": SCHEMA}]
    turns = [
        {"from": "human", "value": "Add."},
        {"from": "gpt", "value": f"<tool_call>{json.dumps(asked)}</tool_call>"},
    ]
    apart = [turns[0], {"from": "function_call", "value": json.dumps(asked)}]
    chat = f"USER: x\n\nASSISTANT: <functioncall> {json.dumps(asked)}"
    rows = (
        {"conversations": turns, "tools": tools},
        {"conversations": apart, "tools": tools},
        {"query": "Add.", "answers": [asked], "tools": tools},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [asked]}]},
        {"system": f"SYSTEM: {json.dumps(tools[0])}", "chat": chat},
    )
    for row in rows:
        assert calls(row)[0] == [("add", {"city": "Rome"})]


def test_the_older_function_call_is_a_call() -> None:
    made = {"role": "assistant", "content": "I look.", "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    assert calls({"messages": [{"role": "user", "content": "x"}, made]}) == [[("f", {"a": 1})]]


def test_toolace_names_with_spaces_and_nested_values() -> None:
    row = json.loads(json.dumps(TOOLACE))
    assert calls(row)[0] == [
        ("Market Trends API", {"country": "us (all)"}),
        ("g", {"n": 1.5, "deep": [True, {"a": None}]}),
    ]
    assert convert(row).tools[1]["function"]["parameters"]["properties"]["n"]["type"] == "number"


def test_arguments_as_text_and_as_object_are_the_same() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x"},
                      {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]}
        for given in ({"a": [1]}, '{"a": [1]}')
    ]  # fmt: skip
    assert convert(rows[0]) == convert(rows[1])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role 'wizard'"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "neither text nor calls"),
        ({**XLAM, "answers": "[{]"}, "not JSON"),
        ({**XLAM, "answers": '[{"name": "other", "arguments": {}}]'}, "not among the tools"),
        ({**XLAM, "answers": '[{"name": "live_giveaways", "arguments": "[1]"}]'}, "not an object"),
        ({**GLAIVE, "chat": "hello"}, "does not start with"),
        ({"colour": "red"}, "no known format"),
        (
            {**HERMES, "conversations": [{"from": "narrator", "value": "x"}, *HERMES["conversations"]]},
            "role 'narrator'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "holds image_url"),
        (["a", "list"], "not an object"),
        ({**XLAM, "answers": '[{"name": "live_giveaways", "input": {"limit": 3}}]'}, "has no arguments, but input"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"a": 1}}]},
                ]
            },
            "message 1 holds tool_use",
        ),
    ],
)
def test_bad_rows_are_refused_with_the_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason.replace("[", r"\[")):
        convert(row)


def test_brackets_that_do_not_close_are_refused() -> None:
    with pytest.raises(BadRow, match="does not close"):
        bracketed_calls('[f(a="x)]')


def test_every_row_is_kept_or_in_the_rejects_file_with_its_number(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    lines = [json.dumps(GLAIVE), "{broken", json.dumps(XLAM), json.dumps({"messages": []}), "", json.dumps(HERMES)]
    source.write_text("\n".join(lines) + "\n")
    out, valid = tmp_path / "out.jsonl", tmp_path / "valid.jsonl"
    counts, rejects = write_canonical(read_conversations(source), out, valid, 0.5, 3)
    assert (counts["kept"] + counts["held_out"], counts["rejected"]) == (3, 2)
    assert rejects is not None
    refused = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert [(item["row"], item["file"]) for item in refused] == [(2, "rows.jsonl"), (4, "rows.jsonl")]
    assert "not JSON" in refused[0]["reason"]
    kept = [
        json.loads(line) for name in ("out", "valid") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert all(isinstance(NumberedRow("", 1, convert(row)), NumberedRow) for row in kept)


def test_canonical_rows_read_back_as_themselves(tmp_path: Path) -> None:
    made = [convert(row) for row in (GLAIVE, XLAM, HERMES)]
    (tmp_path / "rows.json").write_text(json.dumps([item.row() for item in made]))
    assert [
        item.conversation for item in read_conversations(tmp_path / "rows.json") if isinstance(item, NumberedRow)
    ] == made


def test_the_split_follows_from_the_row_and_the_seed() -> None:
    rows = [canonical([{"role": "user", "content": str(n)}, {"role": "assistant", "content": "y"}]) for n in range(400)]
    first = [is_validation_row(row, 0.25, 1) for row in rows]
    assert first == [is_validation_row(row, 0.25, 1) for row in rows]
    assert first != [is_validation_row(row, 0.25, 2) for row in rows]
    assert 60 < sum(first) < 140


def test_a_refused_row_keeps_its_source(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"messages": 3}]')
    (item,) = read_conversations(tmp_path / "rows.json")
    assert isinstance(item, RejectedRow)
    assert item.source == {"messages": 3}
