"""Draws terminal output, with colours, as an SVG picture.

FORCE_COLOR=1 COMMAND | python draw_terminal.py OUT.svg TITLE
"""

from __future__ import annotations

import html
import re
import sys
import textwrap
from pathlib import Path

COLUMNS, LINE_HEIGHT, CHARACTER_WIDTH, MARGIN, BAR = 118, 19, 8.43, 18, 34
STYLES = {"": "#c9d1d9", "1;32": "#7ee787", "2": "#8b949e", "1;31": "#ff7b72"}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def styled(text: str) -> list[list[tuple[str, str]]]:
    """Lines of (style, text), wrapped at the terminal's width."""
    lines: list[list[tuple[str, str]]] = []
    style = ""
    for line in text.rstrip("\n").split("\n"):
        characters: list[tuple[str, str]] = []
        at = 0
        for match in ESCAPE.finditer(line):
            characters += [(style, character) for character in line[at : match.start()]]
            style = "" if match[1] == "0" else match[1]
            at = match.end()
        characters += [(style, character) for character in line[at:]]
        for start in range(0, max(1, len(characters)), COLUMNS):
            lines.append(characters[start : start + COLUMNS])
    return lines


def runs(line: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge neighbours with the same style."""
    merged: list[tuple[str, str]] = []
    for style, character in line:
        if merged and merged[-1][0] == style:
            merged[-1] = (style, merged[-1][1] + character)
        else:
            merged.append((style, character))
    return merged


def _span(style: str, part: str) -> str:
    weight = ' font-weight="bold"' if style[:1] == "1" else ""
    return f'<tspan fill="{STYLES.get(style, STYLES[""])}"{weight}>{html.escape(part)}</tspan>'


def draw(text: str, title: str) -> str:
    """The SVG document."""
    lines = styled(text)
    width = int(COLUMNS * CHARACTER_WIDTH + 2 * MARGIN)
    height = BAR + LINE_HEIGHT * len(lines) + MARGIN
    rows = []
    for number, line in enumerate(lines):
        spans = "".join(_span(style, part) for style, part in runs(line))
        rows.append(
            f'<text x="{MARGIN}" y="{BAR + LINE_HEIGHT * (number + 1) - 5}" xml:space="preserve">{spans}</text>'
        )
    dots = "".join(
        f'<circle cx="{18 + 20 * n}" cy="17" r="6" fill="{c}"/>'
        for n, c in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    return (
        textwrap.dedent(
            f"""\
        <svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
        <rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}
        <text x="90" y="22" fill="#8b949e" font-family="monospace" font-size="13">{html.escape(title)}</text>
        <g font-family="ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" font-size="14">
        """
        )
        + "\n".join(rows)
        + "\n</g></svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(sys.stdin.read(), sys.argv[2]), encoding="utf-8")
