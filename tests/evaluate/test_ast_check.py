"""The judge of tool calls: BFCL's error names, calls in several dialects, batched answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from keepstep.config.schema import ModelConfig
from keepstep.data.chat.rows import BadRow, tool
from keepstep.evaluate.ast_check import Call, MalformedCall, Task, has_type, judge, parse_calls, summarise, table
from keepstep.evaluate.continuous_batching import Request, generate_batch
from keepstep.evaluate.generate import batches_by_length
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "boolean"}},
        "required": ["city"]}}}
    for name in ("weather", "news")
]  # fmt: skip
TASK = Task("multiple", TOOLS, [("weather", {"city": "New York", "days": 3})])


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "error", "lenient"),
    [
        (hermes("weather", '{"days": 3, "city": "New York"}'), None, True),
        (hermes("weather", '{"city": "new york", "days": 3}'), "value_error", True),
        (hermes("news", '{"city": "New York", "days": 3}'), "wrong_func_name", False),
        (hermes("weather", '{"days": 3}'), "missing_required", False),
        (hermes("weather", '{"city": "New York", "days": 3, "x": 1}'), "unexpected_param", False),
        (hermes("weather", '{"city": "New York", "days": "3"}'), "type_error", False),
        (hermes("weather", '{"city": "New York", "days": true}'), "type_error", False),
        (hermes("weather", '{"city": "New York", "days": 4}'), "value_error", False),
        (hermes("weather", '{"city": "New York"}'), "value_error", False),
        (hermes("weather", '{"city": "New York", "days": 3'), "malformed", False),
        ("It is sunny.", "wrong_count", False),
        (hermes("weather", '{"city": "New York", "days": 3}') * 2, "wrong_count", False),
    ],
)
def test_every_mistake_has_its_name(text: str, error: str | None, lenient: bool) -> None:
    verdict = judge(TASK, text)
    assert (verdict.error, verdict.lenient) == (error, lenient)


def test_parallel_calls_may_come_in_any_order() -> None:
    calls = [("weather", {"city": "A"}), ("news", {"city": "B"})]
    text = hermes("news", '{"city": "B"}') + "\n" + hermes("weather", '{"city": "A"}')
    assert judge(Task("parallel", TOOLS, calls), text).exact


def test_many_parallel_calls_may_come_in_any_order() -> None:
    calls = [("news", {"city": str(number)}) for number in range(20)]
    text = "\n".join(hermes("news", json.dumps(arguments)) for _, arguments in reversed(calls))
    assert judge(Task("parallel", TOOLS, calls), text).exact
    assert judge(Task("parallel", TOOLS, [*calls[:-1], calls[0]]), text).error == "value_error"


@pytest.mark.parametrize("wanted", [{"city": "A", "days": "3"}, {"city": "A", "unit": "C"}, {}])
def test_the_very_answer_that_a_row_wants_is_right_whatever_its_schema_says(wanted: dict[str, Any]) -> None:
    text = hermes("weather", json.dumps(wanted))
    assert judge(Task("simple", TOOLS, [("weather", wanted)]), text).exact


def test_a_request_that_needs_no_call_must_get_none() -> None:
    task = Task("irrelevance", TOOLS, [])
    assert judge(task, "I have no tool for that.").exact
    assert judge(task, hermes("weather", '{"city": "A"}')).error == "irrelevance"
    assert judge(task, "<tool_call>{").error == "irrelevance"


@pytest.mark.parametrize(
    "text",
    [
        hermes("f", '{"a": 1}'),
        'I will.\n<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        '{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        '[{"name": "f", "arguments": {"a": 1}}]',
        "[f(a=1)]",
    ],
)
def test_calls_are_read_in_every_dialect(text: str) -> None:
    assert parse_calls(text) == [("f", {"a": 1})]


def test_talk_is_no_call_and_half_a_call_is_malformed() -> None:
    assert parse_calls("I would rather not [really].") == []
    with pytest.raises(MalformedCall):
        parse_calls("<tool_call>\n[1]\n</tool_call>")


def test_types_follow_json_schema() -> None:
    assert has_type(3, "number")
    assert not has_type(True, "integer")
    assert has_type(None, ["string", "null"])
    assert has_type(object(), "whatever")


def test_the_report_counts_by_category() -> None:
    verdicts = [judge(TASK, hermes("weather", '{"city": "New York", "days": 3}')), judge(TASK, "no")]
    verdicts.append(judge(Task("irrelevance", TOOLS, []), "no"))
    report = summarise(verdicts)
    assert report.exact == 0.5
    assert report.irrelevance == 1.0
    assert report.as_json()["categories"]["multiple"]["errors"] == {"wrong_count": 1}
    assert "wrong_count 1" in table(report)


SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq_len": 48, "init_std": 0.3}
LLAMA: dict[str, Any] = {"kv_heads": 2, "ffn_hidden": 48, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
MODELS = {
    "rotary": ModelConfig(**SHAPE, **LLAMA, positions="rotary"),
    "learned": ModelConfig(**SHAPE),
    "alibi": ModelConfig(**SHAPE, positions="alibi"),
    "window": ModelConfig(**SHAPE, positions="rotary", sliding_window=5),
}


@torch.no_grad()
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.slow
def test_prompts_of_different_lengths_answer_together_as_they_answer_alone(name: str) -> None:
    config = MODELS[name]
    model = Transformer(config).eval()
    init_weights(model, 4)

    def answers(requests: list[Request], rows: int, stop_tokens: tuple[int, ...] = ()) -> list[list[int]]:
        return [one.tokens for one in generate_batch(model, requests, rows=rows, stop_tokens=stop_tokens)]

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 61, (size,), generator=generator).tolist() for size in (3, 11, 7, 1, 11, 2)]
    requests = [Request(prompt, most) for prompt, most in zip(prompts, (20, 3, 9, 14, 5, 20), strict=True)]
    alone = [answers([request], 1)[0] for request in requests]
    for request, found in zip(requests, alone, strict=True):
        tokens = torch.tensor([[*request.prompt, *found]])
        assert model(tokens)[0, len(request.prompt) - 1 : -1].argmax(-1).tolist() == found
    # Fewer rows than prompts, so that prompts enter where others have ended; then rows that nothing takes any more.
    for rows in (1, 2, 3, 6):
        assert answers(requests, rows) == alone
    stop = alone[0][4]
    ended = answers(requests, 2, (stop,))
    assert ended == [found[: found.index(stop) + 1] if stop in found else found for found in alone]
    prompts = prompts[:4]
    assert [place for group in batches_by_length(prompts, 3) for place in group] == [3, 0, 2, 1]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"t": "a; b"}}', [("f", {"t": "a; b"})]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ('[\n  {"name": "f", "arguments": {"a": 1}}\n]', [("f", {"a": 1})]),
    ],
)
def test_calls_are_read_however_they_are_spaced_and_whatever_their_texts_hold(text: str, calls: list[Call]) -> None:
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + "[" * 5000, "[TOOL_CALLS]" + "[" * 5000, "[f(a={[1]: 2})]", f"[f(a={'-' * 100_000}1)]"],
)
def test_an_answer_that_goes_round_in_circles_is_malformed_and_no_crash(text: str) -> None:
    with pytest.raises(MalformedCall):
        parse_calls(text)


def test_a_tool_whose_schema_is_odd_is_cleaned_or_refused() -> None:
    properties = {"a": {"type": "string"}}
    odd = tool({"name": "f", "parameters": {"type": "object", "properties": properties, "required": True}})
    assert judge(Task("simple", [odd], [("f", {"a": "x"})]), '[f(a="x")]').exact
    with pytest.raises(BadRow, match="properties are list"):
        tool({"name": "f", "parameters": {"type": "object", "properties": ["a"]}})
