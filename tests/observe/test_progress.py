import io

import pytest

from keepstep.observe.progress import Progress, Snapshot, progress_line

FULL = Snapshot(120, 2.3456, 0.81, 45_500.0, 0.418, 61.2, 32.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_wide_line_tells_everything() -> None:
    line = progress_line(FULL, 1000, 3700, 160)
    for part in (
        "step 120/1000",
        "12%",
        "loss 2.3456",
        "grad 0.81",
        "45.5k tok/s",
        "MFU 41.8%",
        "61.2 GiB",
        "ETA 1h01m",
    ):
        assert part in line
    assert line.endswith("saved 32s ago")


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 120])
def test_a_narrow_terminal_gets_a_line_that_fits_with_the_most_important_first(width: int) -> None:
    line = progress_line(FULL, 1000, 3700, width)
    assert len(line) <= width
    if width >= 40:
        assert "loss 2.3456" in line


def test_without_a_terminal_lines_are_plain_and_rare() -> None:
    stream = io.StringIO()
    progress = Progress(1000, 4096, stream)
    for step in range(1, 101):
        progress.update(Snapshot(step, 2.0))
    progress.update(Snapshot(1000, 1.0))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert lines[-1].startswith("step 1000/1000")


def test_a_terminal_gets_one_line_redrawn_and_notes_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    progress = Progress(10, 100, stream)
    progress.update(Snapshot(1, 2.0, tokens_per_s=50.0))
    progress.note("checkpoint committed")
    assert progress.eta_s() == pytest.approx(18)
    progress.update(Snapshot(10, float("nan")))
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "\r\x1b[Kcheckpoint committed\n" in text
    assert "\x1b[31mloss nan" in text


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = Progress(10, 100, stream)
    progress.update(Snapshot(10, 2.0))
    progress.update(Snapshot(10, 1.0))
    progress.close()
    assert "\x1b" not in stream.getvalue()
