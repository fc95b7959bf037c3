"""Convert published function-calling sets to canonical rows: Glaive v2, xLAM, Hermes, ToolACE and plain chat.

Each importer is a function from one published row to a conversation; it raises BadRow for a row that it cannot read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from keepstep.data.chat import rows
from keepstep.data.chat.rows import BadRow, Conversation, call, canonical, checked_object, parsed_list, read_call

RowFormat = Literal["messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca"]

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\s*(.*?)\s*</tools>", re.DOTALL)
_GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):", re.MULTILINE)
_GLAIVE_CALL = re.compile(r"<functioncall>\s*(.*)", re.DOTALL)
_QUOTED_ARGUMENTS = re.compile(r"""^\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}$""", re.DOTALL)


def convert(row: Any, form: RowFormat | None = None) -> Conversation:
    """One published row as a conversation; without `form` its keys decide the format. Raises BadRow."""
    known = checked_object(row, "the row")
    return _IMPORTERS[form or detect(known)](known)


def detect(row: Mapping[str, Any]) -> RowFormat:
    """The format of a row, by its keys."""
    if "messages" in row:
        return "messages"
    if "chat" in row and "system" in row:
        return "glaive"
    if "query" in row and "answers" in row:
        return "xlam"
    if "conversations" in row:
        return _turns_format(row)
    if "instruction" in row or "prompt" in row:
        return "alpaca"
    raise BadRow(f"no known format has the keys {', '.join(map(str, row)) or '(none)'}")


def _turns_format(row: Mapping[str, Any]) -> RowFormat:
    system = str(row.get("system") or "")
    text = system + json.dumps(row["conversations"], default=str)
    if "tools" in row or any(mark in text for mark in ("<tools>", "<tool_call>", '"function_call"')):
        return "hermes"
    # A ToolACE row lists its functions in the system text; other rows have a system text without functions.
    return "toolace" if "[{" in system else "sharegpt"


def _from_alpaca(row: Mapping[str, Any]) -> Conversation:
    asked = row.get("instruction") or row.get("prompt") or ""
    answer = row.get("output") or row.get("response") or row.get("completion") or ""
    request = f"{asked}\n\n{row['input']}" if row.get("input") else asked
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return canonical(messages)


def _from_xlam(row: Mapping[str, Any]) -> Conversation:
    calls = [read_call(item) for item in parsed_list(row["answers"], "answers")]
    if not calls:
        raise BadRow("there are no answers")
    messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": "", "tool_calls": calls}]
    return canonical(messages, row.get("tools"))


def _from_glaive(row: Mapping[str, Any]) -> Conversation:
    system = re.sub(r"^\s*SYSTEM:\s*", "", str(row["system"])).strip()
    said, tools = _split_objects(system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": said}] if said else []
    chat = str(row["chat"])
    turns = list(_GLAIVE_TURN.finditer(chat))
    if not turns or chat[: turns[0].start()].strip():
        raise BadRow("the chat does not start with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    ends = [turn.start() for turn in turns[1:]] + [len(chat)]
    for turn, end in zip(turns, ends, strict=True):
        text = chat[turn.end() : end].replace("<|endoftext|>", "").strip()
        match turn[1]:
            case "USER":
                messages.append({"role": "user", "content": text})
            case "FUNCTION RESPONSE":
                messages.append({"role": "tool", "content": text})
            case _:
                messages.append(_glaive_assistant(text))
    return canonical(messages, tools)


def _glaive_assistant(text: str) -> dict[str, Any]:
    found = _GLAIVE_CALL.search(text)
    if not found:
        return {"role": "assistant", "content": text}
    body = found[1].strip()
    # Glaive puts the JSON of the arguments in single quotes, so the call as a whole is not JSON.
    quoted = _QUOTED_ARGUMENTS.match(body)
    if quoted:
        made = call(quoted[1], quoted[2].replace("\\'", "'"))
    else:
        made = read_call(rows.parsed(body, "the words after <functioncall>"))
    return {"role": "assistant", "content": text[: found.start()].strip(), "tool_calls": [made]}


def _split_objects(text: str) -> tuple[str, list[Any]]:
    """The prose before the first JSON object, and every JSON object after it."""
    start = text.find("{")
    if start < 0:
        return text, []
    decoder, objects, at = json.JSONDecoder(), [], start
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError as error:
            raise BadRow(f"the functions of the system text are not JSON: {error}") from None
        objects.append(value)
        at = text.find("{", end)
    prose = text[:start].strip()
    # Drop the sentence that introduces the functions: the chat template introduces them itself.
    kept = re.sub(r"[^.!?]*\bfunctions\b[^.!?]*([.!?]|[-:]|$)\s*(Use them if required\s*[-:.]?)?\s*$", "", prose)
    return kept.strip(" -:\n"), objects


def _from_hermes(row: Mapping[str, Any]) -> Conversation:
    tools = parsed_list(row.get("tools"), "tools")
    messages: list[dict[str, Any]] = []
    turns = _turns(row)
    if row.get("system"):
        turns.insert(0, ("system", row["system"], {}))
    for name, content, weight in turns:
        named, text = str(name), str(content or "")
        role = "call" if named == "function_call" else rows.plain_role(named)
        if role == "system":
            listed = _TOOLS.search(text)
            if listed and not tools:
                body = listed[1]
                is_list = body.startswith("[")
                tools = parsed_list(body, "the tools of the system text") if is_list else _split_objects(body)[1]
            if not listed and text.strip():
                messages.append({"role": "system", "content": text.strip()})
        elif role == "tool":
            answers = _TOOL_RESPONSE.findall(text) or [text.strip()]
            messages += [{"role": "tool", "content": answer} for answer in answers]
        elif role == "call":
            # LLaMA-Factory writes one call, or a list of calls, as a separate turn.
            made = [read_call(item) for item in parsed_list(text, "a function_call's words")]
            messages.append({"role": "assistant", "content": "", "tool_calls": made, **weight})
        elif role == "assistant":
            made = [read_call(_python_or_json(body)) for body in _TOOL_CALL.findall(text)]
            said = _TOOL_CALL.sub("", text).strip()
            if "<tool_call>" in said:
                raise BadRow("a <tool_call> does not end")
            messages.append({"role": "assistant", "content": said, "tool_calls": made, **weight})
        else:
            messages.append({"role": named, "content": text})
    return canonical(messages, tools)


def _python_or_json(body: str) -> Mapping[str, Any]:
    # Part of the data set uses Python's quotes.
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return checked_object(read(body), "an entry")
    raise BadRow(f"a call is neither JSON nor a Python literal: {body[:60]!r}")


def _from_toolace(row: Mapping[str, Any]) -> Conversation:
    system = str(row["system"])
    start = system.find("[{")
    tools: list[Any] = []
    if start >= 0:
        try:
            tools, _ = json.JSONDecoder().raw_decode(system, start)
        except ValueError as error:
            raise BadRow(f"the functions of the system text are not JSON: {error}") from None
    # The text around the functions explains how to write calls, which the chat template does itself.
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system and not tools else []
    for name, content, weight in _turns(row):
        role, text = str(name), str(content or "")
        is_call = re.match(r"\s*\[\s*[A-Za-z_]", text) and text.rstrip().endswith(")]")
        if is_call and rows.plain_role(role) == "assistant":
            called = bracketed_calls(text)
            messages.append({"role": "assistant", "content": "", "tool_calls": called, **weight})
        else:
            messages.append({"role": role, "content": text, **weight})
    return canonical(messages, tools)


def bracketed_calls(text: str) -> list[dict[str, Any]]:
    """The calls of `[first(a=1, b="x"), Second Name(c=[2])]`; names may hold spaces. Raises BadRow."""
    body = text.strip().removeprefix("[").removesuffix("]").strip()
    calls = []
    while body:
        name, opened, rest = body.partition("(")
        if not opened:
            raise BadRow(f"a call has no opening bracket: {body[:60]!r}")
        inside, body = _until_closed(rest)
        calls.append(call(name.strip(), _keywords(inside)))
        body = body.lstrip(", \n")
    return calls


def _until_closed(text: str) -> tuple[str, str]:
    depth, quote, skip = 1, "", False
    for place, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip, quote = letter == "\\", "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
            if not depth:
                return text[:place], text[place + 1 :]
    raise BadRow(f"a call's bracket does not close: {text[:60]!r}")


def _keywords(text: str) -> dict[str, Any]:
    try:
        tree = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(tree, ast.Call)
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):
            raise BadRow(f"a call has arguments without a name: {text[:60]!r}")
        return {str(keyword.arg): _literal(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        # Python's parser raises the last two for expressions that are nested too deeply.
        raise BadRow(f"a call's arguments cannot be read: {text[:60]!r} ({error})") from None


def _literal(node: ast.expr) -> Any:
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {_literal(key): _literal(item) for key, item in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def _from_sharegpt(row: Mapping[str, Any]) -> Conversation:
    turns = [{"role": name, "content": content, **weight} for name, content, weight in _turns(row)]
    if row.get("system"):
        turns.insert(0, {"role": "system", "content": row["system"]})
    return canonical(turns, row.get("tools"))


def _turns(row: Mapping[str, Any]) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The role, the content and the weight of each turn, which have one of two names."""
    found = []
    for item in parsed_list(row["conversations"], "conversations"):
        turn = checked_object(item, "an entry")
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        found.append((turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content"), weight))
    return found


_IMPORTERS: Mapping[RowFormat, Callable[[Mapping[str, Any]], Conversation]] = {
    "messages": lambda row: canonical(row["messages"], row.get("tools") or row.get("functions")),
    "glaive": _from_glaive,
    "xlam": _from_xlam,
    "hermes": _from_hermes,
    "toolace": _from_toolace,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
}
