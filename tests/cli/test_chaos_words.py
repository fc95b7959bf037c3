"""What `keepstep chaos` says of faults that it could not play, and of numbers it cannot play with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.core.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT
from keepstep.launch import plays, rehearsal
from keepstep.launch.rehearsal import Outcome
from keepstep.launch.two_hosts import UnavailableError


def outcome(kind: str, passed: bool) -> Outcome:
    return Outcome(kind, kind, passed, None, None, None, loss_equal=True)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Faults by name: an outcome, or why it cannot be played here."""
    faults: dict[str, Any] = {}

    def play(_stage: object, made: Any, _wanted: object) -> Outcome:
        if isinstance(made, str):
            raise UnavailableError(made)
        chosen: Outcome = made
        return chosen

    monkeypatch.setattr(rehearsal, "undisturbed", lambda _stage: {})
    monkeypatch.setattr(rehearsal, "play", play)
    monkeypatch.setattr(plays, "choose", lambda *_: {kind: lambda made=made: made for kind, made in faults.items()})
    return faults


@pytest.mark.parametrize(
    ("faults", "words", "code"),
    [
        ({"nan": outcome("nan", True)}, [], EXIT_DONE),
        ({"nan": outcome("nan", True), "lost-host": "needs root"}, [], EXIT_DONE),
        ({"nan": outcome("nan", True), "lost-host": "needs root"}, ["--kinds", "nan,lost-host"], EXIT_PREFLIGHT),
        ({"nan": outcome("nan", False), "lost-host": "needs root"}, ["--kinds", "nan,lost-host"], EXIT_FAILED),
        ({"lost-host": "needs root"}, [], EXIT_PREFLIGHT),
    ],
)
def test_a_fault_that_could_not_be_played_is_told_and_is_no_pass(
    rehearsed: dict[str, Any],
    faults: dict[str, Any],
    words: list[str],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rehearsed |= faults
    words = ["chaos", "model=mpt-tiny", "data=synthetic", f"runs_dir={tmp_path}", *words]
    assert main([*words, "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is (code == EXIT_DONE)
    assert told["left_out"] == {kind: why for kind, why in faults.items() if isinstance(why, str)}
    assert main(words) == code
    out = capsys.readouterr().out
    assert ("not played: lost-host, needs root" in out) is ("lost-host" in faults)
    assert out.splitlines()[-1].startswith("passed") is (code == EXIT_DONE)


@pytest.mark.parametrize("word", ["--procs=0", "--random=-1", "--mtbf=0", "--timeout=0", "--steps=1"])
def test_numbers_that_no_rehearsal_can_have_are_mistakes(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "model=mpt-tiny", "data=synthetic", word]) == EXIT_CONFIG
    assert word.partition("=")[0] in capsys.readouterr().err
