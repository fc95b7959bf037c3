"""Links and file names in README and docs point to something that exists."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
PACKAGE = ROOT / "src" / "keepstep"


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"<(?:a|img)[^>]* (?:href|src)=\"([^\"]+)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_source_files_on_pages_exist(page: str) -> None:
    # A name that starts with ./ is from a document of others.
    for name in re.findall(r"`(?!\./)([\w./-]+/[\w.-]+\.(?:py|cu|sh))(?:::\w+)?`", (ROOT / page).read_text()):
        assert (ROOT / name).exists() or (PACKAGE / name).exists(), name


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_import_names_that_exist(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepstep"):
            module = importlib.import_module(node.module or "")
            # A module of a package is an attribute of it only once somebody has imported it.
            inside = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", ()))}
            missing = [each.name for each in node.names if not hasattr(module, each.name) and each.name not in inside]
            assert not missing, f"{node.module} has no {missing}"
