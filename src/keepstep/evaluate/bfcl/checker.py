"""Compare calls with BFCL's possible answers: the verdicts and error names of the official AST checker.

A possible answer gives for each parameter the list of accepted values; an empty string in it makes the parameter
optional. `tests/evaluate/bfcl/test_checker.py` compares every verdict with the official one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from keepstep.evaluate.bfcl.literals import java_value, javascript_value

Language = Literal["python", "java", "javascript"]
Call = tuple[str, dict[Any, Any]]
"""Name and arguments."""

_TYPES: dict[Language, dict[str, type]] = {
    "python": {
        "string": str, "any": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list,
        "dict": dict,
    },
    "java": {
        "byte": int, "short": int, "integer": int, "long": int, "float": float, "double": float, "boolean": bool,
        "char": str, "String": str, "any": str, "Array": list, "ArrayList": list, "Queue": list, "Stack": list,
        "Set": set, "HashMap": dict, "Hashtable": dict,
    },
    "javascript": {
        "String": str, "any": str, "integer": int, "Bigint": int, "float": float, "Boolean": bool, "dict": dict,
        "array": list,
    },
}  # fmt: skip
_LISTS: dict[Language, tuple[str, ...]] = {
    "python": ("array", "tuple"),
    "java": ("Array", "ArrayList"),
    "javascript": ("array",),
}
"""Types whose elements have a type of their own in the function's description."""


def check_calls(
    functions: Sequence[Mapping[str, Any]],
    calls: Sequence[Call],
    answers: Sequence[Mapping[str, Any]],
    category: str,
    language: Language,
) -> str | None:
    """The name of the first error; None if the calls are right. `answers` has one expected call in each item."""
    kind = next((kind for kind in ("parallel", "multiple") if kind in category), "simple")
    prefix = {"parallel": "parallel_function_checker_no_order", "multiple": "multiple_function_checker"}
    if len(calls) != (1 if kind == "simple" else len(answers)):
        return f"{prefix.get(kind, 'simple_function_checker')}:wrong_count"
    if kind == "simple":
        return check_call(functions[0], calls[0], answers[0], language)
    described = [_described(functions, answer) for answer in answers]
    if kind == "multiple":
        return check_call(described[0], calls[0], answers[0], language)
    left = list(calls)
    for function, answer in zip(described, answers, strict=True):
        # The first call that fits is taken, as in the official checker, also if another answer needs it more.
        fits = next((n for n, call in enumerate(left) if check_call(function, call, answer, language) is None), None)
        if fits is None:
            return f"{prefix[kind]}:cannot_find_match"
        del left[fits]
    return None


def _described(functions: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> Mapping[str, Any]:
    (name,) = answer
    return next(function for function in functions if function["name"] == name)


def check_call(
    function: Mapping[str, Any], call: Call, answer: Mapping[str, Any], language: Language = "python"
) -> str | None:
    """The error of one call, or None."""
    (accepted,) = answer.values()
    name, arguments = call
    properties = function["parameters"]["properties"]
    if name != function["name"]:
        return "simple_function_checker:wrong_func_name"
    if any(parameter not in arguments for parameter in function["parameters"].get("required", ())):
        return "simple_function_checker:missing_required"
    for parameter, value in arguments.items():
        if parameter not in properties or parameter not in accepted:
            return "simple_function_checker:unexpected_param"
        error = _argument_error(value, properties[parameter], accepted[parameter], language)
        if error:
            return error
    if any(parameter not in arguments and "" not in values for parameter, values in accepted.items()):
        return "simple_function_checker:missing_optional"
    return None


def _argument_error(value: Any, schema: Mapping[str, Any], accepted: Sequence[Any], language: Language) -> str | None:
    kind: str = schema["type"]
    element: str = schema["items"]["type"] if kind in _LISTS[language] else ""
    wanted, inner = _TYPES[language][kind], _TYPES[language].get(element)
    if language == "python":
        if kind == "tuple" and type(value) is tuple:
            value = list(value)
        if kind == "float" and type(value) is int:
            with suppress(OverflowError):
                value = float(value)
    elif type(value) is not str:
        return f"type_error:{'java' if language == 'java' else 'js'}"
    else:
        value = (java_value if language == "java" else javascript_value)(value, kind, element)
    error = _type_error(value, accepted, wanted, inner)
    if error:
        return error
    if not _has_type(value, wanted) or _first_type(accepted) not in (None, wanted):
        # A variable stands for the value: it must be written as in one of the answers.
        return None if value in accepted else "value_error:others"
    if wanted is dict:
        return _dict_error(value, accepted)
    if inner is dict:
        return _dicts_error(value, accepted)
    if wanted is str:
        known = [_plain(item) for item in accepted if type(item) is str]
        return None if _plain(value) in known else "value_error:string"
    if wanted is list:
        known = [[_plain(item) for item in answer] for answer in accepted]
        return None if [_plain(item) for item in value] in known else "value_error:list/tuple"
    return None if value in accepted else "value_error:others"


def _has_type(value: Any, kind: type) -> bool:
    """Whether the type is exactly this one: a boolean is no integer."""
    return type(value) is kind


def _first_type(accepted: Sequence[Any]) -> type | None:
    """The type of the accepted values; None if the parameter can only be left out."""
    return next((type(item) for item in accepted if item != ""), None)


def _type_error(value: Any, accepted: Sequence[Any], wanted: type, inner: type | None) -> str | None:
    if _has_type(value, wanted):
        if inner is None or any(type(answer) is not list or _same_types(value, answer, inner) for answer in accepted):
            return None
        return "type_error:nested" if _first_type(accepted) is wanted else "type_error:simple"
    return None if type(value) is _first_type(accepted) else "type_error:simple"


def _same_types(value: Sequence[Any], answer: Sequence[Any], inner: type) -> bool:
    return all(type(item) is inner or type(item) is _first_type(answer) for item in value)


def _dict_error(value: Any, accepted: Sequence[Any]) -> str | None:
    if type(value) is not dict:  # an element of a list that may also be left out, whose types are not checked before
        return "type_error:nested"
    error: str | None = "dict_checker:unclear"
    for answer in accepted:
        if answer != "":
            error = _one_dict_error(value, answer)
            if error is None:
                return None
    return error


def _one_dict_error(value: Mapping[Any, Any], answer: Mapping[Any, Any]) -> str | None:
    if any(key not in value and "" not in known for key, known in answer.items()):
        return "value_error:dict_key"
    for key, item in value.items():
        if key not in answer:
            return "value_error:dict_key"
        if _plain(item) not in [_plain(known) for known in answer[key]]:
            return "value_error:dict_value"
    return None


def _dicts_error(value: Sequence[Any], accepted: Sequence[Any]) -> str | None:
    error: str | None = "list_dict_checker:unclear"
    for answer in accepted:
        if len(value) != len(answer):
            error = "value_error:list_dict_count"
            continue
        errors = (_dict_error(item, [known]) for item, known in zip(value, answer, strict=True))
        error = next((found for found in errors if found), None)
        if error is None:
            return None
    return error


def _plain(value: Any) -> Any:
    """A string without case, spaces and punctuation that do not matter; any other value unchanged."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if type(value) is str else value
