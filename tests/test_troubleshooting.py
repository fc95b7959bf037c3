"""docs/troubleshooting.md quotes messages that keepstep still prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.doc_blocks import ROOT

QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)


def texts(node: ast.AST) -> Iterator[str]:
    """Every text of a module, with … for each value in it."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


@pytest.fixture(scope="module")
def messages() -> list[str]:
    files = sorted((ROOT / "src" / "keepstep").rglob("*.py"))
    return [text for path in files for text in texts(ast.parse(path.read_text())) if len(text) > 7]


@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_message_exists(quoted: str, messages: list[str]) -> None:
    assert any(quoted in text for text in messages), f"no module says: {quoted}"


def test_page_quotes_many_messages() -> None:
    assert len(QUOTED) >= 30
    assert len(set(QUOTED)) == len(QUOTED)
