"""Reference answers of the benchmark as calls, and calls as a model writes them."""

from __future__ import annotations

from typing import Any

from keepstep.evaluate.bfcl.checker import Call, Language
from tests.evaluate.bfcl.official import ROOT

assert ROOT.is_dir(), "without bfcl-eval, the import of this module skips the tests that need it"


def accepted(values: list[Any], which: int) -> Any:
    """One of the accepted values, with lists of alternatives inside dictionaries replaced by one of them."""
    value = values[which % len(values)] if values else ""

    def chosen(item: Any) -> Any:
        if isinstance(item, dict):
            picked = {
                key: known[which % len(known)] if isinstance(known, list) and known else known
                for key, known in item.items()
            }
            return {key: chosen(known) for key, known in picked.items() if known != ""}
        return [chosen(part) for part in item] if isinstance(item, list) else item

    return chosen(value)


def as_text(value: Any, schema: dict[str, Any], target: Language) -> Any:
    """A value as BFCL's Java and JavaScript calls write it."""
    kind = schema["type"]
    if target == "java":
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            parts = ", ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value)
            return f"new ArrayList<>(Arrays.asList({parts}))" if kind == "ArrayList" else f"new X[]{{{parts}}}"
        if isinstance(value, dict):
            puts = " ".join(f'put("{key}", {as_text(item, {"type": "any"}, target)});' for key, item in value.items())
            return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
        return f"{value}L" if kind == "long" and isinstance(value, int) else str(value)
    if target == "javascript":
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return f"[{', '.join(repr(item) if isinstance(item, str) else str(item) for item in value)}]"
        if isinstance(value, dict):
            return (
                "{" + ", ".join(f"{key}: {as_text(item, {'type': 'any'}, target)}" for key, item in value.items()) + "}"
            )
        return str(value)
    return tuple(value) if kind == "tuple" and isinstance(value, list) else value


def reference(question: dict[str, Any], answer: dict[str, Any], target: Language, which: int) -> list[Call]:
    """The expected calls, with the accepted value number `which` of every parameter; optional ones may be left out."""
    schemas = {item["name"]: item["parameters"]["properties"] for item in question["function"]}
    calls = []
    for expected in answer["ground_truth"]:
        ((name, parameters),) = expected.items()
        chosen = {key: accepted(values, which) for key, values in parameters.items()}
        calls.append(
            (
                name,
                {
                    key: as_text(value, schemas[name].get(key, {"type": "any"}), target)
                    for key, value in chosen.items()
                    if value != ""
                },
            )
        )
    return calls


def written(calls: list[Any], target: Language) -> str:
    """Calls as a model writes them in prompt mode."""

    def value(item: Any) -> str:
        plain = target != "python" and isinstance(item, str)
        if plain and (item.startswith(("new ", "[", "{")) or item in ("true", "false") or item.isidentifier()):
            return str(item)
        return '"' + item.replace('"', '\\"') + '"' if plain else repr(item)

    listed = (f"{name}({', '.join(f'{key}={value(item)}' for key, item in given.items())})" for name, given in calls)
    return f"[{', '.join(listed)}]"
