"""Text on its way into a shell, an sbatch header or a Kubernetes name. Nothing reaches them any other way."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable

from keepstep.core.errors import UsageError

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCESS_KEY|PRIVATE_KEY", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def shell_word(value: str) -> str:
    """One word for bash, whatever is in it; a NUL byte cannot be passed to any process."""
    if "\0" in value:
        raise UsageError(f"{value!r} holds a NUL byte, which no command can take", "remove it")
    return shlex.quote(value)


def shell_words(values: Iterable[str]) -> str:
    """Several words for bash."""
    return " ".join(map(shell_word, values))


def sbatch_value(option: str, value: str) -> str:
    """A value for an `#SBATCH` line, which ends at the line's end and knows double quotes and backslashes."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(
            f"{option} is {value!r}, but an sbatch header cannot hold line ends or control characters",
            "remove them from the profile or the path",
        )
    if re.fullmatch(r"[A-Za-z0-9_.,:/@+%=-]*", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def node_names(text: str) -> list[str]:
    """The nodes of a list as Slurm writes them: `n1,m[1-3,7]` is n1 and m[1-3,7]."""
    return [name for name in re.split(r",(?![^\[]*\])", text) if name]


def slug(name: str, limit: int = 40) -> str:
    """A name that Slurm, Kubernetes and DNS take: small letters, digits and dashes.

    Where that loses anything, a short hash of the whole name keeps two names apart.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    # It starts with a letter because some objects' names (Services) must.
    if plain == name and len(plain) <= limit and plain[:1].isalpha():
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    start = plain[: limit - 7].strip("-") or "run"
    return f"{start if start[0].isalpha() else 'r' + start}-{mark}"


def check_variables(variables: Iterable[object], where: str, *, secret: bool) -> None:
    """Refuse names that no shell takes and, unless these are secrets, values that belong into one."""
    for name in variables:
        # YAML reads some words as numbers, and `on` and `no` as truth values.
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"{where} {name!r} is not a variable's name", "letters, digits and _, in quotes if need be"
            )
        if not secret and _SECRET_NAME.search(name):
            raise UsageError(
                f"{where} {name} looks like a credential, which would be printed and saved with the job",
                f"secrets: {{{name}: ...}} takes it from a file or a Kubernetes Secret",
            )
