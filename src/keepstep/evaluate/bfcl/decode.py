"""Calls in a model's answer: Python-like lists as BFCL's prompt asks for, or the format of a native chat template.

Nothing in an answer is executed, except arithmetic between numbers: `f(a=2 * 3)` is `f(a=6)`.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from keepstep.evaluate.ast_check import MalformedCall, parse_calls
from keepstep.evaluate.bfcl.checker import Call, Language
from keepstep.evaluate.bfcl.foreign_calls import WrongFormat, java_calls, javascript_calls

Mode = Literal["prompt", "native"]
"""`prompt`: BFCL's system prompt describes the functions. `native`: the model's own chat template does."""

_LARGEST_POWER = 1_000
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def decode_calls(text: str, mode: Mode, language: Language = "python") -> list[Call]:
    """The calls of an answer. Raises MalformedCall, or its subclass WrongFormat."""
    if mode == "native":
        return list(parse_calls(text))
    bracketed = text.strip("`\n ")
    bracketed = bracketed if bracketed.startswith("[") else f"[{bracketed}"
    bracketed = bracketed if bracketed.endswith("]") else f"{bracketed}]"
    if language == "python":
        return python_calls(bracketed)
    return (java_calls if language == "java" else javascript_calls)(bracketed[1:-1])


def decode_error(error: MalformedCall) -> str:
    """The leaderboard's name of the error."""
    return f"ast_decoder:{'decoder_wrong_output_format' if isinstance(error, WrongFormat) else 'decoder_failed'}"


def python_calls(text: str) -> list[Call]:
    """The calls of a list in Python's syntax; arguments without a name are left out, as the leaderboard does."""
    try:
        with warnings.catch_warnings():
            # An invalid escape such as \d in a string is the model's, and no concern of the user's.
            warnings.simplefilter("ignore")
            body = ast.parse(text.strip().strip("'"), mode="eval").body
            if isinstance(body, ast.Call):
                return [_call(body)]
            if isinstance(body, ast.List | ast.Tuple | ast.Set):
                return [_call(item) for item in body.elts]
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise MalformedCall(str(error) or type(error).__name__) from None
    raise MalformedCall(f"a {type(body).__name__} is not a list of calls")


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise MalformedCall(f"a {type(node).__name__} is not a call")
    parts, function = list[str](), node.func
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.insert(0, function.id)
    return ".".join(parts), {keyword.arg: _value(keyword.value) for keyword in node.keywords}


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=value):
            return "..." if value is Ellipsis else value
        case ast.UnaryOp(operand=ast.Constant(value=value)):
            # Whatever the operator is: +1 and ~1 count as -1 on the leaderboard.
            return -value  # type: ignore[operator]
        case ast.BinOp():
            return _arithmetic(node)
        case ast.List():
            return [_value(item) for item in node.elts]
        case ast.Tuple():
            return tuple(_value(item) for item in node.elts)
        case ast.Dict():
            return {_value(key): _value(item) for key, item in zip(node.keys, node.values, strict=True)}
        case ast.Name():
            return node.id
        case ast.Call() if node.keywords:
            name, arguments = _call(node)
            return {name: arguments}
        case ast.Call():
            return ast.unparse(node)
        case ast.Subscript():
            return f"{ast.unparse(node.value)}[{ast.unparse(node.slice)}]"
    raise MalformedCall(f"a {type(node).__name__} is not a value")


def _arithmetic(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub()):
            return -_arithmetic(node.operand)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _arithmetic(node.left), _arithmetic(node.right)
            if isinstance(node.op, ast.Pow) and max(abs(left), abs(right)) > _LARGEST_POWER:
                raise MalformedCall("a power is too large")
            return _OPERATORS[type(node.op)](left, right)
    raise MalformedCall(f"a {type(node).__name__} is not a number")


def expressions(calls: Sequence[Call]) -> list[str]:
    """The calls as Python expressions, for the simulated APIs; a call as an argument stays a call."""
    return [_expression(name, arguments) for name, arguments in calls]


def _expression(name: Any, arguments: dict[Any, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_written(value)}' for key, value in arguments.items())})"


def _written(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    if all(isinstance(item, dict) for item in value.values()):
        if not value:
            raise MalformedCall("an empty dictionary looks like a call without a name")
        name = next(iter(value))
        return _expression(name, value[name])
    return "{" + ", ".join(f"'{key}': {_written(item)}" for key, item in value.items()) + "}"
