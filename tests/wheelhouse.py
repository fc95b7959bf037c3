"""Wheels made again from the packages that are installed here: real installers resolve and install them offline."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags
from packaging.utils import canonicalize_name

OF_ONE_INSTALLATION = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}


def with_dependencies(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The installed packages that these requirements need here, by name."""
    found: dict[str, Distribution] = {}
    waiting = [(requirement, "") for requirement in map(Requirement, requirements)]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        found[name] = distribution(requirement.name)
        for text in found[name].requires or []:
            waiting += [(Requirement(text), each) for each in ("", *requirement.extras)]
    return found


def missing(requirements: Iterable[str]) -> list[str]:
    """Those that no package installed here satisfies."""
    return [text for text in requirements if not _satisfied(Requirement(text))]


def _satisfied(requirement: Requirement) -> bool:
    try:
        version = distribution(requirement.name).version
    except PackageNotFoundError:
        return bool(requirement.marker and not requirement.marker.evaluate())
    return requirement.specifier.contains(version)


def make_wheel(package: Distribution, folder: Path) -> Path:
    """Pack the package's files. Its scripts are left out: an installer makes them from the entry points."""
    head = package.read_text("WHEEL") or ""
    tags = {tag for line in head.splitlines() if line.startswith("Tag: ") for tag in parse_tag(line[5:])}
    tag = next(tag for tag in sys_tags() if tag in tags)
    name = canonicalize_name(package.metadata["Name"]).replace("-", "_")
    wheel = folder / f"{name}-{package.version}-{tag}.whl"
    inside = [path for path in package.files or [] if ".." not in path.parts and path.suffix != ".pyc"]
    record = next(str(path) for path in inside if path.name == "RECORD" and path.parent.suffix == ".dist-info")
    with zipfile.ZipFile(wheel, "w", strict_timestamps=False) as archive:
        kept = [path for path in inside if path.name not in OF_ONE_INSTALLATION]
        for path in kept:
            archive.write(str(path.locate()), str(path))
        archive.writestr(record, "".join(f"{path},,\n" for path in [*kept, record]))
    return wheel
