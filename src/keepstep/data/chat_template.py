"""Chat templates: jinja2 in a sandbox, with what Hugging Face templates expect, and where the assistant speaks.

A template says which text is the assistant's by `{% generation %}`. Where it does not, the text is found by rendering
the conversation up to each of the assistant's turns (`prefix rendering`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError
from keepstep.data.chat_rows import BadRow, Conversation, Message, calls_of

BUILT_IN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' and messages[0]['content'] %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nTo call one: <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message['content'] }}
            {%- for call in message['tool_calls'] or [] %}
                {%- if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}
                {{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}
                {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message['role'] == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML turns with tools and calls as Hermes writes them: the JSON that vLLM's `hermes` parser reads."""

TURN_END = "<|im_end|>"
"""What ends a turn of the built-in template."""
SPECIAL_TOKENS = ("<|im_start|>", TURN_END, "<tool_call>", "</tool_call>", "<tools>", "</tools>")
"""Tokens that a tokenizer for the built-in template should have as wholes."""

TRAINING_DAY = datetime(2024, 7, 26)
"""The day that rows to learn from tell where a template asks for it: the one that Llama's templates have of their own.
With today's, a run that went on tomorrow on another machine would learn other tokens than the one it goes on from."""


@dataclass(frozen=True)
class Span:
    """Characters [start, end) that the assistant's message number `message` says."""

    start: int
    end: int
    message: int


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation and which parts of it the assistant says."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """Renders conversations. `ends` are the texts that end a turn (the tokenizer's special tokens)."""

    def __init__(self, source: str = BUILT_IN, *, bos: str = "", eos: str = "", ends: Sequence[str] = ()) -> None:
        self.source, self.bos, self.eos = source, bos, eos
        self._values = {"bos_token": bos, "eos_token": eos}
        self._ends = tuple(dict.fromkeys(text for text in (*ends, eos, TURN_END) if text))
        self._marks = Marks()
        self._day = TRAINING_DAY
        self._template = _compile(source, self._marks, lambda form: self._day.strftime(form))

    @property
    def marks_turns(self) -> bool:
        """Whether the template itself says what is the assistant's."""
        return self._marks.used

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text that the assistant's next turn follows; the day it tells, if any, is today."""
        self._marks.set("", "")
        self._day = datetime.now()
        return self._render(messages, tools, add_generation_prompt=True)

    def turn_end(self) -> str:
        """The special token that the assistant's turn ends with; empty where the template puts none there."""
        said = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})
        self._marks.set("", "")
        try:
            text = self._render(said, ()).rstrip()
        except BadRow:
            return ""
        return max((end for end in self._ends if text.endswith(end)), key=len, default="")

    def render(self, conversation: Conversation, *, by_prefix: bool = False) -> Rendered:
        """Text and spans; `by_prefix` ignores the template's own marks. Raises BadRow where it cannot be done."""
        self._day = TRAINING_DAY
        if self.marks_turns and not by_prefix:
            return self._by_marks(conversation)
        return self._by_prefix(conversation)

    def _by_marks(self, conversation: Conversation) -> Rendered:
        opening, closing = self._marks.choose(json.dumps(conversation.row(), ensure_ascii=False))
        marked = self._render(conversation.messages, conversation.tools)
        turns = [number for number, item in enumerate(conversation.messages) if item["role"] == "assistant"]
        text, spans = "", []
        first, *rest = marked.split(opening)
        text += first
        for number, piece in enumerate(rest):
            said, closed, after = piece.partition(closing)
            if not closed or number >= len(turns):
                raise BadRow("the template marks something else than one stretch for each of the assistant's turns")
            spans.append(Span(len(text), len(text) + len(said), turns[number]))
            text += said + after
        if len(spans) != len(turns):
            raise BadRow(f"the template renders {len(spans)} of the assistant's {len(turns)} turns")
        return Rendered(text, tuple(spans))

    def _by_prefix(self, conversation: Conversation) -> Rendered:
        self._marks.set("", "")
        messages, tools = conversation.messages, conversation.tools
        text = self._render(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            after = self._render(messages[: number + 1], tools)
            if not text.startswith(before) or not after.startswith(before):
                raise BadRow(f"the template renders what comes before message {number} differently once it is there")
            end: int | None = len(before) + self._said(after[len(before) :])
            if text[:end] != after[:end]:
                end = self._followed_end(conversation, number, text, len(before))
            if end is None:
                raise BadRow(f"the template renders message {number} differently once others follow")
            spans.append(Span(len(before), end, number))
        return Rendered(text, tuple(spans))

    def _followed_end(self, conversation: Conversation, number: int, text: str, start: int) -> int | None:
        """Where a turn ends that begins at `start` and that others follow; None where that cannot be told.

        Qwen3's template puts an empty thought before a last turn only. What it writes of an earlier one is found with
        the next message there, and counts if nothing of the turn itself was left out.
        """
        messages, mark = conversation.messages, self.turn_end()
        if not mark or number + 1 == len(messages):
            return None
        turn, earlier, following = messages[number], list(messages[:number]), messages[number + 1]
        word = _unused(json.dumps(conversation.row(), ensure_ascii=False))

        def before_next(said: Message) -> str:
            """The text up to the words of the next message."""
            shown = self._render([*earlier, said, {**following, "content": word}], conversation.tools)
            return shown.partition(word)[0] if word in shown else ""

        try:
            head, plain = before_next(turn), before_next(_emptied(turn))
        except BadRow:
            return None
        # The turn with nothing in it that could look like its end shows what stands between that and the next words.
        gap = plain[start:].partition(mark)[2]
        end = len(head) - len(gap)
        said = head[start:end]
        whole = all(part in said for part in (turn["content"].strip(), *(name for name, _ in calls_of(turn))))
        return end if text.startswith(head) and head.endswith(mark + gap) and whole and end > start else None

    def _said(self, turn: str) -> int:
        """How much of a rendered turn the assistant says: up to its end mark, without what only separates turns."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self._ends) else len(turn)

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        import jinja2

        try:
            text: str = self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._values,
            )
        except (jinja2.TemplateError, TypeError, KeyError, IndexError) as error:
            raise BadRow(f"the chat template refuses it: {error}") from None
        return text


class Marks:
    """The texts put around what the assistant says while a template is rendered; empty when nobody asks."""

    def __init__(self) -> None:
        self.used = False
        self.opening = self.closing = ""

    def set(self, opening: str, closing: str) -> None:
        """Use these from now on."""
        self.opening, self.closing = opening, closing

    def choose(self, content: str) -> tuple[str, str]:
        """Marks that do not occur in the content, so that finding them again cannot go wrong."""
        opening = _unused(content)
        self.set(opening, opening.replace("\ufdd0", "\ufdd1"))
        return self.opening, self.closing


def _unused(content: str) -> str:
    """A text that the content does not hold, nor with its outer signs exchanged for their neighbours."""
    salt = 0
    while f"\ufdd0{salt}" in content or f"\ufdd1{salt}" in content:
        salt += 1
    return f"\ufdd0{salt}\ufdd0"


def _emptied(turn: Message) -> Message:
    """A turn of the same kind that says next to nothing: calls keep their functions and lose their arguments."""
    calls = [{**item, "function": {**item["function"], "arguments": {}}} for item in turn.get("tool_calls", ())]
    return {**turn, "content": "!", **({"tool_calls": calls} if calls else {})}


def _compile(source: str, marks: Marks, strftime_now: Callable[[str], str]) -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Any) -> Any:
            """Call `_around` with what the block renders."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marks.used = True
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            return f"{marks.opening}{caller()}{marks.closing}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template is no jinja2: line {error.lineno}: {error.message}") from None


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which a model would learn to write.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def find_template(tokenizer: Path | None, override: str = "") -> ChatTemplate:
    """The template of a tokenizer's folder (chat_template.jinja, tokenizer_config.json), or the built-in one."""
    config = _tokenizer_config(tokenizer)
    bos, eos = (_token_text(config.get(key)) for key in ("bos_token", "eos_token"))
    source = BUILT_IN
    if override:
        if not Path(override).is_file():
            raise DataError(f"chat.template is {override!r}, which is missing", "give the path of a jinja2 template")
        source = Path(override).read_text(encoding="utf-8")
    elif tokenizer is not None and (tokenizer.parent / "chat_template.jinja").is_file():
        source = (tokenizer.parent / "chat_template.jinja").read_text(encoding="utf-8")
    elif config.get("chat_template"):
        source = _named_template(config["chat_template"])
    return ChatTemplate(source, bos=bos, eos=eos, ends=_special_texts(tokenizer))


def _named_template(value: Any) -> str:
    """Some tokenizers keep several templates by name: the one for tools comes first."""
    if isinstance(value, str):
        return value
    named = {item["name"]: item["template"] for item in value}
    return str(named.get("tool_use") or named.get("default") or next(iter(named.values())))


def _tokenizer_config(tokenizer: Path | None) -> dict[str, Any]:
    path = tokenizer.parent / "tokenizer_config.json" if tokenizer else None
    if path is None or not path.is_file():
        return {}
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _special_texts(tokenizer: Path | None) -> list[str]:
    if tokenizer is None or not tokenizer.is_file():
        return []
    added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens") or []
    return [item["content"] for item in added if item.get("special")]
