from pathlib import Path

import numpy as np
import pytest

from keepstep.observe.plot import Curve, png_plot, text_plot


def falling(name: str = "run", count: int = 500) -> Curve:
    steps = np.arange(1, count + 1)
    return Curve(name, steps.tolist(), (2 + 8 / np.sqrt(steps)).tolist())


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_text_plot_fits_its_width_and_labels_its_axes(width: int) -> None:
    text = text_plot([falling()], width, 10)
    lines = text.splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= width
    assert lines[0] == "loss: run"
    assert lines[1].lstrip().startswith("10 ┤")
    assert "step 500" in lines[-1]


def test_the_first_dot_is_high_and_the_last_is_low() -> None:
    field = [
        line.partition("┤")[2] or line.partition("│")[2] for line in text_plot([falling()], 60, 8).splitlines()[1:9]
    ]
    assert field[0][0] != " "
    assert field[-1].rstrip()[-1] != " "
    assert len(field[-1].rstrip()) > len(field[0].rstrip())


def test_a_single_spike_among_many_steps_is_drawn() -> None:
    values = [1.0] * 100_000
    values[54_321] = 50.0
    text = text_plot([Curve("", list(range(100_000)), values)], 80, 10)
    assert text.splitlines()[1].partition("┤")[2].strip()


def test_gaps_constants_and_nothing_are_all_fine() -> None:
    assert text_plot([Curve("a", [], [])]) == "loss: nothing to plot yet"
    assert text_plot([Curve("a", [1, 2, 3], [float("nan")] * 3)]) == "loss: nothing to plot yet"
    assert "┤" in text_plot([Curve("a", [1], [0.0])])
    assert "┤" in text_plot([Curve("a", [1, 2, 3], [1.0, float("nan"), float("inf")])])


def test_several_runs_are_named_and_coloured_only_when_asked() -> None:
    plain = text_plot([falling("a"), falling("b", 90)])
    assert plain.splitlines()[0] == "loss: a, b"
    assert "\x1b" not in plain
    assert "\x1b[36ma" in text_plot([falling("a"), falling("b", 90)], colour=True)


def test_the_png_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plots" / "loss.png"
    png_plot([falling("a", 10_000), falling("b")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
