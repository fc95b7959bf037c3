"""Colour, columns and the status line, on terminals, dumb terminals and in pipes."""

from __future__ import annotations

import io

import pytest

from keepstep.core.terminal import StatusLine, align, bar, paint, wants_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colour_depends_on_stream_and_environment(
    variables: dict[str, str], terminal: bool, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal() if terminal else io.StringIO()) is colour


def test_align_pads_painted_and_wide_cells() -> None:
    lines = align([("run", "state", "n"), ("训练", paint("failed", "bold red"), "12"), ("b", "ok", "3")], right=[2])
    assert lines == ["run   state    n", "训练  \x1b[1;31mfailed\x1b[0m  12", "b     ok       3"]


def test_bar_is_full_at_most() -> None:
    assert bar(0.5, 4) == "━━──  50%"
    assert bar(1.5, 4) == "━━━━ 100%"


def test_status_line_is_redrawn_below_notes() -> None:
    stream = Terminal()
    line = StatusLine(stream)
    line.draw("step 1")
    line.note("saved")
    line.draw("step 2")
    line.close()
    assert stream.getvalue() == "step 1\r\x1b[Ksaved\nstep 1\r\x1b[Kstep 2\n"


def test_status_line_prints_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    line = StatusLine(stream)
    line.draw("step 1")
    line.note("saved")
    line.close()
    assert stream.getvalue() == "step 1\nsaved\n"


def test_status_line_erases_with_spaces_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    line = StatusLine(stream)
    line.draw("ab")
    line.draw("c")
    assert stream.getvalue() == "ab\r  \rc"
