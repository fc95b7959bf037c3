"""A model behind an OpenAI-compatible server, `keepstep serve` for example, in place of one in this process."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

from keepstep.core.errors import KeepstepError
from keepstep.evaluate.chat_model import ChatModel, Prompt, Reply, Sampling

TIMEOUT_S = 600.0
TOO_LONG_CODE = "context_length_exceeded"
"""OpenAI's name of this error."""


class PromptTooLongError(KeepstepError):
    """The prompt leaves no room for an answer."""


class RemoteModel:
    """Answers prompts as a ChatModel does. The key is KEEPSTEP_UI_TOKEN or OPENAI_API_KEY."""

    def __init__(self, url: str) -> None:
        """`url` is what OpenAI clients call base_url, with or without its /v1."""
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        models = self._asked("models").get("data") or [{}]
        self.name = str(models[0].get("id", ""))

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        batch: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """One answer for each prompt, `batch` requests at a time; calls are written as `<tool_call>…</tool_call>`."""
        with ThreadPoolExecutor(batch) as pool:
            asked = [pool.submit(self._answer, prompt, sampling) for prompt in prompts]
            for done, _ in enumerate(as_completed(asked), start=1):
                progress(done)
        return [one.result() for one in asked]

    def identity(self) -> dict[str, Any]:
        """What answers depend on, as far as it can be known from here."""
        return {"url": self._url, "model": self.name}

    def answers_that_fit(
        self, prompts: Sequence[Prompt], sampling: Sampling, batch: int, progress: Callable[[int], None]
    ) -> list[str | None]:
        """The answers, and None for each prompt that leaves no room for one."""
        answers: dict[int, str | None] = {}

        def reply(number: int, text: str | None) -> None:
            answers[number] = text
            progress(len(answers))

        self.converse(prompts, reply, sampling, batch)
        return [answers[number] for number in range(len(prompts))]

    def converse(self, prompts: Sequence[Prompt], reply: Reply, sampling: Sampling, batch: int) -> None:
        """Hold several conversations, `batch` of them at a time."""

        def hold(number: int) -> None:
            prompt: Prompt | None = prompts[number]
            while prompt is not None:
                try:
                    text = self._answer(prompt, sampling)
                except PromptTooLongError:
                    text = None
                prompt = reply(number, text)

        with ThreadPoolExecutor(batch) as pool:
            for _ in pool.map(hold, range(len(prompts))):
                pass

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """An answer piece by piece, as it is written."""
        calls: dict[int, dict[str, Any]] = {}
        with (
            self._readable(),
            self._open("chat/completions", self._body(prompt, sampling) | {"stream": True}) as events,
        ):
            for line in events:
                data = line.decode().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _refused(self._url, event)
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""
                    for piece in choice["delta"].get("tool_calls") or ():
                        _add_piece(calls, piece)
        yield _written(list(calls.values()))

    def _answer(self, prompt: Prompt, sampling: Sampling) -> str:
        answer = self._asked("chat/completions", self._body(prompt, sampling))
        with self._readable():
            message = answer["choices"][0]["message"]
            return (message.get("content") or "") + _written(message.get("tool_calls") or ())

    def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._readable(), self._open(path, body) as answer:
            return dict(json.loads(answer.read()))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Around the lines that read an answer: a server can end in the middle of it, or be something else."""
        try:
            yield
        except (OSError, HTTPException, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            hint = "check that this is the address of an OpenAI-compatible server, and its log"
            raise KeepstepError(f"the answer of {self._url} cannot be read: {problem[:200]}", hint) from None

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        body = {
            "model": self.name,
            "messages": _sent(prompt.messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "max_completion_tokens": sampling.max_new_tokens,
        }
        return body | ({"tools": list(prompt.tools)} if prompt.tools else {})

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        key = os.environ.get("KEEPSTEP_UI_TOKEN") or os.environ.get("OPENAI_API_KEY") or "none"
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self._url}/{path}", data, headers)
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise _refused(self._url, _json(error.read())) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise KeepstepError(f"{self._url} does not answer: {reason}", "start keepstep serve MODEL there") from None


AnyModel = ChatModel | RemoteModel
"""A model in this process, or one behind a server."""


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {"error": {"message": body.decode(errors="replace")[:200]}}


def _refused(url: str, answer: Any) -> KeepstepError:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    if isinstance(error, dict) and error.get("code") == TOO_LONG_CODE:
        return PromptTooLongError(f"{url} refused: {message}", "ask something shorter")
    return KeepstepError(f"{url} refused: {message}", "its key goes into KEEPSTEP_UI_TOKEN")


def _sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the interface has them: calls with ids, which their results name, and arguments as text."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []
    """Ids of calls whose results have not come yet, in their order."""
    for number, message in enumerate(messages):
        one = {name: value for name, value in message.items() if name != "weight"}
        if message.get("tool_calls"):
            waiting = [str(call.get("id") or f"call_{number}_{place}") for place, call in enumerate(one["tool_calls"])]
            one["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for name, call in zip(waiting, message["tool_calls"], strict=True)
            ]
        elif message["role"] == "tool":
            following = waiting.pop(0) if waiting else "call_0"
            one.setdefault("tool_call_id", following)
        sent.append(one)
    return sent


def _add_piece(calls: dict[int, dict[str, Any]], piece: Mapping[str, Any]) -> None:
    """Add a part of a streamed call: servers send the name first, and then the arguments in pieces."""
    call = calls.setdefault(piece.get("index", len(calls)), {"function": {"name": "", "arguments": ""}})
    for key, text in (piece.get("function") or {}).items():
        if key in ("name", "arguments"):
            call["function"][key] += text or ""


def _written(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as text, whatever the template of the server's model writes."""
    texts = (
        f'{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"] or "{}"}}}'
        for call in calls
    )
    return "\n".join(f"<tool_call>{text}</tool_call>" for text in texts)
