"""Composer's sharded checkpoints: DCP folders whose model is below `state.model.`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.core.errors import CheckpointError, UsageError

_MODEL = "state.model."
"""Prefix of the model's names; a Hugging Face model inside adds `model.`."""
_CONFIG = "state.integrations.huggingface.model.config.content."


def is_composer(names: Iterable[str]) -> bool:
    """Whether these are the tensor names of a Composer checkpoint."""
    return any(name.startswith(_MODEL) for name in names)


def strip_composer_names(names: Iterable[str]) -> dict[str, str]:
    """The model's own name → Composer's, for every tensor of the model."""
    listed = list(names)
    inner = f"{_MODEL}model."
    prefix = inner if any(name.startswith(inner) for name in listed) else _MODEL
    return {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}


def read_composer_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that Composer stores of a Hugging Face model; DCP has each value under a dotted name."""
    found: dict[str, Any] = {}
    for name, value in (values.get("dcp") or {}).items():
        if name.startswith(_CONFIG):
            *parents, last = name.removeprefix(_CONFIG).split(".")
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise CheckpointError(f"{name} is inside a value that is no group of values")
            place[last] = value
    if not found:
        raise UsageError(
            "this Composer checkpoint does not store the shape of its model", "give it with --config RUN.yaml"
        )
    return found
