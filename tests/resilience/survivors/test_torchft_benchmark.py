"""The torchft part of `make survive`: what it measures, and what it says where torchft cannot be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import survive_torchft


def test_stall_is_the_longest_gap_beyond_the_usual_one() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 5.4, 5.5, 5.6]
    commits = [{"step": step, "time": at, "participants": 4} for step, at in enumerate(times)]
    assert survive_torchft._stall_s(commits, killed_at=0.35) == pytest.approx(5.0)


@pytest.mark.slow
def test_results_are_null_with_the_reason_where_there_is_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survive_torchft, "VERSION", "0.0.0.missing")
    result = survive_torchft.measure(tmp_path, kills=1, words=[])
    assert result["torchft_stall_s"] is result["torchft_tuned_stall_s"] is None
    assert "torchft==0.0.0" in result["torchft_why"]
