"""Checks of a whole configuration: the range of every number, then the rules across fields.

A range stands at its field in `schema.py`, a rule in `rules/`. All checks are pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from keepstep.config.fields import all_fields, shown_at, value_at
from keepstep.config.rules import Rule, experts, model, parallel, run
from keepstep.config.rules.parallel import flash_needs_bounds
from keepstep.config.schema import ModelConfig, RunConfig
from keepstep.core.errors import ConfigError, KeepstepError
from keepstep.core.messages import invalid_value

_PARTS = (run, model, experts, parallel)
RULES = tuple(rule for part in _PARTS for rule in vars(part).values() if isinstance(rule, Rule))


@dataclass(frozen=True)
class Broken:
    """One broken rule: the message names the first of `fields` and its value."""

    fields: tuple[str, ...]
    message: str
    hint: str | None = None


def broken_rules(config: RunConfig) -> Iterator[Broken]:
    """Everything that is wrong with `config`; a rule is skipped where one of its fields is out of range."""
    out_of_range = set()
    for path, field in all_fields().items():
        value = value_at(config, path)
        if field.range is not None and not field.range.holds(value):
            out_of_range.add(path)
            yield Broken((path,), invalid_value(path, value, field.range.rule(value)))
    for rule in RULES:
        found = None if out_of_range.intersection(rule.fields) else rule.find(config)
        if found is not None:
            needs, hint = found
            yield Broken(rule.fields, invalid_value(rule.fields[0], shown_at(config, rule.fields[0]), needs), hint)


def check_shape(shape: ModelConfig) -> None:
    """Raise where heads and widths of a model do not fit together, whatever made its config."""
    found = broken_rules(replace(RunConfig(), model=shape))
    problems = [broken for broken in found if all(name.startswith("model.") for name in broken.fields)]
    if problems:
        raise ConfigError([KeepstepError(broken.message, broken.hint) for broken in problems])


def check_conversations(config: RunConfig) -> None:
    """The rule of packed documents, for data that turned out to be conversations: their rows are packed too."""
    found = flash_needs_bounds(config, "a row of conversations")
    if found is not None:
        raise ConfigError(invalid_value("compute.attention", config.compute.attention, found[0]), found[1])
