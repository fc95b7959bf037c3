"""Chat templates: jinja2 in a sandbox with the extensions that Hugging Face templates expect.

A rendered conversation comes with the spans of the assistant's text. A template can mark them with `{% generation %}`;
otherwise they are found by rendering the conversation up to each assistant turn (prefix rendering).

The sandbox cannot stop endless loops and gigabytes of text. So a model's own template runs in a process with limits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, malformed_as
from keepstep.core.files import read_json_object
from keepstep.data.chat.rows import BadRow, Conversation, Message, calls_of

BUILT_IN = (resources.files("keepstep.data.chat") / "built_in.jinja").read_text(encoding="utf-8")
"""ChatML turns with tools and calls in the Hermes format, which vLLM's `hermes` parser reads."""

TURN_END = "<|im_end|>"
"""The end of a turn in the built-in template."""
SPECIAL_TOKENS = ("<|im_start|>", TURN_END, "<tool_call>", "</tool_call>", "<tools>", "</tools>")
"""Texts that should be single tokens in a tokenizer for the built-in template."""

TRAINING_DAY = datetime(2024, 7, 26)
"""The date in training rows, where a template asks for one: the default of Llama's templates. With today's date, a run
that is resumed tomorrow on another machine would train on other tokens."""

_NULL_CONTENT = re.compile(r"content(['\"]\])? is none")
"""DeepSeek's templates render calls only of turns whose content is null."""
_TEXT_ARGUMENTS = re.compile(r"arguments['\"]\]\s*\+")
"""DeepSeek's templates join the arguments of a call with other text, so they must be text, too."""
_NINE_LETTERS = re.compile(r"length (!=|==) 9")
"""Mistral's templates refuse ids of calls that do not have nine letters or digits."""

