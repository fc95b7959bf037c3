"""What `keepstep chaos` answers about scenarios that could not run, and about impossible numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.chaos import scenarios, verdict
from keepstep.chaos.experiment import Experiment, Outcome, Scenario, UnavailableError
from keepstep.cli.main import main
from keepstep.core.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREFLIGHT
from keepstep.resilience.fault_injection import ALL_RANKS, Fault, FaultInjector


def outcome(kind: str, passed: bool) -> Outcome:
    return Outcome(kind, kind, passed, None, None, None, loss_equal=True)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Faults by name: an outcome, or why the scenario cannot run here."""
    faults: dict[str, Any] = {}

    def try_scenario(_experiment: object, made: Any, _baseline: object) -> Outcome:
        if isinstance(made, str):
            raise UnavailableError(made)
        chosen: Outcome = made
        return chosen

    def choose_scenarios(*_: object) -> dict[str, Any]:
        return {kind: lambda made=made: made for kind, made in faults.items()}

    monkeypatch.setattr(verdict, "run_undisturbed", lambda _experiment: {})
    monkeypatch.setattr(verdict, "try_scenario", try_scenario)
    monkeypatch.setattr(scenarios, "choose_scenarios", choose_scenarios)
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
def test_report_counts_skipped_scenarios_as_no_pass(
    simulated: dict[str, Any],
    faults: dict[str, Any],
    words: list[str],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated |= faults
    words = ["chaos", "model=mpt-tiny", "data=synthetic", f"runs_dir={tmp_path}", *words]
    assert main([*words, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"] is (code == EXIT_DONE)
    assert answer["left_out"] == {kind: why for kind, why in faults.items() if isinstance(why, str)}
    assert main(words) == code
    out = capsys.readouterr().out
    assert ("skipped: lost-host, needs root" in out) is ("lost-host" in faults)
    assert out.splitlines()[-1].startswith("passed") is (code == EXIT_DONE)


@pytest.mark.parametrize("word", ["--procs=0", "--random=-1", "--mtbf=0", "--timeout=0", "--steps=1"])
def test_chaos_refuses_impossible_numbers(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "model=mpt-tiny", "data=synthetic", word]) == EXIT_CONFIG
    assert word.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "note"),
    [
        (["left", "joined"], ""),
        (["spare_lost", "spare_ready"], ""),
        (["left", "fault", "restart", "resume"], "the other replicas were restarted"),
        (["joined"], "nobody noticed"),
        (["left"], "the run ended before the lost replica was replaced: try more --steps"),
        (["left", "joined", "left"], "the run ended before the lost replica was replaced: try more --steps"),
    ],
)
def test_survivors_pass_without_a_restart_and_with_a_replacement(kinds: list[str], note: str, tmp_path: Path) -> None:
    experiment = Experiment([], tmp_path, 24, 3, 60.0)
    folder = experiment.run_folder("kill-replica").create()
    folder.metrics.write_text(json.dumps({"step": 1, "loss": 2.5, "time": 9.0}) + "\n")
    events = [{"kind": kind, "time": 11.0, "step": 1, "replica": 1} for kind in kinds]
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    scenario = Scenario("kill-replica", "", survivors=True)
    judged = verdict.judge(experiment, scenario, {1: 2.5}, (10.0, 0))
    assert (judged.passed, judged.note) == (not note, note)


@pytest.mark.slow
def test_wait_fault_holds_a_run_until_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sleep, slept_s = tmp_path / "back", time.sleep, list[float]()
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept_s.append(seconds), sleep(seconds)))
    wait = Fault("wait", 2, ALL_RANKS, {"file": str(file), "longest_s": 0.3})
    # In any process, also in one that was started again.
    for _ in range(2):
        injector, waited = FaultInjector([wait], tmp_path, 0), []
        for step in range(1, 7):
            if step == 6:
                file.touch()
            slept_s.clear()
            injector.after_step(step)
            waited.append(bool(slept_s))
        assert waited == [False, False, True, True, True, False]
        file.unlink()
