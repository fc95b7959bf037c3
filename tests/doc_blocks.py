"""Reads the code blocks of README and docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The page's code blocks with this language after the fence; empty for blocks without one."""
    text = (ROOT / page).read_text()
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if name == language]


def commands(page: str) -> list[str]:
    """Every line of the page's sh blocks, without comments."""
    lines = [line.partition(" #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line]
