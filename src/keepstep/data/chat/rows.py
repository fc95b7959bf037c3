"""Conversations in one canonical form: OpenAI `messages` and `tools`, arguments as objects.

Every reader of conversations calls `canonical`, which returns a valid conversation or raises BadRow with a reason, so
nothing is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {
    "developer": "system", "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
}  # fmt: skip
_JSON_TYPES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array", "set": "array",
}  # fmt: skip
_CALL_KEYS = ("name", "arguments", "parameters", "id", "type", "index", "function")
_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")


class BadRow(Exception):  # noqa: N818 - the row is at fault, not the program: it goes to the rejects file
    """A row that is not a valid conversation; the text says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages and the tools they may call, as chat templates expect them."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    def row(self) -> dict[str, Any]:
        """The canonical JSON object; without tools the key is left out."""
        return {"messages": list(self.messages), **({"tools": list(self.tools)} if self.tools else {})}


def answer_place(conversation: Conversation) -> int | None:
    """Number of the assistant's first answer to a user message; None if there is none.

    A greeting before the first user message does not count, nor does a message of weight 0, which may be wrong.
    """
    roles = [item["role"] if item.get("weight") != 0 else "" for item in conversation.messages]
    asked = roles.index("user") if "user" in roles else len(roles)
    return roles.index("assistant", asked) if "assistant" in roles[asked:] else None


def canonical(messages: Any, tools: Any = None) -> Conversation:
    """A checked conversation. Arguments and tools may come as JSON text. Raises BadRow."""
    known = tuple(tool(item) for item in parsed_list(tools, "tools"))
    found = cleaned(messages)
    _check_order(found)
    _check_names(found, known)
    return Conversation(found, known)


def cleaned(messages: Any) -> tuple[Message, ...]:
    """Messages in the canonical form, with or without an answer among them. Raises BadRow."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRow("messages is not a list with at least one message")
    return tuple(_message(message, number) for number, message in enumerate(messages))


def call(name: Any, arguments: Any) -> dict[str, Any]:
    """One tool call; arguments as an object or as the JSON text of one."""
    if not isinstance(name, str) or not name:
        raise BadRow(f"a call names no function: {name!r}")
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"the arguments of {name}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise BadRow(f"the arguments of {name} are {type(arguments).__name__}, not an object")
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def read_call(value: Any) -> dict[str, Any]:
    """One tool call of a published row; it may be inside `function`, and its arguments may be named `parameters`."""
    inner = _function(value, "a call")
    # Llama 3 uses the name parameters.
    arguments = next((inner[key] for key in ("arguments", "parameters") if inner.get(key) is not None), None)
    other = sorted(str(key) for key in inner if key not in _CALL_KEYS and inner[key])
    if arguments is None and other:
        # They may be the arguments under another name: the model would learn a call without arguments.
        raise BadRow(f"a call of {inner.get('name')} has no arguments, but {', '.join(other)}")
    made = call(inner.get("name"), arguments)
    return {"id": str(value["id"]), **made} if value.get("id") else made


def checked_object(value: Any, what: str) -> Mapping[str, Any]:
    """The value itself; BadRow names what is not an object."""
    if not isinstance(value, Mapping):
        raise BadRow(f"{what} is {type(value).__name__}, not an object")
    return value


def _function(value: Any, what: str) -> Mapping[str, Any]:
    outer = checked_object(value, what)
    inner = outer.get("function")
    return inner if isinstance(inner, Mapping) else outer


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a message's calls."""
    return [(item["function"]["name"], item["function"]["arguments"]) for item in message.get("tool_calls", ())]


