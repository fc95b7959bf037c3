"""The picture that the page's own chart.js draws, read from its elements without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.doc_blocks import ROOT
from tests.patience import PATIENCE_S

STATIC = ROOT / "src" / "keepstep" / "observe" / "page" / "static"
OUTLINE = float(re.findall(r"\.mark {.*stroke-width: ([\d.]+)", (STATIC / "style.css").read_text())[0])
DOCUMENT = """
class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], style: {} }); }
  get clientWidth() { return 600; }
  get clientHeight() { return 240; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener() {}
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
}
const document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
class ResizeObserver { observe() {} }
"""
DRAW = """
const chart = new Chart({ key: "loss", title: "Loss", format: String }, {});
chart.show(SERIES, null, []);
const found = [];
const walk = ({ tag, attributes, children }) => { found.push({ tag, ...attributes }); children.forEach(walk); };
walk(chart.plot);
console.log(JSON.stringify(found));
"""


def drawn(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every element of the drawn chart with its attributes."""
    if shutil.which("node") is None:
        pytest.skip("needs node to run the page's script")
    script = DOCUMENT + (STATIC / "format.js").read_text() + (STATIC / "chart.js").read_text()
    script += DRAW.replace("SERIES", json.dumps(series))
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    elements: list[dict[str, Any]] = json.loads(done.stdout)
    return elements


def values(steps: list[int], raw: list[float]) -> dict[str, Any]:
    return {"steps": steps, "low": raw, "high": raw, "raw": raw, "smooth": raw}


def test_chart_shows_all_of_the_first_and_last_validation_marker() -> None:
    training = {"name": "training", "tone": "t0", "data": values([0, 50, 100], [4.0, 3.0, 2.5])}
    validation = {"name": "validation", "tone": "t1", "points": True, "data": values([0, 100], [4.1, 2.4])}
    elements = drawn([training, validation])
    marks = [element for element in elements if element["tag"] == "circle"]
    (clip,) = [element for element in elements if element["tag"] == "rect" and "class" not in element]
    left, right = clip["x"], clip["x"] + clip["width"]
    assert len(marks) == 2
    for mark in marks:
        radius = mark["r"] + OUTLINE / 2
        assert left <= mark["cx"] - radius
        assert mark["cx"] + radius <= right
        assert clip["y"] <= mark["cy"] - radius
        assert mark["cy"] + radius <= clip["y"] + clip["height"]
    assert right <= 600
