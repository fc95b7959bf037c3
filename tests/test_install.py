"""docs/install.md and the dependencies with hashes: names on the page exist, and the file is current."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.doc_blocks import ROOT, blocks
from tests.test_pins import pins

HASHED = (ROOT / "requirements" / "hashed.txt").read_text()
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def hashed() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", HASHED, re.M)}


def test_hashed_requirements_are_current() -> None:
    again = "run: python scripts/write_hashes.py"
    found, pinned = hashed(), pins()
    different = {name: version for name, version in found.items() if pinned.get(name, version) != version}
    assert different == {}, again
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), again


def test_hashed_requirements_have_hashes_and_name_no_server() -> None:
    packages = re.split(r"^(?=[\w.-]+==)", HASHED, flags=re.M)[1:]
    assert len(packages) == len(hashed())
    assert all("--hash=sha256:" in package for package in packages)
    assert "://" not in HASHED


def test_install_page_names_files_and_extras_that_exist() -> None:
    commands = "\n".join(blocks("docs/install.md", ""))
    for name in re.findall(r"(?:requirements|docker)/[\w.]+", commands):
        assert (ROOT / name).is_file(), name
    (torch,) = re.findall(r"torch==([\d.]+)", commands)
    assert torch == pins()["torch"]
    extras = set(re.findall(r"`([\w-]+)`", PAGE.partition("## Extras")[2].partition("## ")[0]))
    assert extras == set(PROJECT["optional-dependencies"])
