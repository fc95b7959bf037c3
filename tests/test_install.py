"""docs/install.md and the dependencies with hashes: names on the page exist, and the file is current."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.doc_blocks import ROOT, blocks, commands
from tests.patience import PATIENCE_S
from tests.test_pins import pins

HASHED = (ROOT / "requirements" / "hashed.txt").read_text()
PAGE = (ROOT / "docs" / "install.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = SETTINGS["project"], SETTINGS["build-system"]


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
    typed = "\n".join([*blocks("docs/install.md", ""), *blocks("docs/install.md", "sh")])
    for name in re.findall(r"(?:requirements|docker)/[\w.]+", typed):
        assert (ROOT / name).is_file(), name
    (torch,) = re.findall(r"torch==([\d.]+)", typed)
    assert torch == pins()["torch"]
    extras = set(re.findall(r"`([\w-]+)`", PAGE.partition("## Extras")[2].partition("## ")[0]))
    assert extras == set(PROJECT["optional-dependencies"])


def installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "0"


def missing_packages() -> list[str]:
    """What pip would have to download for the build, or to satisfy the pins of our dependencies."""
    build = [Requirement(text) for text in BUILD["requires"]]
    names = [Requirement(text).name for text in PROJECT["dependencies"]]
    pinned = [Requirement(f"{name}=={pins()[canonicalize_name(name)]}") for name in names]
    return [str(each) for each in (*build, *pinned) if not each.specifier.contains(installed(each.name))]


def source_tree(folder: Path) -> Path:
    """A copy of what the wheel is built from: a build writes next to its sources."""
    built = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "charts", "recipes", "slurm", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    (folder / "docs").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/keepstep.1"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def offer_dependencies(python: Path, folder: Path) -> None:
    """Let the new environment find the packages of this one, except keepstep: nothing can be downloaded here."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "keepstep" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    (site / "dependencies.pth").write_text(f"{folder}\n")
    # venv of Python 3.11 brings an old setuptools; a build by pip alone would download a new one.
    for path in site.glob("setuptools*"):
        shutil.rmtree(path)


@pytest.mark.slow
def test_install_commands_run_in_a_new_environment(tmp_path: Path) -> None:
    if missing := missing_packages():
        pytest.skip(f"these would be downloaded: {', '.join(missing)}")
    tree, home = source_tree(tmp_path / "checkout"), tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HOME": str(home), "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    typed = commands("docs/install.md")
    assert [shlex.split(command)[0].rpartition("/")[2] for command in typed] == ["python3", "pip", "keepstep"]
    for command in typed:
        words = ["bash", "-c", command]
        done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if " -m venv " in command:
            offer_dependencies(home / "keepstep-env" / "bin" / "python", tmp_path / "dependencies")
    where = [home / "keepstep-env" / "bin" / "python", "-c", "import keepstep; print(keepstep.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(str(home))
