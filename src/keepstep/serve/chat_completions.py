"""OpenAI's chat completions: a request's JSON → what to generate, and the JSON of answers and their pieces.

What a request asks for and this server does not do is refused by name, never ignored: a client that asks for
log-probabilities must not believe that it got an answer without any on purpose.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from keepstep.data.chat.rows import BadRow, Tool, cleaned, parsed_list, tool
from keepstep.evaluate.ast_check import Call, MalformedCall, parse_calls
from keepstep.evaluate.chat_model import Prompt, is_valid_text

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "top_logprobs": (None, 0), "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0), "logit_bias": (None, {}), "audio": (None,), "functions": (None, []),
    "function_call": (None,), "modalities": (None, ["text"]), "web_search_options": (None,), "best_of": (None, 1),
    "top_k": (None, 0, -1), "min_p": (None, 0), "repetition_penalty": (None, 1),
}  # fmt: skip
"""Parameters that change an answer, and the values with which they do not."""
CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Texts that open a call inside an answer; a text that starts with a bracket may be one from its beginning."""
MAX_STOPS = 4


class RequestError(Exception):
    """A request that is refused: the HTTP status, and the parameter at fault."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def as_json(self) -> dict[str, Any]:
        """The body of an error answer."""
        kinds = {HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
        own_fault = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "server_error" if own_fault else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for."""

    model: str
    prompt: Prompt
    max_new_tokens: int | None
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool
    """Whether a stream ends with the number of tokens."""
    forced: tuple[str, ...]
    """Functions of which one must be called; empty if none must be."""
    strict: tuple[str, ...]
    """Functions whose arguments must fit their schema, if the model calls them."""
    schema: Any
    """JSON Schema of the whole answer; None for any text."""
    strict_schema: bool
    """Whether a key of it that cannot be enforced is an error."""
    most_calls: int | None


def read_request(body: bytes) -> ChatRequest:
    """The request of a POST body. Raises RequestError."""
    given = _object(body)
    for name, harmless in _REFUSED.items():
        if given.get(name) not in harmless:
            raise RequestError(f"{name} = {given[name]!r} is not supported", name)
    limit = next((name for name in ("max_completion_tokens", "max_tokens") if given.get(name) is not None), None)
    tools = _tools(given)
    schema, strict_schema = _schema(given.get("response_format"))
    try:
        messages = cleaned(given.get("messages"))
    except BadRow as bad:
        raise RequestError(str(bad), "messages") from None
    return ChatRequest(
        model=str(given.get("model") or ""),
        # Without the right to call, the model need not know the tools.
        prompt=Prompt(messages, () if given.get("tool_choice") == "none" else tools),
        max_new_tokens=None if limit is None else _whole(given[limit], limit, 1, 1 << 31),
        temperature=_number(given.get("temperature"), "temperature", 0, 2, default=1.0),
        top_p=_number(given.get("top_p"), "top_p", 1e-9, 1, default=1.0),
        # Modulo: OpenAI's seeds have a sign, ours have none.
        seed=_whole(given.get("seed"), "seed", -(2**63), 2**63 - 1, default=secrets.randbits(62)) % 2**63,
        stops=_stops(given.get("stop")),
        stream=_flag(given, "stream"),
        with_usage=_flag(_options(given), "include_usage"),
        forced=_forced(given.get("tool_choice"), tools),
        strict=() if given.get("tool_choice") == "none" else _strict(given),
        schema=schema,
        strict_schema=strict_schema,
        most_calls=None if _flag(given, "parallel_tool_calls", default=True) else 1,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        if isinstance(given, dict) and is_valid_text(json.dumps(given, ensure_ascii=False)):
            return given
    except (ValueError, RecursionError):
        pass
    raise RequestError("the body is not a JSON object in UTF-8")


def _number(value: Any, name: str, least: float, most: float, default: float = 0.0) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RequestError(f"{name} = {value!r} must be a number from {least:g} to {most:g}", name)
    return value


def _whole(value: Any, name: str, least: int, most: int, default: int = 0) -> int:
    # No number but a whole one: a float of 63 bits is another number.
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise RequestError(f"{name} = {value!r} must be a whole number from {least} to {most}", name)
    return default if value is None else value


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = default if given.get(name) is None else given[name]
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {value!r} must be true or false", name)
    return value


def _options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    value = given.get("stream_options") or {}
    if not isinstance(value, dict):
        raise RequestError(f"stream_options = {value!r} must be an object", "stream_options")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"stop must be a text or a list of at most {MAX_STOPS}", "stop")
    return tuple(text for text in texts if text)


