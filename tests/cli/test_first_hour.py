"""A newcomer's path, offline, from own text to a chat and a report: the commands of docs/first-hour.md."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from tests.doc_blocks import ROOT, commands


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_first_hour", ROOT / "scripts" / "record_first_hour.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(shown: Iterable[str]) -> list[str]:
    """The commands of a recording, without the words that make a run short."""
    return [text[2:].partition(" max_duration")[0].strip() for text in shown if text.startswith("$ ")]


@pytest.mark.slow
def test_first_hour_commands_lead_from_text_to_a_report(
    recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Nothing may be downloaded on the way.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    events = recorder.record(tmp_path, steps=4)
    shown = "".join(text for _, text in events)
    assert typed(text for _, text in events) == commands("docs/first-hour.md")
    assert "verdict: fits" in shown
    assert "validation loss" in shown
    assert "done: runs/my-model" in shown
    answers = [json.loads(text)["answer"] for _, text in events if text.startswith('{"answer"')]
    assert len(answers) == len(recorder.PROMPTS.splitlines())
    assert all(answers)
    assert "my-model  finished  4/4" in shown
    report = (tmp_path / "my-model.html").read_text()
    assert "my-model" in report
    assert '<img alt="Loss by step"' in report
    header, *lines = recorder.cast(events).splitlines()
    assert json.loads(header)["version"] == 2
    assert [json.loads(line)[1] for line in lines] == ["o"] * len(events)


def test_first_hour_picture_shows_the_commands_of_the_page() -> None:
    """`make pictures` records it again."""
    lines = (ROOT / "docs" / "pictures" / "first-hour.cast").read_text().splitlines()[1:]
    assert typed(json.loads(line)[2] for line in lines) == commands("docs/first-hour.md"), "run make pictures"
    assert "first-hour.svg" in (ROOT / "docs" / "first-hour.md").read_text()
    picture = (ROOT / "docs" / "pictures" / "first-hour.svg").read_text()
    assert "keepstep report my-model" in picture