def tool(value: Any) -> Tool:
    """One tool as `{"type": "function", "function": {...}}`, its parameters as JSON Schema."""
    function = _function(value, "a tool")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow("a tool has no name")
    given = function.get("parameters") or function.get("input_schema") or {}
    if not isinstance(given, Mapping):
        raise BadRow(f"the parameters of tool {name} are {type(given).__name__}, not an object")
    described = {"name": name, "description": str(function.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": parameter_schema(given)}}


def parameter_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON Schema of a function's parameters, from a schema with other type names or from a flat mapping."""
    if "properties" not in given and given.get("type") not in ("object", "dict"):
        given = {"type": "object", "properties": given, "required": _flat_required(given)}
    schema = _schema(given)
    if not isinstance(schema.setdefault("properties", {}), Mapping):
        raise BadRow(f"a tool's properties are {type(schema['properties']).__name__}, not an object")
    if "required" in schema and not isinstance(schema["required"], list):
        # `required: true` means nothing for a whole object.
        del schema["required"]
    return schema


def _flat_required(flat: Mapping[str, Any]) -> list[str]:
    """In a flat mapping a parameter is required unless it has a default or an optional type."""

    def optional(value: Any) -> bool:
        return isinstance(value, Mapping) and ("default" in value or "optional" in str(value.get("type", "")).lower())

    return [name for name, value in flat.items() if not optional(value)]


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    schema = {key: value for key, value in given.items() if value is not None}
    if isinstance(schema.get("type"), str):
        schema.update(_typed(schema.pop("type")))
    if isinstance(schema.get("properties"), Mapping):
        schema["properties"] = {
            name: _schema(value) if isinstance(value, Mapping) else {} for name, value in schema["properties"].items()
        }
    if isinstance(schema.get("items"), Mapping):
        schema["items"] = _schema(schema["items"])
    # Type first, as in most schemas.
    return {"type": schema.pop("type"), **schema} if "type" in schema else schema


def _typed(name: str) -> dict[str, Any]:
    """Python-like types such as `List[int], optional` as JSON Schema; an unknown name constrains nothing."""
    word = name.split(",")[0].strip() if "[" not in name else name.strip()
    outer, _, inner = word.partition("[")
    outer = outer.strip().lower()
    if outer == "optional" and inner:
        return _typed(inner.rsplit("]", 1)[0])
    kind = _JSON_TYPES.get(outer, outer)
    if kind not in _TYPES:
        return {}
    items = _typed(inner.rsplit("]", 1)[0]) if kind == "array" and inner else {}
    return {"type": kind, "items": items} if items else {"type": kind}


def parsed(text: str, what: str) -> Any:
    """Parsed JSON; BadRow names what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} are not JSON: {error}") from None


def parsed_list(value: Any, what: str) -> list[Any]:
    """A list, from a list, its JSON text, a single object, or nothing."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = parsed(value, what)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"{what} are {type(value).__name__}, not a list")
    return list(value)


def plain_role(named: str) -> str:
    """The canonical name of a role; an unknown name is returned unchanged."""
    return _ROLE_NAMES.get(named, named)


def _message(value: Any, number: int) -> Message:
    value = checked_object(value, f"message {number}")
    named = str(value.get("role", ""))
    role = plain_role(named)
    if role not in ROLES:
        raise BadRow(f"message {number} has the role {named!r}, which is none of {', '.join(ROLES)}")
    content = _text(value.get("content"), number, role)
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        # function_call is what OpenAI had before tool_calls.
        asked = value.get("tool_calls") or value.get("function_call")
        found = [read_call(item) for item in parsed_list(asked, "tool_calls")]
        if found:
            message["tool_calls"] = found
        elif not content:
            raise BadRow(f"message {number} of the assistant has neither text nor calls")
        message.update(_zero_weight(value.get("weight"), number))
    if role == "tool":
        message.update({key: str(value[key]) for key in ("name", "tool_call_id") if value.get(key)})
    return message


def _zero_weight(weight: Any, number: int) -> Message:
    """OpenAI's mark for a turn that carries no loss."""
    if weight is None or weight == 1:
        return {}
    if weight != 0:
        raise BadRow(f"message {number} has the weight {weight!r}, which is neither 0 nor 1")
    return {"weight": 0}


def _text(content: Any, number: int, role: str) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        case list() if seen := [part["type"] for part in content if _is_other(part, role)]:
            raise BadRow(f"message {number} holds {seen[0]}, but only text is supported")
        case Mapping() | list() if role == "tool":
            # Tool results are often objects; a program would have sent their JSON.
            return json.dumps(content, ensure_ascii=False)
        case _:
            raise BadRow(f"message {number} has a content of type {type(content).__name__}")


def _is_other(part: Any, role: str) -> bool:
    """Whether a part of a message has a type other than text; a tool may answer with any object."""
    if not isinstance(part, Mapping) or not part.get("type") or isinstance(part.get("text"), str):
        return False
    return role != "tool" or any(word in str(part["type"]) for word in ("image", "audio", "video"))


def _check_order(messages: Sequence[Message]) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("there is no message of the assistant, so there is nothing to learn")
    before = ""
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and number:
            raise BadRow(f"message {number} is a system message, which may only come first")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRow(f"message {number} is a tool's answer, but no tool was called before it")
        before = role


def _check_names(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    names = [item["function"]["name"] for item in tools]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise BadRow(f"two tools are named {sorted(doubled)[0]}")
    for message in messages:
        for name, _ in calls_of(message):
            if names and name not in names:
                raise BadRow(f"{name} is called, but it is not among the tools")
