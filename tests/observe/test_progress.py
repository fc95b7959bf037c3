import io

import pytest

from keepstep.observe.screen import Progress, StepMetrics, progress_line

FULL = StepMetrics(120, 2.3456, 0.81, 45_500.0, 0.418, 61.2, 32.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_shows_everything_when_wide() -> None:
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
def test_progress_line_fits_narrow_terminals(width: int) -> None:
    line = progress_line(FULL, 1000, 3700, width)
    assert len(line) <= width
    if width >= 40:
        assert "loss 2.3456" in line


def test_progress_prints_few_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(1000, 4096, stream)
    for step in range(1, 101):
        progress.update(StepMetrics(step, 2.0))
    progress.update(StepMetrics(1000, 1.0))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert lines[-1].startswith("step 1000/1000")


def test_progress_redraws_one_line_below_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    progress = Progress(10, 100, stream)
    progress.update(StepMetrics(1, 2.0, tokens_per_s=50.0))
    progress.note("checkpoint committed")
    assert progress.eta_s() == pytest.approx(18)
    progress.update(StepMetrics(10, float("nan")))
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "\r\x1b[Kcheckpoint committed\n" in text
    assert "\x1b[31mloss nan" in text


def test_progress_respects_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = Progress(10, 100, stream)
    progress.update(StepMetrics(10, 2.0))
    progress.update(StepMetrics(10, 1.0))
    progress.close()
    assert "\x1b" not in stream.getvalue()
