"""The HTTP server of `keepstep serve`: OpenAI's chat completions, models, health and Prometheus metrics."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from torch import Tensor

from keepstep.core.errors import KeepstepError
from keepstep.evaluate.chat_model import ChatModel
from keepstep.evaluate.generate import chooser
from keepstep.evaluate.remote_model import TOO_LONG_CODE
from keepstep.observe.access import Access, AccessServer, Answer, Handler
from keepstep.observe.sinks.prometheus import CONTENT_TYPE
from keepstep.serve.batcher import Batcher, BusyError, Generation
from keepstep.serve.chat_completions import ChatRequest, Reply, RequestError, read_request, split_answer, sure_length
from keepstep.serve.constraint import Constraint, TokenTexts, call_syntax
from keepstep.serve.json_grammar import States, start
from keepstep.serve.json_schema import SchemaError, compile_schema

MAX_BODY_BYTES = 16 << 20
MOST_WAITING = 256
"""Requests that wait for their turn; further ones are refused."""
_POLL_S = 0.5
"""How often a client that waits is looked at: one that has left need not be answered."""


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(json.dumps(value, ensure_ascii=False).encode(), "application/json", status)


def _no_page(method: str, path: str) -> RequestError:
    known = "POST /v1/chat/completions, GET /v1/models, /health and /metrics"
    return RequestError(f"there is no {method} {path}, but {known}", status=HTTPStatus.NOT_FOUND)


class ChatHandler(Handler):
    """Adds POST: a body of bounded size, one answer or server-sent events."""

    server: ChatServer

    def do_POST(self) -> None:  # noqa: N802 - the name that the parent calls
        """Read, generate, send."""
        try:
            body = self._body()
            asked = self._admitted()
            if asked is None:
                return
            if asked[0].path != "/v1/chat/completions":
                raise _no_page("POST", asked[0].path)
            self.server.waits_for(self.connection, False)
            written = Written(self.server, read_request(body))
        except RequestError as error:
            self.server.refused += 1
            self._send(_json(error.as_json(), error.status))
            return
        except Exception as error:  # our own bug: the client must hear of it, not wait for a closed connection
            failure = RequestError(f"{type(error).__name__}: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR)
            self._send(_json(failure.as_json(), failure.status))
            return
        try:
            self._send_stream(written) if written.request.stream else self._send_whole(written)
        finally:
            # Also when the client has left: nobody wants the rest.
            written.generation.cancelled.set()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        # What is not read would be taken for the next request.
        self.close_connection = True
        if not length.isascii() or not length.isdigit():
            raise RequestError("a request needs Content-Length", status=HTTPStatus.LENGTH_REQUIRED)
        if int(length) > MAX_BODY_BYTES:
            raise RequestError(
                f"the body has {length} bytes, the limit is {MAX_BODY_BYTES}",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        body = self.rfile.read(int(length))
        # Other kinds can be sent by any web page that a user of this machine opens.
        if self.headers.get_content_type() != "application/json":
            raise RequestError("Content-Type must be application/json", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        self.close_connection = self.headers.get("Connection", "").lower() == "close"
        return body

    def _send_whole(self, written: Written) -> None:
        for _ in written.pieces(self._check_client):
            pass
        if written.failure is not None:
            self._send(_json(written.failure.as_json(), written.failure.status))
            return
        text, calls = written.result()
        reason = "tool_calls" if calls else written.reason
        self._send(_json(written.reply.whole(text, calls, reason, written.tokens)))

    def _send_stream(self, written: Written) -> None:
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self._event(written.reply.piece({"role": "assistant", "content": ""}))
        shown = 0
        for piece in written.pieces(self._check_client):
            shown += len(piece)
            self._event(written.reply.piece({"content": piece}))
        if written.failure is not None:
            self._event(written.failure.as_json())
            return
        text, calls = written.result()
        if len(text) > shown:
            self._event(written.reply.piece({"content": text[shown:]}))
        for part in written.reply.call_pieces(calls):
            self._event(part)
        self._event(written.reply.piece({}, "tool_calls" if calls else written.reason))
        if written.request.with_usage:
            self._event(written.reply.usage_piece(written.tokens))
        self._write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self._write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        # A client that does not read is closed after the server's patience.
        self.server.waits_for(self.connection)
        self.wfile.write(data)
        self.server.waits_for(self.connection, False)

    def _check_client(self) -> None:
        # Not select(): it cannot look at more than 1,024 files.
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client has left")


class Written:
    """An answer while it is written."""

    def __init__(self, server: ChatServer, request: ChatRequest) -> None:
        self.server, self.request = server, request
        model = server.model
        ids = server.encode(request)
        room = model.context_length - len(ids)
        if room < 1:
            raise RequestError(
                f"the messages have {len(ids)} tokens, the model's limit is {model.context_length}",
                "messages",
                code=TOO_LONG_CODE,
            )
        self.reply = Reply(server.name, len(ids), request.with_usage)
        self.reason, self.text, self.tokens = "stop", "", 0
        self.failure: RequestError | None = None
        most = min(room, request.max_new_tokens or room)
        self.generation = Generation(ids, self._chooser(), most)
        try:
            server.batcher.submit(self.generation)
        except BusyError:
            raise RequestError(
                "too many requests are waiting; try again later", status=HTTPStatus.TOO_MANY_REQUESTS
            ) from None
        server.answered += 1
        server.prompt_tokens += len(ids)

    def _chooser(self) -> Any:
        request, stop_tokens = self.request, self.server.model.stop_tokens
        choose = chooser(request.temperature, request.top_p, request.seed)
        constraint = self.server.constraint(request)

        def free(logits_v: Tensor) -> int | None:
            token = choose(logits_v)
            return None if token in stop_tokens else token

        return free if constraint is None else lambda logits_v: constraint.choose(logits_v, choose, stop_tokens)

    def pieces(self, check_client: Any) -> Iterator[str]:
        """Parts of the text that are surely shown, as they come."""
        ids: list[int] = []
        shown = 0
        for item in self.generation.tokens(_POLL_S, check_client):
            self.reply.reused_tokens = self.generation.reused
            if isinstance(item, str):
                self.text = self.server.model.decode(ids)
                self._end(item)
                return
            ids.append(item)
            self.tokens += 1
            text = self.server.model.decode(ids)
            # A character of several tokens is shown when it is complete.
            self.text = text if not text.endswith("\ufffd") else self.text
            if any(stop in text for stop in self.request.stops):
                self.text = text
                return
            sure = sure_length(self.text, bool(self.request.prompt.tools), self.request.stops)
            if sure > shown:
                yield self.text[shown:sure]
                shown = sure

    def _end(self, reason: str) -> None:
        if reason == "length":
            self.reason = "length"
        elif reason != "stop":
            error = self.generation.error or "the server is shutting down"
            self.failure = RequestError(error, status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def result(self) -> tuple[str, list[Any]]:
        """Text and calls of the whole answer."""
        text = self.text
        for stop in self.request.stops:
            text = text.partition(stop)[0]
        tools = self.request.prompt.tools
        return split_answer(text, self.request.most_calls, tools) if tools else (text, [])


class ChatServer(AccessServer):
    """Serves one model."""

    handler = ChatHandler
    # Above those that are answered or wait: the next one must get status 429. Half is for those that are closing.
    most_clients = 2 * (MOST_WAITING + 128)
    refusal = _json(
        RequestError("a token is needed: Authorization: Bearer TOKEN", status=HTTPStatus.UNAUTHORIZED).as_json(),
        HTTPStatus.UNAUTHORIZED,
    )

    def __init__(self, access: Access, model: ChatModel, name: str, most_rows: int) -> None:
        self.model, self.name = model, name
        # First, because server_close() is called where the port cannot be opened.
        self.batcher = Batcher(model.model, most_rows, MOST_WAITING)
        super().__init__(access)
        self.refused = self.answered = self.prompt_tokens = 0
        self._since = int(time.time())
        self._texts = TokenTexts(model.decode)
        self._syntax = call_syntax(model)
        # A template's process answers one question at a time.
        self._template = threading.Lock()

    @property
    def base_url(self) -> str:
        """What OpenAI clients call `base_url`."""
        return f"{self.url.partition('?')[0]}v1"

    def answer(self, path: str, query: dict[str, str]) -> Answer:  # noqa: ARG002 - the parent's signature
        """GET requests."""
        described = {"id": self.name, "object": "model", "created": self._since, "owned_by": "keepstep"}
        match path:
            case "/health":
                return _json({"status": "ok"})
            case "/v1/models":
                return _json({"object": "list", "data": [described]})
            case "/metrics":
                return Answer(self._metrics().encode(), CONTENT_TYPE)
        if path == f"/v1/models/{self.name}":
            return _json(described)
        missing = self._other_model(unquote(path[11:])) if path.startswith("/v1/models/") else _no_page("GET", path)
        return _json(missing.as_json(), missing.status)

    def _other_model(self, name: str) -> RequestError:
        message = f"the model {name!r} is not served here, {self.name!r} is"
        return RequestError(message, "model", HTTPStatus.NOT_FOUND, "model_not_found")

    def encode(self, request: ChatRequest) -> list[int]:
        """Tokens of a request's prompt. Raises RequestError."""
        if request.model not in ("", self.name):
            raise self._other_model(request.model)
        try:
            with self._template:
                return self.model.encode(request.prompt)
        except KeepstepError as error:
            raise RequestError(f"{error.message}; {error.hint}" if error.hint else error.message, "messages") from None

    def constraint(self, request: ChatRequest) -> Constraint | None:
        """The grammar of a request's answer; None for free text. Raises RequestError."""
        tools, fits_schema = request.prompt.tools, request.schema is not None and not request.forced
        if not request.forced and not request.strict and not fits_schema:
            return None
        states = self._answer_states(request) if fits_schema else frozenset()
        if fits_schema and not tools:
            return Constraint(states, self._texts)
        if self._syntax is None:
            unknown = "this model's chat template writes calls in a form that cannot be enforced"
            hint = "use tool_choice auto, without strict and response_format"
            raise RequestError(f"{unknown}; {hint}", "tool_choice")
        try:
            if request.forced or fits_schema:
                names = request.forced or tuple(item["function"]["name"] for item in tools)
                return Constraint(states | self._syntax.states(tools, names, request.strict), self._texts)
            return Constraint(self._syntax.free_states(tools, request.strict), self._texts)
        except SchemaError as error:
            raise RequestError(str(error), "tools") from None

    def _answer_states(self, request: ChatRequest) -> States:
        try:
            return start(compile_schema(request.schema, strict=request.strict_schema))
        except SchemaError as error:
            raise RequestError(str(error), "response_format") from None

    def server_close(self) -> None:
        """End all answers."""
        super().server_close()
        self.batcher.close()

    def _metrics(self) -> str:
        values = {
            "requests_total": ("counter", "Requests that were answered.", self.answered),
            "refused_total": ("counter", "Requests that were refused.", self.refused),
            "prompt_tokens_total": ("counter", "Tokens of prompts.", self.prompt_tokens),
            "reused_prompt_tokens_total": ("counter", "Of these, not computed again.", self.batcher.tokens_reused),
            "generated_tokens_total": ("counter", "Tokens of answers.", self.batcher.tokens_written),
            "running": ("gauge", "Answers being decoded.", self.batcher.running),
            "waiting": ("gauge", "Answers that wait for their turn.", self.batcher.waiting),
        }
        lines = []
        for short, (kind, meaning, value) in values.items():
            name = f"keepstep_serve_{short}"
            lines += [f"# HELP {name} {meaning}\n", f"# TYPE {name} {kind}\n", f"{name} {value}\n"]
        return "".join(lines)
