"""`keepstep serve` with the official client: conversations with tools, streams, constraints, crowds and garbage."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from keepstep.cli.main import main
from keepstep.core.errors import HardwareError
from keepstep.data.chat.template import BUILT_IN
from keepstep.evaluate.ast_check import parse_calls
from keepstep.evaluate.bfcl.benchmark import open_benchmark
from keepstep.evaluate.bfcl.run import BenchmarkRun
from keepstep.evaluate.chat_model import Prompt, Sampling
from keepstep.evaluate.generate import chooser
from keepstep.evaluate.remote_model import RemoteModel
from keepstep.observe.access import Access
from keepstep.serve import server as server_module
from keepstep.serve.chat_completions import Reply
from keepstep.serve.server import MOST_WAITING, ChatServer
from tests.evaluate.test_chat_model import PLAIN, tiny_model
from tests.patience import PATIENCE_S

openai = pytest.importorskip("openai")

TOKEN = "a token of the tests"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "boolean"}},
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stop", "description": "Stop", "parameters": {"type": "object"}}}
UNENFORCED = {
    "type": "function",
    "function": {
        "name": "count",
        "strict": True,
        "parameters": {"type": "object", "properties": {"n": {"minimum": 1}}},
        "schema": {"type": "object", "properties": {"n": {"minimum": 1}}},
    },
}
"""With a key that cannot be enforced, as a function and as the schema of an answer."""
ASKED = [{"role": "user", "content": "Is it raining?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    model = tiny_model(tmp_path_factory.mktemp("model"), BUILT_IN, room=2048)
    server = ChatServer(Access(token=TOKEN), model, "tiny", most_rows=8)
    server.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(served: ChatServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.base_url, api_key=TOKEN, timeout=PATIENCE_S, max_retries=0) as made:
        yield made


def ask(client: Any, **settings: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=ASKED, **{"temperature": 0, "seed": 1} | settings)


def test_answer_whole_and_streamed_are_equal(client: Any, served: ChatServer) -> None:
    whole = ask(client, max_completion_tokens=40)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 40
    parts = list(ask(client, max_completion_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == whole.choices[0].message.content
    assert parts[-2].choices[0].finish_reason == "length"
    found, expected = (usage.model_dump(exclude={"prompt_tokens_details"}) for usage in (parts[-1].usage, whole.usage))
    assert found == expected
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert all("usage" in part.model_fields_set and part.usage is None for part in parts[:-1])
    assert ask(client, max_completion_tokens=None, max_tokens=3, seed=-1).usage.completion_tokens == 3
    assert served.answer("/metrics", {}).body.count(b"# TYPE") == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.slow
def test_forced_call_fits_its_schema(client: Any, stream: bool, choice: Any) -> None:
    """The weights are random: whatever fits comes from the grammar."""
    tools = [WEATHER] if choice == "required" else [OTHER, WEATHER]
    settings = {"tools": tools, "tool_choice": choice, "temperature": 1.5, "stream": stream}
    answer = ask(client, **settings)
    if stream:
        parts = [part.choices[0] for part in answer]
        (call,) = [made for part in parts for made in part.delta.tool_calls or ()]
        assert parts[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.slow
def test_strict_function_fits_its_schema_once_the_model_calls(
    client: Any, served: ChatServer, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a call is dictated, and the weights are random: whatever fits comes from the grammar."""
    opening = served.model.tokenizer.encode("Well, <tool_call>", add_special_tokens=False).ids

    def dictated(*settings: Any) -> Any:
        rest, choose = list(opening), chooser(*settings)
        return lambda logits_v: rest.pop(0) if rest else choose(logits_v)

    monkeypatch.setattr(server_module, "chooser", dictated)
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}]
    message = ask(client, tools=tools, temperature=1.5, max_completion_tokens=120).choices[0].message
    assert bool(message.tool_calls) == strict
    if strict:
        assert message.content == "Well,"
        jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), SCHEMA)


