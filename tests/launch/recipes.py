"""Every command block of the five documents whose recipes we follow, and what became of it: `make test-recipes`.

recipes.yaml has the blocks. Where the documents themselves are at hand, the tests compare them with that list.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.documents import REPOSITORY

FILE = Path(__file__).with_name("recipes.yaml")
RECIPES: dict[str, Any] = yaml.safe_load(FILE.read_text())
DOCUMENTS: dict[str, str] = RECIPES["documents"]
HOW = ("rendered", "run", "differs", "unchanged", "no command")
FOLDER = Path(os.environ.get("RECIPE_DOCUMENTS", REPOSITORY.parent / "shared" / "seeds"))
_LOOSE = re.compile(r"^(?:\d+ +)?((?:sbatch|az|helm|kubectl|sudo|torchrun) .+)$")


@dataclass(frozen=True)
class Block:
    """One block of a document: what is written there, and what we do with it."""

    id: str
    sha256: str
    how: str
    text: str = ""
    """As written; empty for a block that is no command, of which the checksum is enough."""
    ours: str = ""
    why: str = ""
    objects: tuple[str, ...] = ()
    """Kind/name of what the charts must create for kubectl's commands."""
    tests: tuple[str, ...] = ()
    """file::test below tests/, which run what stands in `ours`."""

    @property
    def commands(self) -> list[list[str]]:
        """Its commands as words, with our names for files and charts; empty where we have another one."""
        if self.how not in ("rendered", "run"):
            return []
        text = re.sub(r"\\\n\s*", " ", self.text)
        lines = [shlex.split(line, comments=True) for line in text.splitlines()]
        return [[RECIPES["names"].get(word, word) for word in words] for words in lines if words]


def stored_blocks() -> list[Block]:
    return [
        Block(**{**raw, **{key: tuple(raw.get(key, ())) for key in ("objects", "tests")}}) for raw in RECIPES["blocks"]
    ]


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def document_blocks(text: str) -> Iterator[str]:
    """Fenced blocks, and commands that stand alone outside of them, in the order of the page."""
    fenced: list[str] | None = None
    for line in text.splitlines():
        if line.strip().startswith("```"):
            if fenced is not None:
                yield textwrap.dedent("\n".join(fenced)).strip()
            fenced = [] if fenced is None else None
        elif fenced is not None:
            fenced.append(line.rstrip())
        elif match := _LOOSE.match(line):
            yield match[1].strip()


def read_documents(folder: Path) -> dict[str, str]:
    """The blocks of all documents by id (`NAME NUMBER`); empty where the folder is missing."""
    found = {}
    for name, prefix in DOCUMENTS.items():
        for path in folder.glob(f"{prefix}*"):
            found |= {f"{name} {n}": text for n, text in enumerate(document_blocks(path.read_text()), start=1)}
    return found


def first_line(block: Block) -> str:
    commands = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
    return commands[0].removesuffix("\\").strip() if commands else "(no command)"


def differences() -> str:
    """The table of the documentation: what had to differ, and why."""
    lines = ["| document | as written | here | why |", "|---|---|---|---|"]
    for theirs, ours in RECIPES["names"].items():
        users = sorted({block.id.split()[0] for block in stored_blocks() if theirs in block.text.split()})
        lines.append(f"| {', '.join(users)} | `{theirs}` | `{ours}` | the file's name here |")
    for block in stored_blocks():
        if block.how == "differs":
            lines.append(f"| {block.id} | `{first_line(block)}` | {block.ours} | {block.why} |")
    return "\n".join(lines)


class _Results:
    """Outcomes of tests by their name, for the table."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, set()).add(report.outcome)

    def of(self, block: Block) -> str:
        names = [f"tests/{test}" for test in block.tests]
        mine = {
            outcome
            for node, found in self.outcomes.items()
            if any(node == name or node.startswith(f"{name}[") for name in names) or f"[{block.id}]" in node
            for outcome in found
        }
        return next((word for word in ("failed", "skipped", "passed") if word in mine), "-")


def main() -> int:
    """Run what checks the blocks, then print the table."""
    results, blocks = _Results(), stored_blocks()
    tests = sorted({f"tests/{test}" for block in blocks for test in block.tests})
    code = pytest.main(["-p", "no:cacheprovider", "tests/launch/test_recipes.py", *tests], plugins=[results])
    print(f"\n{'block':<20} {'how':<11} {'result':<8} as written  (why it differs)")
    for block in blocks:
        why = f"  ({block.why})" if block.why else ""
        print(f"{block.id:<20} {block.how:<11} {results.of(block):<8} {first_line(block)[:60]}{why}")
    counted = {how: sum(block.how == how for block in blocks) for how in HOW}
    print("\n" + ", ".join(f"{count} {how}" for how, count in counted.items()))
    print("documents: " + (f"compared with {FOLDER}" if read_documents(FOLDER) else "the stored list"))
    return int(code)


if __name__ == "__main__":
    sys.exit(print(differences()) if "--table" in sys.argv else main())
