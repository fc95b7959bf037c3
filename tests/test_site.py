"""The documentation's site: every page has its place in it, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.doc_blocks import ROOT
from tests.test_pins import reachable_index, uv_environment

KINDS = ["Tutorials", "How-to guides", "Reference", "Explanation"]


class _Loader(yaml.SafeLoader):
    """Leaves out what only mkdocs can build."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def site() -> dict[str, object]:
    loaded: dict[str, object] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    return loaded


def test_every_page_has_its_place_in_the_site() -> None:
    home, *sections = site()["nav"]  # type: ignore[misc]
    assert home == {"Home": "index.md"}
    assert [name for section in sections for name in section] == KINDS
    placed = [page for section in sections for pages in section.values() for entry in pages for page in entry.values()]
    assert len(placed) == len(set(placed))
    pages = {path.name for path in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]} - {"README.md"}
    assert set(placed) == pages


def test_site_loads_nothing_from_other_servers() -> None:
    theme = site()["theme"]
    assert isinstance(theme, dict)
    assert theme["font"] is False


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    words = ["--cache-dir", str(tmp_path / "cache"), "--default-index", reachable_index()]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    uv, python = [sys.executable, "-m", "uv", "--quiet"], tmp_path / "env" / "bin" / "python"
    environment = {**uv_environment(), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*uv, "venv", "--python", sys.executable, str(tmp_path / "env")], check=True, env=environment)
    install = [*uv, "pip", "install", *words, "--python", str(python), "--constraint", "requirements/pinned.txt"]
    installed = subprocess.run(
        [*install, "--only-binary", ":all:", *wanted], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if installed.returncode and "No solution found" not in installed.stderr:
        pytest.skip(f"the index did not answer: {installed.stderr[-500:]}")
    assert installed.returncode == 0, installed.stderr
    folder = tmp_path / "site"
    build = [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    front = (folder / "index.html").read_text()
    assert 'href="install.html"' in front
    loaded = re.findall(r"<(?:script|link)[^>]*(?:src|href)=\"?(https?:[^\">]+)", front)
    assert [address for address in loaded if "squidfunk" not in address] == []
    assert (folder / "search" / "search_index.json").stat().st_size > 100_000
    # What a page links to outside docs/ is part of the site.
    assert (folder / "benchmarks" / "results" / "gpu.json").is_file()
    assert not (folder / "keepstep.1").exists()