def test_chat_and_eval_use_a_server_by_its_url(
    served: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_UI_TOKEN", TOKEN)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]}
    before = [*ASKED, {**call, "weight": 0}, {"role": "tool", "content": "rain"}, {"role": "user", "content": "Now?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [*before, call], "tools": [WEATHER]}))
    (tmp_path / "lines.txt").write_text("hello\n")
    words = [
        "eval",
        "tools",
        served.base_url,
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--max-new-tokens",
        "9",
        "--json",
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["model"] == served.base_url
    few = ["--file", str(tmp_path / "lines.txt"), "--max-new-tokens", "9"]
    assert main(["chat", served.base_url.removesuffix("/v1"), *few]) == 0
    said = json.loads(capsys.readouterr().out)["answer"]
    prompt, sampling = Prompt([{"role": "user", "content": "hello"}]), Sampling(max_new_tokens=9)
    assert said == served.model.answers([prompt], sampling, 1)[0]
    monkeypatch.setenv("KEEPSTEP_UI_TOKEN", "wrong")
    assert main(["chat", served.base_url, *few]) == 1
    assert "refused: a token is needed" in capsys.readouterr().err
    assert main(["chat", "http://127.0.0.1:9", *few]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["chat", served.base_url, *few, "--device", "cpu"]) == 2


@pytest.mark.slow
def test_remote_model_writes_calls_as_text(served: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_UI_TOKEN", TOKEN)
    model, prompt = RemoteModel(served.base_url), Prompt(ASKED, [WEATHER])
    sampling, body = Sampling(temperature=1.0, max_new_tokens=100), model._body
    monkeypatch.setattr(model, "_body", lambda *given: body(*given) | {"tool_choice": "required"})
    for text in (model.answers([prompt], sampling, 1)[0], "".join(model.stream(prompt, sampling))):
        ((name, arguments),) = parse_calls(text)
        assert name == "get_weather"
        jsonschema.validate(arguments, SCHEMA)


def test_benchmark_by_url_gives_the_verdicts_of_the_model_itself(
    served: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_UI_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    categories = ["irrelevance", "live_irrelevance", "multi_turn_base"]
    words = ["--categories", ",".join(categories), "--limit", "3", "--max-new-tokens", "9", "--batch", "2"]
    assert main(["eval", "bfcl", served.base_url, *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    benchmark = open_benchmark()
    own = BenchmarkRun(served.model, benchmark, "native", 2, 9)
    lines = own.ask(benchmark.questions(categories, 3), tmp_path / "own.jsonl")
    identity, *asked = map(json.loads, (tmp_path / told["answers"]).read_text().splitlines())
    assert identity["model"] == "tiny"
    assert [line["error"] for line in asked] == [line["error"] for line in lines]
    assert "multi_turn:force_terminated" in {line["error"] for line in lines}, "its prompt is too long"
    assert asked[0]["answer"] == lines[0]["answer"]


def test_conversation_with_the_result_of_a_call(client: Any) -> None:
    first = ask(client, tools=[WEATHER], tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    messages = [*ASKED, first, result]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_answer_follows_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = ask(client, response_format=form, temperature=1)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_end_of_an_answer_is_no_text_inside_a_string(
    client: Any, served: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest token ends the answer, and inside a string the grammar has room for its text."""
    end, quote = (served.model.tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in ("d", '"'))

    def bent(*settings: Any) -> Any:
        choose = chooser(*settings)
        likely = torch.zeros(served.model.config.model.vocab)
        likely[end], likely[quote] = 200.0, 100.0
        return lambda logits_v: choose(logits_v + likely)

    monkeypatch.setattr(server_module, "chooser", bent)
    monkeypatch.setattr(served, "model", replace(served.model, stop_tokens=frozenset({end})))
    form = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"type": "string"}}}
    answer = ask(client, response_format=form, max_completion_tokens=20).choices[0]
    assert (answer.message.content, answer.finish_reason) == ('""', "stop")


def test_stop_text_ends_an_answer_before_it(client: Any) -> None:
    text = ask(client, max_completion_tokens=40).choices[0].message.content
    stop = text[10:12]
    cut = text.partition(stop)[0]
    assert ask(client, max_completion_tokens=40, stop=stop).choices[0].message.content == cut
    parts = list(ask(client, max_completion_tokens=40, stop=[stop], stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == cut
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"messages": [*ASKED, {"role": "system", "content": "be brief"}]}, "messages"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"stream_options": "usage"}}, "stream_options"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [UNENFORCED]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": UNENFORCED["function"]}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: Any, settings: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": ASKED} | settings)
    assert caught.value.param == param


def test_taken_port_is_an_error_with_a_remedy(served: ChatServer) -> None:
    with pytest.raises(HardwareError, match="cannot listen") as caught:
        ChatServer(Access(port=served.server_address[1]), served.model, "second", most_rows=1)
    assert "--port" in str(caught.value.hint)


def test_unknown_model_and_wrong_token_are_refused(client: Any, served: ChatServer) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    for request in (client.models.retrieve, lambda name: client.chat.completions.create(model=name, messages=ASKED)):
        with pytest.raises(openai.NotFoundError, match="'other' is not served here, 'tiny' is") as caught:
            request("other")
        assert caught.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=served.base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="tiny", messages=ASKED)


def raw(served: ChatServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", served.server_address[1]), PATIENCE_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.slow
def test_garbage_and_a_crowd_leave_the_server_healthy(client: Any, served: ChatServer) -> None:
    kind = "Content-Type: application/json"
    assert b" 411 " in raw(served, post(b"", kind))
    assert b" 413 " in raw(served, post(b"", kind, "Content-Length: 99999999"))
    assert b" 415 " in raw(served, post(b"{}", "Content-Type: text/plain", "Content-Length: 2"))
    for body in (b"\xff", b"[]", b'{"messages": "\\ud800"}', b"[" * 10000, b'{"messages": [{"role": {}}]}'):
        assert b" 400 " in raw(served, post(body, kind, f"Content-Length: {len(body)}"))
    with ThreadPoolExecutor(64) as clients:
        texts = list(clients.map(lambda _: ask(client, max_completion_tokens=9).choices[0].message.content, range(64)))
    assert len(set(texts)) == 1
    with openai.OpenAI(base_url=served.base_url.replace("/v1", ""), api_key=TOKEN) as plain:
        assert plain.get("/health", cast_to=object) == {"status": "ok"}


def test_client_that_leaves_frees_its_place(served: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_POLL_S", 0.01)
    body = json.dumps({"messages": ASKED, "temperature": 0}).encode()
    sent = post(body, "Content-Type: application/json", f"Content-Length: {len(body)}")
    written = served.batcher.tokens_written
    with socket.create_connection(("127.0.0.1", served.server_address[1])) as connection:
        connection.sendall(sent)
    deadline = time.monotonic() + PATIENCE_S
    while served.batcher.running or served.batcher.tokens_written == written:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert served.batcher.tokens_written - written < 1900, "not to the end of its 2,048 tokens"


SHOWS_NAMES = PLAIN + "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "choice", "reason"),
    [(PLAIN, "auto", "does not show tools"), (SHOWS_NAMES, "required", "cannot be enforced")],
)
def test_template_without_tools_or_calls_is_no_silent_loss(
    template: str, choice: str, reason: str, tmp_path: Path
) -> None:
    server = ChatServer(Access(token=TOKEN), tiny_model(tmp_path, template, room=64), "plain", most_rows=1)
    server.start()
    try:
        with (
            openai.OpenAI(base_url=server.base_url, api_key=TOKEN, max_retries=0) as client,
            pytest.raises(openai.BadRequestError, match=reason),
        ):
            client.chat.completions.create(model="plain", messages=ASKED, tools=[WEATHER], tool_choice=choice)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_crowd_beyond_the_queue_gets_an_answer_or_429(served: ChatServer) -> None:
    body = json.dumps({"messages": ASKED, "max_tokens": 1}).encode()
    sent = post(body, "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    with ExitStack() as stack:
        with served.batcher._changed:  # nobody is answered until all have asked
            clients = []
            for _ in range(300):
                clients.append(stack.enter_context(socket.create_connection(served.server_address[:2], PATIENCE_S)))
                clients[-1].sendall(sent)
            time.sleep(1)
        statuses = [client.recv(12) for client in clients]
    assert set(statuses) <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    assert statuses.count(b"HTTP/1.1 200") >= MOST_WAITING


@pytest.mark.slow
def test_answer_fits_the_schema_or_is_a_call(client: Any) -> None:
    """With both, the model may do either; the weights are random."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": [{"name": "Oslo"}]}}}
    seen = set()
    for seed in range(40):
        chosen = ask(client, tools=[WEATHER], response_format=form, temperature=1.5, seed=seed).choices[0]
        seen.add(chosen.finish_reason)
        if chosen.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(chosen.message.tool_calls[0].function.arguments), SCHEMA)
        else:
            assert chosen.message.content == '{"name": "Oslo"}', "an object with a name is no call"
    assert seen == {"stop", "tool_calls"}


def test_lone_surrogate_in_a_call_is_sent_as_the_model_wrote_it() -> None:
    answer = Reply("m", 1).whole("", [("f", {"x": "\ud83d", "y": "é"})], "stop", 1)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"].encode() == b'{"x": "\\ud83d", "y": "\\u00e9"}'
