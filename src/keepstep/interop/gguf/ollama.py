"""Ollama's Modelfile: the chat template in Ollama's language (Go's text/template), and the stop tokens.

Ollama does not read the Jinja template in a GGUF file. Templates that render ChatML turns, with tools and calls in the
Hermes format or without tools, are recognised by what they render; how they introduce tools is read from that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keepstep.data.chat.rows import BadRow
from keepstep.data.chat.template import ChatTemplate

Message = dict[str, Any]
Turns = Literal["tools", "chat", ""]
"""What a Modelfile's template can say: turns with tools, turns alone, or nothing."""

_START = "<|im_start|>assistant\n"
_CHAT = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}" + _START
# Ollama looks for calls after the first text inside the first `if .ToolCalls`: it has to be <tool_call>. A turn with
# results of tools is closed by what comes after it, because nothing can look ahead.
_TOOLS = (
    '{{ $previous := "" }}{{ range $number, $_ := .Messages }}'
    '{{ if and (eq $previous "tool") (ne .Role "tool") }}<|im_end|>\n{{ end }}'
    "{{ if and (eq $number 0) $.Tools }}<|im_start|>system\n"
    '{{ if eq .Role "system" }}{{ .Content }}AFTER_SYSTEM{{ else }}ALONE{{ end }}'
    "{{ range $.Tools }}\n{{ json . }}{{ end }}AFTER_TOOLS<|im_end|>\n"
    '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}'
    '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
    '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n'
    "{{ if .Content }}{{ .Content }}{{ range $call, $_ := .ToolCalls }}{{ if not $call }}\n{{ end }}{{ end }}{{ end }}"
    "{{ if .ToolCalls }}<tool_call>\n{{ range $call, $_ := .ToolCalls }}"
    "{{ if $call }}\n</tool_call>\n<tool_call>\n{{ end }}"
    '{"name": {{ json .Function.Name }}, "arguments": {{ json .Function.Arguments }}}{{ end }}\n</tool_call>{{ end }}'
    "<|im_end|>\n"
    '{{ else if eq .Role "tool" }}{{ if ne $previous "tool" }}<|im_start|>user{{ end }}'
    "\n<tool_response>\n{{ .Content }}\n</tool_response>{{ end }}"
    '{{ $previous = .Role }}{{ end }}{{ if eq $previous "tool" }}<|im_end|>\n{{ end }}' + _START
)


@dataclass(frozen=True)
class ToolTexts:
    """What a template says around its list of tools."""

    after_system: str = ""
    """Between the system message and the tools."""
    alone: str = ""
    """Before the tools where there is no system message."""
    after_tools: str = ""


def modelfile(template: ChatTemplate, stops: Sequence[str]) -> tuple[str, Turns]:
    """Ollama's description of the model, and how much of the template it has."""
    default, texts = _default_system(template), _tool_texts(template)
    kept: Turns = ""
    if all(_is_same(template, turns, (), default, ToolTexts()) for turns in _CHATS):
        kept = "tools" if texts and _says_all(template, default, texts) else "chat"
    lines = ["FROM ./model.gguf"]
    if kept == "tools" and texts:
        places = {"AFTER_SYSTEM": texts.after_system, "ALONE": texts.alone, "AFTER_TOOLS": texts.after_tools}
        body = re.sub("|".join(places), lambda place: places[place[0]], _TOOLS)
    elif kept == "chat":
        body = _CHAT
        lines.append("# Without tools: llama-server --jinja uses the template in the file, which has all.")
    else:
        lines.append("# The chat template is in the file (Jinja). Ollama needs it as TEMPLATE in its own language.")
    if kept:
        lines.append(f'TEMPLATE """{body}"""')
        lines += [f'SYSTEM """{default}"""'] if default else []
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    return "\n".join([*lines, ""]), kept


def _function(name: str) -> Message:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}


