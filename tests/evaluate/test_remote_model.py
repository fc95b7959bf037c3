"""A model behind a server of somebody else: calls in pieces, ids that belong together, answers that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from keepstep.core.errors import KeepstepError
from keepstep.evaluate.ast_check import parse_calls
from keepstep.evaluate.chat_model import Prompt, Sampling
from keepstep.evaluate.remote_model import RemoteModel

MODELS = b'{"data": [{"id": "theirs"}]}'


class Canned(ThreadingHTTPServer):
    """Answers every request with the same bytes, and keeps what it was asked."""

    models, reply = MODELS, b""
    asked: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_GET(self) -> None:
        self._send(self.server.models)

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(self.server.reply)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Canned]:
    with Canned(("127.0.0.1", 0), Handler) as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def url(server: Canned) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def event(*pieces: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": list(pieces)}}]}).encode() + b"\n\n"


def test_streamed_calls_are_put_together_from_their_pieces(server: Canned) -> None:
    """As OpenAI and vLLM stream them: the name first, then the arguments piece by piece, two calls in turn."""
    server.reply = b"".join([
        event({"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}),
        event({"index": 0, "function": {"arguments": '{"x"'}}),
        event({"index": 1, "id": "b", "type": "function", "function": {"name": "stop", "arguments": None}}),
        event({"index": 0, "function": {"arguments": ": 1}"}}),
        b"data: [DONE]\n\n",
    ])  # fmt: skip
    text = "".join(RemoteModel(url(server)).stream(Prompt([{"role": "user", "content": "?"}]), Sampling()))
    assert parse_calls(text) == [("add", {"x": 1}), ("stop", {})]


def test_results_name_the_calls_that_they_answer(server: Canned) -> None:
    server.reply = b'{"choices": [{"message": {"content": "done"}}]}'
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    turn = [{"role": "assistant", "content": "", "tool_calls": calls}, *({"role": "tool", "content": r} for r in "12")]
    prompt = Prompt([{"role": "user", "content": "?"}, *turn, *turn])
    assert RemoteModel(url(server)).answers([prompt], Sampling(), 1) == ["done"]
    sent = server.asked["messages"]
    made = [call["id"] for message in sent for call in message.get("tool_calls", ())]
    assert len(set(made)) == 4
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == made


@pytest.mark.parametrize("reply", [b"<html>", b"{}", b'{"choices": []}', b'data: {"cho', b'data: {"choices": [{}]}'])
def test_answer_that_is_none_is_an_error_with_a_remedy(server: Canned, reply: bytes) -> None:
    server.reply = reply
    model, prompt = RemoteModel(url(server)), Prompt([{"role": "user", "content": "?"}])
    with pytest.raises(KeepstepError, match="cannot be read"):
        "".join(model.stream(prompt, Sampling())) if reply.startswith(b"data") else model.answers(
            [prompt], Sampling(), 1
        )
    server.models = reply
    if not reply.startswith(b"{"):
        with pytest.raises(KeepstepError, match="cannot be read"):
            RemoteModel(url(server))
