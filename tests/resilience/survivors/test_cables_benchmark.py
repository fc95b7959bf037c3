"""The part of `make survive` that pulls cables: what it says where that is not possible."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import survive_cables


def test_results_are_null_with_the_reason_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    results = survive_cables.pull(tmp_path, pulls=1, words=[])
    assert results.pop("cables_left_out").startswith("network namespaces need root")
    assert set(results) == set(survive_cables.RESULTS)
    assert not any(results.values())