CPU_S, MEMORY_BYTES, MAX_CHARACTERS = 10.0, 2**30, 2**24
"""Limits of one rendering; an ordinary one takes a millisecond."""


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the assistant's message number `message`."""

    start: int
    end: int
    message: int


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and the spans of the assistant in it."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """Renders conversations. `ends` are the texts that end a turn (the tokenizer's special tokens)."""

    def __init__(self, source: str = BUILT_IN, *, bos: str = "", eos: str = "", ends: Sequence[str] = ()) -> None:
        self.source, self.bos, self.eos = source, bos, eos
        self._ends = tuple(dict.fromkeys(text for text in (*ends, eos, TURN_END) if text))
        self.marks_turns = False
        """Whether the template itself marks the assistant's text."""
        self._markers = ("", "")
        """Texts put around `{% generation %}` blocks while it is rendered; empty if spans are not needed."""
        self._day = TRAINING_DAY
        self._environment = self._checked_environment()
        self._ready: dict[int, dict[str, Any]] = {}

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text before the assistant's next turn; a date in it is today's."""
        self._markers = ("", "")
        self._day = datetime.now()
        return self._render(messages, tools, add_generation_prompt=True)

    def turn_end(self) -> str:
        """The special token that ends the assistant's turn; empty if the template has none."""
        messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
        self._markers = ("", "")
        try:
            text = self._render(messages, ()).rstrip()
        except BadRow:
            return ""
        return max((end for end in self._ends if text.endswith(end)), key=len, default="")

    def render(self, conversation: Conversation) -> Rendered:
        """Text and spans. Raises BadRow."""
        self._day = TRAINING_DAY
        rendered = self._by_markers(conversation) if self.marks_turns else self._by_prefix(conversation)
        for span in rendered.spans:
            # A template without tools drops calls silently: the model would learn to answer nothing.
            shown = rendered.text[span.start : span.end]
            if any(name not in shown for name, _ in calls_of(conversation.messages[span.message])):
                raise BadRow(f"the chat template leaves out the tool calls of message {span.message}")
        return rendered

    def render_ahead(self, conversations: Sequence[Conversation]) -> None:
        """Say what is rendered next, where that saves time."""

    def _by_markers(self, conversation: Conversation) -> Rendered:
        opening = _unused_text(conversation)
        closing = opening.replace("\ufdd0", "\ufdd1")
        self._markers = (opening, closing)
        turns = [number for number, item in enumerate(conversation.messages) if item["role"] == "assistant"]
        text, *rest = self._render(conversation.messages, conversation.tools).split(opening)
        spans = []
        for number, piece in enumerate(rest):
            inside, closed, after = piece.partition(closing)
            if not closed or number >= len(turns):
                raise BadRow("the template does not mark exactly one span for each of the assistant's turns")
            spans.append(Span(len(text), len(text) + len(inside), turns[number]))
            text += inside + after
        if len(spans) != len(turns):
            raise BadRow(f"the template renders {len(spans)} of the assistant's {len(turns)} turns")
        return Rendered(text, tuple(spans))

    def _by_prefix(self, conversation: Conversation) -> Rendered:
        self._markers = ("", "")
        messages, tools = conversation.messages, conversation.tools
        text = self._render(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            after = self._render(messages[: number + 1], tools)
            if not text.startswith(before) or not after.startswith(before):
                raise BadRow(f"the template renders the text before message {number} differently when it follows")
            end: int | None = len(before) + self._turn_length(after[len(before) :])
            if text[:end] != after[:end]:
                end = self._followed_end(conversation, number, text, len(before))
            if end is None:
                raise BadRow(f"the template renders message {number} differently when other messages follow")
            spans.append(Span(len(before), end, number))
        return Rendered(text, tuple(spans))

    def _followed_end(self, conversation: Conversation, number: int, text: str, start: int) -> int | None:
        """The end of a turn that starts at `start` and is followed by other messages; None if it is unknown.

        Qwen3's template adds an empty thought to the last turn only. How it renders an earlier turn is found by
        rendering it with the next message, and is used if nothing of the turn itself was left out.
        """
        messages, mark = conversation.messages, self.turn_end()
        if not mark or number + 1 == len(messages):
            return None
        turn, earlier, following = messages[number], list(messages[:number]), messages[number + 1]
        placeholder = _unused_text(conversation)

        def before_next(message: Message) -> str:
            """The text up to the content of the next message."""
            shown = self._render([*earlier, message, {**following, "content": placeholder}], conversation.tools)
            return shown.partition(placeholder)[0] if placeholder in shown else ""

        try:
            head, plain = before_next(turn), before_next(_emptied(turn))
        except BadRow:
            return None
        # An almost empty turn cannot contain the end mark, so it shows the text between that mark and the next content.
        gap = plain[start:].partition(mark)[2]
        end = len(head) - len(gap)
        shown = head[start:end]
        complete = all(part in shown for part in (turn["content"].strip(), *(name for name, _ in calls_of(turn))))
        return end if text.startswith(head) and head.endswith(mark + gap) and complete and end > start else None

    def _turn_length(self, turn: str) -> int:
        """Length of a rendered turn up to its end mark, without the white space that separates turns."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self._ends) else len(turn)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        try:
            # Compiled here and not before: the compiler computes constants, such as 10 ** 30000000.
            text: str = self._template.render(
                messages=[self._adapted(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
            )
        except Exception as error:  # an expression of a template can raise anything
            raise BadRow(f"the chat template refuses it: {str(error)[:1000] or type(error).__name__}") from None
        if len(text) > MAX_CHARACTERS:
            raise BadRow(f"the chat template renders {len(text):,} characters, more than {MAX_CHARACTERS:,}")
        return text

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as this family's template expects it; the tokens of other families do not change."""
        calls = message.get("tool_calls")
        if calls and not message.get("content") and _NULL_CONTENT.search(self.source):
            message = {**message, "content": None}
        if calls and _TEXT_ARGUMENTS.search(self.source):
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
            calls = message["tool_calls"]
        if _NINE_LETTERS.search(self.source) and (calls or "tool_call_id" in message):
            message = dict(message)
            if calls:
                message["tool_calls"] = [{**call, "id": _nine_letters(call.get("id", ""))} for call in calls]
            else:
                message["tool_call_id"] = _nine_letters(message["tool_call_id"])
        return message

    @cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self.source)

    def _checked_environment(self) -> Any:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        chat = self

        class Generation(Extension):
            """`{% generation %} … {% endgeneration %}`."""

            tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

            def parse(self, parser: Any) -> Any:
                """Call `_around` with the rendered block."""
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                chat.marks_turns = True
                return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

            def _around(self, caller: Any) -> str:
                opening, closing = chat._markers
                return f"{opening}{caller()}{closing}"

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: self._day.strftime(form)
        try:
            environment.parse(self.source)
        except (jinja2.TemplateSyntaxError, ValueError, RecursionError) as error:
            line, message = getattr(error, "lineno", "?"), getattr(error, "message", error)
            wrong = f"the chat template is not valid jinja2: line {line}: {message}"
            raise DataError(wrong, "correct it, or name another with chat.template") from None
        return environment


class ConfinedTemplate(ChatTemplate):
    """A template that renders in a process of its own, with limits on time and memory."""

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text before the assistant's next turn."""
        return str(_value(*self._request([["prompt", messages, tools]])))

    def turn_end(self) -> str:
        """The special token that ends the assistant's turn."""
        return str(_value(*self._request([["turn_end"]])))

    def render(self, conversation: Conversation) -> Rendered:
        """Text and spans. Raises BadRow."""
        if id(conversation) not in self._ready:
            self.render_ahead([conversation])
        answer = _value(self._ready.pop(id(conversation)))
        return Rendered(answer["text"], tuple(Span(**span) for span in answer["spans"]))

    def render_ahead(self, conversations: Sequence[Conversation]) -> None:
        """Render with one request, which costs about as much as a rendering."""
        answers = self._request([["render", item.messages, item.tools] for item in conversations])
        self._ready = dict(zip(map(id, conversations), answers, strict=True))

    @cached_property
    def _process(self) -> Any:
        code = "import sys; sys.path.insert(0, sys.argv[1]); from keepstep.data.chat import template; template.serve()"
        command = [sys.executable, "-c", code, str(Path(__file__).parents[3])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, _end, process, os.getpid())
        made = {"source": self.source, "bos": self.bos, "eos": self.eos, "ends": self._ends}
        print(json.dumps([CPU_S, MEMORY_BYTES, made]), file=process.stdin)
        return process

    def _request(self, calls: Sequence[Any]) -> Any:
        # Without a reader the process has ended, and there is no answer.
        with suppress(BrokenPipeError):
            print(json.dumps(calls), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            self._process.communicate()
            wrong = f"was stopped (exit code {self._process.returncode}): it may take {CPU_S:g} s for a conversation"
            raise DataError(f"the chat template {wrong}", "name another with chat.template")
        return json.loads(line)


def _value(answer: dict[str, Any]) -> Any:
    if "refused" in answer:
        raise BadRow(answer["refused"])
    return answer["value"]


def serve() -> None:
    """The process of a `ConfinedTemplate`: each line of JSON is a list of calls, and gets a line of their answers."""
    cpu_s, memory_bytes, made = json.loads(sys.stdin.readline())
    # Not if the limit is lower already.
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # Ctrl-C is for the process that asks. The timer's signal ends this one, also in the middle of an operation.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    template = ChatTemplate(**made)
    for line in sys.stdin:
        answers = []
        for method, *given in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                given = [Conversation(*map(tuple, given))] if method == "render" else given
                answers.append(json.dumps({"value": getattr(template, method)(*given)}, default=vars))
            except Exception as error:  # BadRow, or no memory
                answers.append(json.dumps({"refused": str(error) or type(error).__name__}))
        print(f"[{', '.join(answers)}]", flush=True)


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a template's process. A forked copy of the one that started it would wait for ever: it is not its child."""
    if os.getpid() == owner:
        process.communicate()


def _unused_text(conversation: Conversation) -> str:
    """A text that does not occur in the conversation, also not with the closing marker's outer characters."""
    content = json.dumps(conversation.row(), ensure_ascii=False)
    salt = 0
    while f"\ufdd0{salt}" in content or f"\ufdd1{salt}" in content:
        salt += 1
    return f"\ufdd0{salt}\ufdd0"


def _emptied(turn: Message) -> Message:
    """A turn of the same kind with almost no content: calls keep their functions and lose their arguments."""
    calls = [{**item, "function": {**item["function"], "arguments": {}}} for item in turn.get("tool_calls", ())]
    return {**turn, "content": "!", **({"tool_calls": calls} if calls else {})}


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes <, > and & for HTML, and a model would learn to write the escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def find_template(tokenizer: Path | None, override: str = "") -> ChatTemplate:
    """The template of a tokenizer's folder (chat_template.jinja, tokenizer_config.json), or the built-in one."""
    settings = tokenizer.parent / "tokenizer_config.json" if tokenizer else None
    config = read_json_object(settings) if settings and settings.is_file() else {}
    bos, eos = (token_text(config.get(key)) for key in ("bos_token", "eos_token"))
    source = BUILT_IN
    if override:
        if not Path(override).is_file():
            raise DataError(f"chat.template is {override!r}, which is missing", "give the path of a jinja2 template")
        source = _template_text(Path(override))
    elif tokenizer is not None and (tokenizer.parent / "chat_template.jinja").is_file():
        source = _template_text(tokenizer.parent / "chat_template.jinja")
    elif config.get("chat_template"):
        source = _named_template(config["chat_template"])
    kind = ChatTemplate if source == BUILT_IN else ConfinedTemplate
    return kind(source, bos=bos, eos=eos, ends=_special_texts(tokenizer))


def _template_text(path: Path) -> str:
    with malformed_as(DataError, f"{path} is no template", "a template is a text file in UTF-8"):
        text = path.read_text(encoding="utf-8")
    if not text.strip():
        # It would render every conversation as no text at all.
        raise DataError(f"{path} is empty", "download it again, delete it, or name another with chat.template")
    return text


def _named_template(value: Any) -> str:
    """Some tokenizers have several named templates: prefer the one for tools."""
    if isinstance(value, str):
        return value
    with malformed_as(DataError, "chat_template in tokenizer_config.json is no template", "download the file again"):
        named = {item["name"]: item["template"] for item in value}
        return str(named.get("tool_use") or named.get("default") or next(iter(named.values())))


def token_text(value: Any) -> str:
    """The text of a special token in a tokenizer_config.json."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _special_texts(tokenizer: Path | None) -> list[str]:
    if tokenizer is None or not tokenizer.is_file():
        return []
    found = read_json_object(tokenizer)
    with malformed_as(DataError, f"added_tokens in {tokenizer} is damaged", "export it with tokenizer.save(path)"):
        return [str(item["content"]) for item in found.get("added_tokens") or [] if item.get("special")]


_PARSERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|channel|>", "openai"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<tool_call>", "hermes"),
)


def tool_call_parser(source: str) -> str:
    """vLLM's parser for the calls that a template renders; empty if the template is of no known family."""
    return next((parser for mark, parser in _PARSERS if mark in source), "")


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _nine_letters(name: Any) -> str:
    """An id of nine letters and digits: the given one if it is like that, otherwise always the same for the same id."""
    text = str(name or "")
    return text if len(text) == 9 and text.isalnum() else hashlib.sha256(text.encode()).hexdigest()[:9]
