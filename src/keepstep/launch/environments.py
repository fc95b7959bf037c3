"""Environment profiles: NCCL, UCX and torch settings that a machine type needs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import yaml


@cache
def all_environments() -> Mapping[str, Mapping[str, str]]:
    """Every profile by name."""
    text = (resources.files("keepstep.launch") / "environments.yaml").read_text()
    loaded: dict[str, dict[str, str]] = yaml.safe_load(text)
    return loaded


def variables_for(environment: str, sharp: bool, further: Mapping[str, object]) -> dict[str, str]:
    """What to export, in rising order of weight: elastic, the machine's, SHARP's, the user's own."""
    merged: dict[str, str] = dict(all_environments()["elastic"])
    if environment != "none":
        merged |= all_environments()[environment]
    if sharp:
        merged |= all_environments()["sharp"]
    return merged | {name: _text(value) for name, value in further.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
