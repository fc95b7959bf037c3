"""Overrides under LLM Foundry's names, for commands that were written for it (`-y`, `yamlUpdates`).

Every name is translated, accepted without effect (`not_used` gives the reason) or refused with the key to use instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from keepstep.config.fields import all_fields
from keepstep.config.hints import by_name, hint_for
from keepstep.config.parse import load_own_yaml
from keepstep.core.errors import UsageError
from keepstep.core.messages import invalid_value, listed

_SPLITS = {"train_loader.dataset.split": "train", "eval_loader.dataset.split": "val"}
_DATA = ("variables.data_remote", "variables.data_local", *_SPLITS)


@cache
def _table(part: str) -> dict[str, Any]:
    """A part of foundry.yaml by LLM Foundry's names."""
    found = load_own_yaml((resources.files("keepstep.launch") / "foundry.yaml").read_text())[part]
    return dict(found) if part == "values" else by_name(found)


def translate(updates: Iterable[str]) -> list[str]:
    """`save_folder=/data/checkpoints` as `checkpoint.folder=/data/checkpoints`; our own names pass unchanged."""
    given = _read(updates)
    _check_weight_decay(given)
    words = [_word(key, value) for key, value in given.items() if key not in _DATA and not _reason(key)]
    return _data_words(given) + [word for word in words if word]


def not_used(updates: Iterable[str]) -> list[str]:
    """A sentence for each update that has no effect here, with the reason."""
    return [f"{key}={value} is not used: {_reason(key)}" for key, value in _read(updates).items() if _reason(key)]


def _read(updates: Iterable[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for update in updates:
        key, separator, value = update.partition("=")
        if not separator:
            raise UsageError(f"{update!r} is not key=value", "save_interval=500ba")
        given[key] = value
    return given


def _reason(key: str) -> str:
    return next((why for name, why in _table("not_used").items() if f"{key}.".startswith(f"{name}.")), "")


def _check_weight_decay(given: Mapping[str, str]) -> None:
    # Composer's decoupled_adamw does not multiply weight decay by the learning rate; ours does.
    decay = given.get("optimizer.weight_decay", "0")
    if given.get("optimizer.name") == "decoupled_adamw" and decay.strip("0.") != "":
        raise UsageError(
            invalid_value("optimizer.weight_decay", decay, "is multiplied by the learning rate here"),
            "optimizer.name=adamw with the weight_decay of decoupled_adamw divided by optimizer.lr",
        )


def _data_words(given: Mapping[str, str]) -> list[str]:
    """Data is in `data_local`, or in `data_remote` where that is given: then `data_local` has copies of it."""
    remote, local = (given.get(f"variables.data_{place}", "").rstrip("/") for place in ("remote", "local"))
    if not (remote or local):
        if any(key in given for key in _SPLITS):
            raise UsageError("a split is given, but variables.data_remote is not", "variables.data_remote=/data/c4")
        return []
    train, valid = (f"{remote or local}/{given.get(key, default)}" for key, default in _SPLITS.items())
    cache_dir = [f"data.cache_dir={local}"] if remote and local else []
    return [f"data.path={train}", f"data.valid_path={valid}", *cache_dir]


def _word(key: str, value: str) -> str:
    """One update as an override; empty if there is nothing to set."""
    values, renamed = _table("values").get(key), _table("renamed")
    for spelling in (value, value.lower()):
        if values and spelling in values:
            return str(values[spelling])
    if renamed.get(key) == "observe.log_interval":
        return f"observe.log_interval={value.removesuffix('ba')}"
    if key in renamed:
        return f"{renamed[key]}={value}".replace("{run_name}", "${name}")
    if key in all_fields() or (key.startswith("variables.") and values is None):
        return f"{key}={value}"
    if values:
        raise UsageError(invalid_value(key, value, f"must be {listed(list(values))}"), hint_for(key))
    raise UsageError(f"unknown key {key} (value {value!r})", hint_for(key))
