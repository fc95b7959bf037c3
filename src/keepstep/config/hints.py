"""Hints for unknown keys: a typo, a key in the wrong section, or another tool's name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache
from importlib import resources

from keepstep.config.fields import all_fields, all_sections
from keepstep.config.parse import load_own_yaml
from keepstep.config.schema import RENAMED
from keepstep.core.messages import listed, nearest

# Names less similar than this are not suggested.
_ALIKE = 0.65


@cache
def other_tools() -> dict[str, str]:
    """Names in other tools, each with our key, or with a hint that has spaces (other_tools.yaml)."""
    return by_name(load_own_yaml((resources.files("keepstep.config") / "other_tools.yaml").read_text()))


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """A table of space-separated names by what they mean, as what each name means."""
    return dict(sorted((name, meant) for meant, listed_names in names.items() for name in listed_names.split()))


def hint_for(path: str) -> str:
    """A hint for the unknown key `path`."""
    section, _, leaf = path.rpartition(".")
    if path in all_fields() or path in all_sections():
        return f"{path} is a key inside a section: write {section}: and below it {leaf}:"
    for name in (path, leaf, *section.split(".")):
        if meant := other_tools().get(name):
            return meant if " " in meant else f"keepstep calls it {meant}"
    same_leaf = [other for other in all_fields() if other.rpartition(".")[2] == leaf]
    if same_leaf:
        near = nearest(path, same_leaf, 0.8)
        return f"did you mean {near or listed(same_leaf)}?"
    alike = _most_like(section, leaf)
    return f"did you mean {alike}?" if alike else "keepstep config reference lists every key"


def hint_for_section(path: str) -> str:
    """A hint for an unknown key that contains several others."""
    near = nearest(path, list(all_sections()))
    if near and path not in other_tools():
        return f"did you mean {near}?"
    return hint_for(path)


def _most_like(section: str, leaf: str) -> str | None:
    """The key whose last word is most similar to `leaf`, ours or another tool's; the section breaks ties."""
    names = [(path.rpartition(".")[2], path) for path in all_fields()]
    elsewhere = {**other_tools(), **RENAMED}
    names += [(name.rpartition(".")[2], meant) for name, meant in elsewhere.items() if " " not in meant]
    best, best_score = None, 0.0
    for name, path in names:
        alike = SequenceMatcher(None, leaf.lower(), name).ratio()
        score = alike + 0.5 * SequenceMatcher(None, section.lower(), path.rpartition(".")[0]).ratio()
        if alike >= _ALIKE and score > best_score:
            best, best_score = path, score
    return best