def _calling(content: str, *names: str) -> Message:
    made = [{"type": "function", "function": {"name": name, "arguments": {"a": "ä", "b": [1]}}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": made}


_SYSTEM, _USER, _RESULT = ({"role": role, "content": f"{role} #"} for role in ("system", "user", "tool"))
_ANSWER = {"role": "assistant", "content": "!"}
_FUNCTIONS = (_function("one"), _function("two"))
_CHATS: tuple[list[Message], ...] = ([_USER], [_SYSTEM, _USER], [_SYSTEM, _USER, _ANSWER, _USER])
_CALLS: tuple[list[Message], ...] = (
    [_USER, _calling("", "one", "two"), _RESULT, _RESULT],
    [
        _SYSTEM, _USER, _calling("", "two"), _RESULT, _ANSWER, _USER, _calling("so", "one", "one"), _RESULT, _ANSWER,
        _USER,
    ],
)  # fmt: skip


def _says_all(template: ChatTemplate, default: str, texts: ToolTexts) -> bool:
    return all(_is_same(template, turns, _FUNCTIONS, default, texts) for turns in (*_CHATS, *_CALLS))


def _is_same(
    template: ChatTemplate, turns: list[Message], tools: Sequence[Message], default: str, texts: ToolTexts
) -> bool:
    # Ollama puts the Modelfile's SYSTEM in front of messages without one.
    given = [{"role": "system", "content": default}] if default and turns[0]["role"] != "system" else []
    return _prompt(template, turns, tools) == rendered([*given, *turns], tools, texts)


def _prompt(template: ChatTemplate, turns: list[Message], tools: Sequence[Message] = ()) -> str:
    """What the template renders; nothing where it refuses."""
    try:
        return template.prompt(turns, tools)
    except BadRow:
        return ""


def rendered(turns: Sequence[Message], tools: Sequence[Message], texts: ToolTexts) -> str:
    """What our templates render in Ollama, with JSON as Python spells it."""
    text = ""
    if tools:
        first = turns[0]["content"] + texts.after_system if turns[0]["role"] == "system" else texts.alone
        listed = "".join(f"\n{_json(tool)}" for tool in tools)
        text = f"<|im_start|>system\n{first}{listed}{texts.after_tools}<|im_end|>\n"
        turns = turns[1:] if turns[0]["role"] == "system" else turns
    previous = ""
    for turn in turns:
        role, content = turn["role"], turn["content"]
        text += "<|im_end|>\n" if previous == "tool" != role else ""
        if role == "tool":
            text += ("" if previous == role else "<|im_start|>user") + f"\n<tool_response>\n{content}\n</tool_response>"
        else:
            parts = [content, *map(_call, turn.get("tool_calls", ()))]
            text += f"<|im_start|>{role}\n" + "\n".join(filter(None, parts)) + "<|im_end|>\n"
        previous = role
    return text + ("<|im_end|>\n" if previous == "tool" else "") + _START


def _call(call: Message) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _default_system(template: ChatTemplate) -> str:
    """The system message of a conversation that has none."""
    first = _prompt(template, [_USER]).partition("<|im_start|>user\n")[0]
    return _sayable(first.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")) or ""


def _tool_texts(template: ChatTemplate) -> ToolTexts | None:
    """The texts around a list of tools, if there is one as our template writes it."""
    found = []
    for turns in ([_SYSTEM, _USER], [_USER]):
        text = _prompt(template, turns, _FUNCTIONS[:1])
        before, _, after = text.removeprefix("<|im_start|>system\n").partition("\n" + _json(_FUNCTIONS[0]))
        found.append((_sayable(before), _sayable(after.partition("<|im_end|>\n")[0])))
    (with_system, after_tools), (alone, _) = found
    if with_system is None or alone is None or after_tools is None:
        return None
    return ToolTexts(with_system.removeprefix(_SYSTEM["content"]), alone, after_tools)


def _sayable(text: str) -> str | None:
    """A text that can stand in a Modelfile's template as it is."""
    return None if "{{" in text or '"""' in text else text
