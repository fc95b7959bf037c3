"""Quoting for a shell, an sbatch header or a Kubernetes name. All text that reaches them passes through here."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.core.errors import UsageError

# TOKENIZERS_PARALLELISM is no secret.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)(API_?KEY|KEY|PASS|PWD|AUTH)(_|$)", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s@:]*:[^/\s@]+@")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def shell_word(value: str) -> str:
    """One word for bash, whatever it contains, except a NUL byte: no process can receive one."""
    if "\0" in value:
        raise UsageError(f"{value!r} holds a NUL byte, which no command can take", "remove it")
    return shlex.quote(value)


def shell_words(values: Iterable[str]) -> str:
    """Several words for bash."""
    return " ".join(map(shell_word, values))


def sbatch_value(option: str, value: str) -> str:
    """A value for an `#SBATCH` line, in which only double quotes and backslashes are special."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(
            f"{option} is {value!r}, but an sbatch header cannot hold line ends or control characters",
            "remove them from the profile or the path",
        )
    if re.fullmatch(r"[A-Za-z0-9_.,:/@+%=-]*", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def node_names(text: str) -> list[str]:
    """The entries of a node list as Slurm writes them: `n1,m[1-3,7]` is n1 and m[1-3,7]."""
    return [name for name in re.split(r",(?![^\[]*\])", text) if name]


def slug(name: str, limit: int = 40) -> str:
    """A name that Slurm, Kubernetes and DNS accept: lower-case letters, digits and dashes.

    Where that loses characters, a short hash of the whole name keeps two names distinct.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    # Names of some Kubernetes objects (Services) must start with a letter.
    if plain == name and len(plain) <= limit and plain[:1].isalpha():
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    start = plain[: limit - 7].strip("-") or "run"
    return f"{start if start[0].isalpha() else 'r' + start}-{mark}"


def check_variables(variables: Mapping[Any, Any], where: str, *, secret: bool) -> None:
    """Refuse names that no shell accepts and, unless these are secrets, what looks like a credential."""
    for name, value in variables.items():
        # YAML reads some words as numbers, and `on` and `no` as booleans.
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise UsageError(f"{where} {name!r} is not a variable's name", "letters, digits and _; quote it in YAML")
        if not secret and (_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(str(value))):
            raise UsageError(
                f"{where} {name} looks like a credential, which would be printed and saved with the job",
                f"secrets: {{{name}: ...}} takes it from a file or a Kubernetes Secret",
            )
