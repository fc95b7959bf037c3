from pathlib import Path

import numpy as np
import pytest

from keepstep.observe.plot import Curve, draw_figure, png_plot, text_plot


def falling(name: str = "run", count: int = 500) -> Curve:
    steps = np.arange(1, count + 1)
    return Curve(name, steps.tolist(), (2 + 8 / np.sqrt(steps)).tolist())


@pytest.mark.parametrize("width", [30, 80, 200])
def test_text_plot_fits_its_width_and_labels_its_axes(width: int) -> None:
    text = text_plot([falling()], width, 10)
    lines = text.splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= width
    assert lines[0] == "loss: run"
    assert lines[1].lstrip().startswith("10 ┤")
    assert "step 500" in lines[-1]


def test_text_plot_draws_a_falling_curve() -> None:
    field = [
        line.partition("┤")[2] or line.partition("│")[2] for line in text_plot([falling()], 60, 8).splitlines()[1:9]
    ]
    assert field[0][0] != " "
    assert field[-1].rstrip()[-1] != " "
    assert len(field[-1].rstrip()) > len(field[0].rstrip())


def test_text_plot_keeps_a_single_spike() -> None:
    values = [1.0] * 100_000
    values[54_321] = 50.0
    text = text_plot([Curve("", list(range(100_000)), values)], 80, 10)
    assert text.splitlines()[1].partition("┤")[2].strip()


def test_text_plot_accepts_gaps_constants_and_nothing() -> None:
    assert text_plot([Curve("a", [], [])]) == "loss: no values yet"
    assert text_plot([Curve("a", [1, 2, 3], [float("nan")] * 3)]) == "loss: no values yet"
    assert "┤" in text_plot([Curve("a", [1], [0.0])])
    assert "┤" in text_plot([Curve("a", [1, 2, 3], [1.0, float("nan"), float("inf")])])


def test_text_plot_names_and_colours_several_runs() -> None:
    plain = text_plot([falling("a"), falling("b", 90)])
    assert plain.splitlines()[0] == "loss: a, b"
    assert "\x1b" not in plain
    assert "\x1b[36ma" in text_plot([falling("a"), falling("b", 90)], colour=True)


def test_png_plot_writes_an_image(tmp_path: Path) -> None:
    path = tmp_path / "plots" / "loss.png"
    png_plot([falling("a", 10_000), falling("b")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_figure_draws_raw_values_and_labels_smoothed_ones() -> None:
    steps, jumping = list(range(1, 41)), [1.0, 3.0] * 20
    curves = [Curve("training", steps, jumping, smooth_weight=0.9), Curve("validation", [20, 40], [2.5, 1.5])]
    raw, smoothed, validation = draw_figure(curves).axes[0].get_lines()
    assert list(raw.get_ydata()) == jumping
    assert smoothed.get_label() == "training, smoothed 0.9"
    assert 1.8 < smoothed.get_ydata()[-1] < 2.2
    assert (validation.get_label(), validation.get_marker()) == ("validation", ".")
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([20, 40], [2.5, 1.5])


def test_figure_keeps_raw_values_of_a_curve_that_is_not_smoothed() -> None:
    lr = [step * 1e-5 for step in range(1, 101)]
    (line,) = draw_figure([Curve("", list(range(1, 101)), lr)]).axes[0].get_lines()
    assert list(line.get_ydata()) == pytest.approx(lr)
    assert line.get_xdata()[-1] == 100, "nothing beyond the last step"
