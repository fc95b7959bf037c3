"""docs/install.md: its commands run with the real installers, its names exist, and the file of hashes is current."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.doc_blocks import ROOT, blocks
from tests.patience import PATIENCE_S
from tests.test_pins import pins, pip_setting, reachable_index
from tests.wheelhouse import make_wheel, missing, with_dependencies

HASHED = (ROOT / "requirements" / "hashed.txt").read_text()
PAGE = (ROOT / "docs" / "install.md").read_text()
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTALLERS = Path(sys.executable).parent
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


def missing_packages() -> list[str]:
    """What would have to be downloaded for the build, or to satisfy the pins of our dependencies."""
    pinned = []
    for needed in map(Requirement, PROJECT["dependencies"]):
        needed.specifier = SpecifierSet(f"=={pins()[canonicalize_name(needed.name)]}")
        pinned.append(str(needed))
    return missing([*BUILD["requires"], *pinned])


def source_tree(folder: Path) -> Path:
    """A copy of what the wheel is built from: a build writes next to its sources."""
    built = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "charts", "recipes", "slurm", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    (folder / "docs").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/keepstep.1"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True)
class Newcomer:
    """Someone with a checkout, an empty home and the installers, who pastes commands."""

    checkout: Path
    home: Path
    variables: dict[str, str]

    def paste(self, *commands: str) -> str:
        said = ""
        settings = ("PIP_", "PIPX_", "UV_", "PYTHON")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
        environment["PATH"] = os.pathsep.join([str(self.home / ".local/bin"), str(INSTALLERS), environment["PATH"]])
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.checkout,
                env={**environment, **self.variables, "HOME": str(self.home)},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            said += done.stdout
        return said


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An index of what is installed here. uv and pipx would download gigabytes for torch alone from a public one."""
    if absent := missing_packages():
        pytest.skip(f"these would be downloaded: {', '.join(absent)}")
    packages = with_dependencies([*PROJECT["dependencies"], *BUILD["requires"], "pip"])
    if cuda := [name for name in packages if name.startswith("nvidia-")]:
        pytest.skip(f"{len(cuda)} CUDA libraries of several GB would be packed; a CPU build of torch has none")
    folder = tmp_path_factory.mktemp("wheels")
    for package in packages.values():
        make_wheel(package, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def newcomer(wheels: Path, tmp_path: Path) -> Iterator[Newcomer]:
    (tmp_path / "home").mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_COMPILE": "1", "PIP_CONFIG_FILE": os.devnull}
    offline |= {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(wheels), "UV_PYTHON_DOWNLOADS": "never"}
    yield Newcomer(source_tree(tmp_path / "checkout"), tmp_path / "home", offline)
    # Each installation has a torch of its own.
    shutil.rmtree(tmp_path)


def section(name: str) -> list[str]:
    """The commands of the page's block under this bold word."""
    text = PAGE.partition(f"**{name}")[2].partition("```sh\n")[2].partition("```")[0]
    return text.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["venv and pip", "uv"])
def test_commands_install_into_a_new_environment(newcomer: Newcomer, installer: str) -> None:
    typed = section(installer)
    assert [shlex.split(command)[0].rpartition("/")[2] for command in typed][-1] == "keepstep"
    assert "torch" in newcomer.paste(*typed)
    where = newcomer.paste("cd / && ~/keepstep-env/bin/python -c 'import keepstep; print(keepstep.__file__)'")
    assert where.startswith(str(newcomer.home))


@pytest.mark.slow
def test_pipx_and_uvx_give_a_command(newcomer: Newcomer) -> None:
    pytest.importorskip("pipx")
    pipx, uvx = section("pipx")
    newcomer.paste(pipx)
    assert newcomer.paste("command -v keepstep").startswith(str(newcomer.home))
    assert "torch" in newcomer.paste("keepstep doctor")
    newcomer.paste("pipx uninstall keepstep")
    assert "torch" in newcomer.paste(uvx)


def without_torch(requirements: str) -> str:
    """The file without torch and the libraries that only torch needs: several GB, which no test downloads."""
    packages = re.split(r"^(?=[\w.-]+==)", requirements, flags=re.M)
    return "".join(text for text in packages if not re.match(r"torch|triton|nvidia-|cuda-", text))


@pytest.mark.cluster
def test_pip_installs_the_real_files_by_their_hashes(tmp_path: Path) -> None:
    index = reachable_index()
    (tmp_path / "home").mkdir()
    variables = {"PIP_INDEX_URL": index, "PIP_CERT": pip_setting("cert")}
    reader = Newcomer(source_tree(tmp_path / "checkout"), tmp_path / "home", variables)
    file = reader.checkout / "requirements" / "hashed.txt"
    file.write_text(without_torch(HASHED))
    create, install, ours = section("Dependencies with hashes")
    reader.paste(create, install, ours)
    assert "keepstep" in reader.paste("~/keepstep-env/bin/keepstep --version")
    file.write_text(re.sub(r"(sha256:)[0-9a-f]{8}", r"\g<1>00000000", file.read_text()))
    with pytest.raises(AssertionError, match="DO NOT MATCH"):
        reader.paste(install.replace(" install ", " install --force-reinstall --no-cache-dir "))
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_hashes_of_torch_are_those_of_the_index() -> None:
    index = reachable_index()
    context = ssl.create_default_context(cafile=pip_setting("cert") or None)
    for name in ("torch", "triton"):
        listed = HASHED.partition(f"\n{name}==")[2].partition("\n\n")[0]
        files = set(re.findall(r"sha256:([0-9a-f]{64})", re.split(r"^(?=[\w.-]+==)", listed, flags=re.M)[0]))
        with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", context=context, timeout=PATIENCE_S) as page:
            published = set(re.findall(r"sha256[=:\"\s]+([0-9a-f]{64})", page.read().decode()))
        assert files, name
        assert files <= published, name
