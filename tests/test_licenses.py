"""Everything that `pip install keepstep` brings has a license that is known and permissive. Reads metadata only."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.doc_blocks import ROOT

PERMISSIVE = re.compile(
    r"apache|\bmit\b|mit-cmu|\bbsd\b|bsd-|3-clause|\bisc\b|python software foundation|\bpsf\b|psf-2|python-2\.0"
    r"|\bhpnd\b|zlib|0bsd|\bcc0|unlicense|mpl-2\.0|mozilla public license 2\.0|matplotlib|public domain",
    re.IGNORECASE,
)
"""Of the Mozilla licenses only 2.0: its terms bind changes to its own files, which we do not make."""
STRICT = re.compile(r"\b(a|l)?gpl|general public license|affero|sspl|busl|commercial|non-?commercial", re.IGNORECASE)
OF_NVIDIA = re.compile(r"(nvidia|cuda)-.*")
"""torch brings these on Linux with a GPU. They may be used, but not changed; we neither change nor ship them."""


def requirements() -> dict[str, list[str]]:
    """Every installed distribution that our dependencies need on this machine, with those that need it."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    left, found = [("keepstep", Requirement(text)) for text in wanted], dict[str, list[str]]()
    while left:
        parent, requirement = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            with suppress(metadata.PackageNotFoundError):
                left += [(name, Requirement(text)) for text in metadata.requires(name) or ()]
        found.setdefault(name, []).append(parent)
    return found


def license_of(name: str) -> str:
    """What the distribution's metadata says, or the title of the license that it ships; empty if there is neither."""
    distribution = metadata.distribution(name)
    fields = distribution.metadata
    classifiers = [line for line in fields.get_all("Classifier") or () if line.startswith("License ::")]
    # The first line: some put the whole text of their license there.
    free_text = (fields.get("License") or "").strip().partition("\n")[0]
    named = fields.get("License-Expression") or "; ".join([*classifiers, free_text]).strip("; ")
    shipped = distribution.read_text("licenses/LICENSE") or distribution.read_text("LICENSE") or ""
    return named or " ".join(shipped.split()[:12])


@pytest.mark.parametrize("name", sorted(requirements()))
def test_dependency_has_a_permissive_license(name: str) -> None:
    try:
        license_text = license_of(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    needed_by = ", ".join(requirements()[name])
    assert license_text, f"{name}, which {needed_by} needs, does not name its license"
    if OF_NVIDIA.fullmatch(name):
        assert re.search(r"nvidia|proprietary|apache|bsd", license_text, re.IGNORECASE), license_text
        return
    assert PERMISSIVE.search(license_text), f"{name}, which {needed_by} needs, has the license {license_text}"
    assert not STRICT.search(license_text), f"{name}, which {needed_by} needs, has the license {license_text}"


def test_license_check_refuses_a_strict_license() -> None:
    for text in ("GPL-3.0-or-later", "License :: OSI Approved :: GNU Affero General Public License v3", "LGPL-2.1"):
        assert STRICT.search(text)
        assert not PERMISSIVE.search(text)


def test_product_names_its_own_license() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