def _tools(given: Mapping[str, Any]) -> tuple[Tool, ...]:
    try:
        return tuple(tool(item) for item in parsed_list(given.get("tools"), "tools"))
    except BadRow as bad:
        raise RequestError(str(bad), "tools") from None


def _strict(given: Mapping[str, Any]) -> tuple[str, ...]:
    functions = (item.get("function", item) for item in parsed_list(given.get("tools"), "tools"))
    return tuple(function["name"] for function in functions if function.get("strict") is True)


def _forced(choice: Any, tools: Sequence[Tool]) -> tuple[str, ...]:
    names = tuple(item["function"]["name"] for item in tools)
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required" and names:
        return names
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if name in names:
            return (name,)
    forms = 'none, auto, required, or {"type": "function", "function": {"name": NAME}}'
    known = f"NAME is one of {', '.join(names)}" if names else "the request has no tools"
    raise RequestError(f"tool_choice = {choice!r} fits none of the tools; expected {forms}; {known}", "tool_choice")


def _schema(form: Any) -> tuple[Any, bool]:
    """The schema of the whole answer, and whether all of it must be enforced."""
    if form is None or form == {"type": "text"}:
        return None, False
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {"type": "object"}, False
    if isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("json_schema"), dict):
        described = form["json_schema"]
        return described.get("schema", True), _flag(described, "strict")
    raise RequestError("response_format must be of type text, json_object or json_schema", "response_format")


def split_answer(text: str, most_calls: int | None, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """Text and calls of a whole answer; a call that cannot be parsed stays text."""
    try:
        calls = parse_calls(text)
    except MalformedCall:
        calls = []
    names = [item["function"]["name"] for item in tools]
    # JSON without a mark is a call only if it names a tool: an answer may be any object with a name.
    marked = any(mark in text for mark in CALL_MARKS)
    if not calls or not (marked or all(name in names for name, _ in calls)):
        return text, []
    before = min((text.find(mark) for mark in CALL_MARKS if mark in text), default=0)
    return text[:before].strip(), calls[:most_calls]


def sure_length(text: str, with_tools: bool, stops: Sequence[str]) -> int:
    """How much of an unfinished answer is surely shown text: no stop or call may begin there."""
    marks = [*stops, *(CALL_MARKS if with_tools else ())]
    if with_tools and text.lstrip()[:1] in ("{", "[", ""):
        return 0
    found = [text.find(mark) for mark in marks if mark in text]
    return min([*found, len(text) - max((_overlap(text, mark) for mark in marks), default=0)])


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


@dataclass
class Reply:
    """One answer in OpenAI's form, whole or piece by piece."""

    model: str
    prompt_tokens: int
    with_usage: bool = False
    """Whether a stream ends with the number of tokens; its other parts have a usage of null then."""
    reused_tokens: int = 0
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, calls: Sequence[Call], reason: str, tokens: int) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(made) for made in calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return self._object("chat.completion", [choice]) | {"usage": self.usage(tokens)}

    def piece(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        """One part of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice]) | ({"usage": None} if self.with_usage else {})

    def call_pieces(self, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
        """Parts of a stream with one call each."""
        for index, made in enumerate(calls):
            yield self.piece({"tool_calls": [{"index": index, **_call(made)}]})

    def usage_piece(self, tokens: int) -> dict[str, Any]:
        """The part that `stream_options.include_usage` asks for."""
        return self._object("chat.completion.chunk", []) | {"usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, Any]:
        """Tokens of prompt and answer."""
        total, details = self.prompt_tokens + tokens, {"cached_tokens": self.reused_tokens}
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _call(made: Call) -> dict[str, Any]:
    name, arguments = made
    written = json.dumps(arguments, ensure_ascii=False)
    # A lone surrogate, which a model can write as an escape, stays one: UTF-8 has no bytes for it.
    function = {"name": name, "arguments": written if is_valid_text(written) else json.dumps(arguments)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
