"""Profiles: a cluster's settings in a YAML file, named by `--on slurm:NAME`, and so with k8s, ssh and sky.

NAME.yaml is searched in $KEEPSTEP_PROFILES, ./profiles and ~/.config/keepstep/profiles, then among the profiles that
come with keepstep. A path is used as it is.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import yaml

from keepstep.config.fields import texts_below
from keepstep.config.parse import load_yaml
from keepstep.config.values import Misfit, convert
from keepstep.core.errors import ConfigError, KeepstepError, UsageError
from keepstep.core.files import home_folder
from keepstep.core.messages import invalid_value, suggestion
from keepstep.launch.profile_kinds import KubernetesProfile, SkyProfile, SlurmProfile, SshProfile
from keepstep.launch.quoting import check_variables
from keepstep.plan.cluster import read_profiles

WARNED_EARLY_S = 60
"""Slurm checks time limits every 30 s, and warns up to a minute early."""
AnyProfile = SlurmProfile | KubernetesProfile | SshProfile | SkyProfile
Profile = TypeVar("Profile", bound=AnyProfile)
PROFILES: Mapping[str, type[AnyProfile]] = {
    "slurm": SlurmProfile, "k8s": KubernetesProfile, "ssh": SshProfile, "sky": SkyProfile,
}  # fmt: skip
_TYPED_MAPPINGS = ("values", "resources", "file_mounts")
"""Mappings for another program, which distinguishes numbers and booleans from text."""


def load_hosts(text: str) -> SshProfile:
    """What follows `--on ssh:`: the name or the path of a profile, or else hosts separated by commas."""
    if "/" in text or text.endswith((".yaml", ".yml")) or _find_own(text):
        return load_profile(SshProfile, text)
    return _build(SshProfile, {"hosts": text.split(",")}, f"--on ssh:{text}")


def split_host(text: str) -> tuple[str, str, str]:
    """User, host and port of [user@]host[:port]; empty where not given. An IPv6 address is in brackets."""
    match = _HOST.fullmatch(text)
    assert match, text
    return match[1] or "", match[2].strip("[]"), match[3] or ""


# No host or user may look like an option of ssh.
_HOST = re.compile(
    r"(?:([A-Za-z0-9_][A-Za-z0-9_.-]*)@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.%]+\])(?::([0-9]+))?"
)


def load_profile(kind: type[Profile], name: str) -> Profile:
    """Find, read and check a profile; an empty name means all defaults. All problems are reported together."""
    if not name:
        return kind()
    place, text = _find(next(system for system, each in PROFILES.items() if each is kind), name)
    try:
        content, written = load_yaml(text) or {}, load_yaml(text, _AsWritten) or {}
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{place} is not YAML: {error}", "keepstep launch profiles prints one to start from"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must be keys and values", "partition: gpu")
    # YAML reads 12:00:00 as seconds, 0123 as 83 and `no` as a boolean: text fields keep what the user wrote.
    texts = [name for name, hint in get_type_hints(kind).items() if _is_text(hint) and name not in _TYPED_MAPPINGS]
    content = {name: written[name] if name in texts else content.get(name) for name in written}
    return _build(kind, content, place)


class _AsWritten(yaml.SafeLoader):
    """Reads every value as text, and an empty one as None."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the library defines it so
        first: [pair for pair in found if pair[0].rpartition(":")[2] in ("null", "merge")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _is_text(hint: Any) -> bool:
    """Whether a field holds text: one value, a list, or a mapping."""
    return hint in (str, tuple[str, ...]) or get_origin(hint) is Mapping


def _build(kind: type[Profile], content: dict[str, Any], place: str) -> Profile:
    types = get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    problems: list[KeepstepError] = []
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in types:
            hint = suggestion(str(key), names, "keepstep launch profiles lists every key")
            problems.append(KeepstepError(f"{place} unknown key {key}", hint))
            continue
        try:
            values[key] = convert(types[key], value)
            if key in ("variables", "secrets"):
                check_variables(values[key], f"{place} {key}:", secret=key == "secrets")
        except Misfit as misfit:
            problems.append(KeepstepError(f"{place} {invalid_value(key, value, misfit.rule)}", misfit.hint))
        except UsageError as error:
            problems.append(error)
    if not problems:
        profile = kind(**values)
        problems = [KeepstepError(f"{place} {message}", hint) for message, hint in _broken(profile)]
        if not problems:
            return profile
    raise ConfigError(problems)


def _broken(profile: AnyProfile) -> Iterator[tuple[str, str]]:
    """Message and hint of each rule that the profile breaks."""
    if isinstance(profile, SkyProfile) and not re.fullmatch(r"(?:[\w.-]+(?::[1-9][0-9]*)?)?", profile.accelerators):
        yield invalid_value("accelerators", profile.accelerators, "must be TYPE:COUNT"), "accelerators: H100:8"
        return
    for name in ("nodes", "min_nodes", "gpus_per_node", "max_restarts"):
        low = 1 if name == "nodes" and not isinstance(profile, SshProfile) else 0
        if getattr(profile, name) < low:
            yield invalid_value(name, getattr(profile, name), f"must be at least {low}"), f"{name}: {low}"
    if isinstance(profile, SlurmProfile | KubernetesProfile) and profile.cluster:
        shipped = read_profiles()
        known = [*shipped.clusters, *shipped.gpus]
        if profile.cluster not in known:
            hint = suggestion(profile.cluster, known, "keepstep plan --cluster list prints all names")
            yield invalid_value("cluster", profile.cluster, "must be the name of a cluster or a GPU"), hint
    for name, value in profile.variables.items():
        if not isinstance(value, str | int | float):
            yield invalid_value(f"variables: {name}", value, "must be a text or a number"), f'{name}: ""'
    if isinstance(profile, KubernetesProfile):
        for name, reference in profile.secrets.items():
            if not isinstance(reference, str) or reference.count("/") != 1:
                yield invalid_value(f"secrets: {name}", reference, "must be SECRET/KEY"), "huggingface/token"
        return
    if isinstance(profile, SkyProfile):
        check_variables(dict.fromkeys(profile.secrets.values()), "secrets:", secret=True)
        return
    for name, path in profile.secrets.items():
        if not isinstance(path, str) or not path.startswith("/"):
            yield invalid_value(f"secrets: {name}", path, "must be the absolute path of a file"), name
    yield from _broken_hosts(profile) if isinstance(profile, SshProfile) else _broken_times(profile)


def _broken_hosts(profile: SshProfile) -> Iterator[tuple[str, str]]:
    for host in profile.hosts or ("",):
        if not _HOST.fullmatch(host):
            yield (
                invalid_value("a host", host, "must be [user@]host[:port]"),
                "--on ssh:gpu1,gpu2 or hosts: [gpu1, gpu2]",
            )
    if len(set(profile.hosts)) < len(profile.hosts):
        yield "hosts names a host twice", "each host once"
    if profile.folder and not profile.folder.startswith("/"):
        yield invalid_value("folder", profile.folder, "must be an absolute path"), f"folder: /home/me/{profile.folder}"
    for option in profile.options:
        if not re.fullmatch(r"[A-Za-z0-9]+[= ].+", option):
            yield invalid_value("options", option, "must be an option of ssh_config"), "IdentityFile=/home/me/.ssh/key"


def _broken_times(profile: SlurmProfile) -> Iterator[tuple[str, str]]:
    if profile.warn_before_end_s < 60:
        yield "warn_before_end_s must be at least 60: Slurm checks every 30 s", "300"
    limit_s = _limit_s(profile.time_limit)
    if limit_s is not None and limit_s < profile.warn_before_end_s + WARNED_EARLY_S:
        # The job would save and requeue itself right after every start.
        yield (
            f"time_limit is {profile.time_limit}, {limit_s} s, but Slurm may warn {WARNED_EARLY_S} s before "
            f"warn_before_end_s ({profile.warn_before_end_s}): nothing is left to train in",
            "a longer time_limit (30 means minutes, 12:00:00 hours), or a smaller warn_before_end_s",
        )


def _limit_s(text: str) -> int | None:
    """A time limit in Slurm's format (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S); None for no limit or a wrong one."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    # Zero means no limit.
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _find(kind: str, name: str) -> tuple[str, str]:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        # ~name of a user that this machine does not know: no such file, like any other wrong path.
        with suppress(RuntimeError):
            path = path.expanduser()
        if not path.is_file():
            raise UsageError(f"there is no profile {name}", f"--on {kind}:NAME, or the path of a YAML file")
        return str(path), path.read_text()
    if own := _find_own(name):
        return str(own), own.read_text()
    shipped = resources.files("keepstep.launch") / "shipped" / kind
    entries = shipped.iterdir() if shipped.is_dir() else ()
    known = sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))
    if name in known:
        return f"{kind}:{name}", (shipped / f"{name}.yaml").read_text()
    folders = ", ".join(map(str, _own_folders()))
    raise UsageError(
        f"there is no {kind} profile {name!r} in {folders} nor among ours ({', '.join(known)})",
        suggestion(name, known, f"keepstep launch profiles {kind} > profiles/{name}.yaml"),
    )


def _own_folders() -> list[Path]:
    folders = [Path("profiles"), home_folder() / ".config/keepstep/profiles"]
    chosen = os.environ.get("KEEPSTEP_PROFILES")
    return [Path(chosen), *folders] if chosen else folders


def _find_own(name: str) -> Path | None:
    """The user's profile of this name."""
    paths = [folder / f"{name}.yaml" for folder in _own_folders()]
    return next((path for path in paths if path.is_file()), None)


def commented(kind: type[AnyProfile]) -> str:
    """A profile of defaults with every key explained, to start from."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = []
    for name, text in texts_below(body):
        default = getattr(kind(), name)
        default = list(default) if isinstance(default, tuple) else default
        lines += [f"# {text}", yaml.safe_dump({name: default}, default_flow_style=False).strip()]
    return "\n".join(lines) + "\n"
