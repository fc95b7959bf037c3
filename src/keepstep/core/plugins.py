"""Plug-ins: code of other packages that a configuration names, as an entry point or as `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from keepstep.core.errors import ConfigError
from keepstep.core.messages import suggestion

Kind = Literal["data", "linear", "rewards", "callbacks"]
"""The last word of the entry point group: `keepstep.data`, for example."""
CALLED_WITH: Mapping[Kind, tuple[str, ...]] = {
    "data": ("seq_len", "vocab", "seed"),
    "linear": ("in_features", "out_features", "bias"),
    "rewards": ("messages", "answer", "expected"),
    "callbacks": (),
}
"""Names of the arguments that we pass to a plug-in of each kind, next to its options."""
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_plugin(kind: Kind, name: str) -> bool:
    """Whether `name` is the path of a function or an entry point of this kind. Imports nothing."""
    return _PATH.fullmatch(name) is not None or name in entry_points(group=f"keepstep.{kind}").names


def plugin_problem(kind: Kind, name: str, built_in: Iterable[str] = ()) -> tuple[str, str] | None:
    """What is wrong with a name that is no plug-in, and the remedy; None where it is one."""
    if is_plugin(kind, name):
        return None
    known = sorted({*built_in, *entry_points(group=f"keepstep.{kind}").names})
    needs = f"is no plug-in: nothing of that name is installed in the entry point group keepstep.{kind}"
    return needs, suggestion(name, known, "install its package, or write package.module:function")


def load_plugin(kind: Kind, name: str, options: Mapping[str, Any], field: str) -> Callable[..., Any]:
    """Import a plug-in and check that it can be called; a ConfigError names `field`, the setting with the name."""
    found = entry_points(group=f"keepstep.{kind}", name=name)
    points = list({point.value: point for point in found}.values())
    if len(points) > 1:
        values = " and ".join(point.value for point in points)
        raise ConfigError(f"{field} is {name}, but {values} both have that name", f"write {field}={points[0].value}")
    if not points and not _PATH.fullmatch(name):
        needs, hint = plugin_problem(kind, name) or ("", "")
        raise ConfigError(f"{field} is {name}, which {needs}", hint)
    path = (points[0] if points else EntryPoint(name, name, f"keepstep.{kind}")).value
    function = _import(path, field)
    _check_call(kind, path, function, options, field)
    return function


def _import(path: str, field: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function
    except AttributeError:
        raise ConfigError(f"{field}: {module} has no {attribute}", f"check the name in {path}") from None
    except Exception as error:  # the code of others may raise anything
        raise ConfigError(
            f"{field}: {path} cannot be imported: {type(error).__name__}: {error}",
            "install its package on every machine of the run, or put its folder on PYTHONPATH",
        ) from error


def _check_call(kind: Kind, path: str, function: Callable[..., Any], options: Mapping[str, Any], field: str) -> None:
    arguments = [*CALLED_WITH[kind], *options]
    call = f"{path.partition(':')[2]}({', '.join(f'{name}=…' for name in arguments)})"
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{field}: {path} cannot be called as {call}: {error}",
            "give it these arguments, and set each of its other arguments as an option",
        ) from error


def checked_state(owner: Any, what: str) -> dict[str, Any]:
    """What `owner.state_dict()` returns, as a checkpoint gives it back: through JSON."""
    state = owner.state_dict()
    try:
        returned: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: state_dict() returns what JSON cannot hold: {error}", _STATE_HINT) from None
    if returned != state:
        raise ConfigError(f"{what}: state_dict() changes in JSON: {state} becomes {returned}", _STATE_HINT)
    return returned


_STATE_HINT = "return numbers, texts, lists and mappings whose keys are texts; for an array use .tolist()"
