"""Scratch folders of agents: removed at the end, or by the next agent."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from keepstep.resilience import scratch
from keepstep.resilience.scratch import register_companion, scratch_folder


def test_scratch_of_a_killed_agent_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "keepstep-agent-dead"
    left.mkdir()
    (left / "lock").touch()
    with scratch_folder() as first:
        assert not left.exists()
        with scratch_folder() as second:
            assert first.is_dir(), "its agent lives"
            assert second != first
    assert not list(tmp_path.iterdir())


def test_fork_server_folder_of_a_killed_agent_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    kept, gone = tmp_path / "precious", tmp_path / "tmp" / "pymp-1"
    for number, folder in enumerate((kept, gone)):
        folder.mkdir(parents=True)
        left = tmp_path / "tmp" / f"keepstep-agent-{number}"
        left.mkdir(parents=True)
        (left / "lock").touch()
        register_companion(left, folder)
    with scratch_folder():
        assert kept.exists()
        assert not gone.exists()


def test_scratch_survives_a_concurrent_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def lock_after_another_has_swept(file: object, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(1)
            scratch._sweep(Path(tempfile.gettempdir()))
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", lock_after_another_has_swept)
    with scratch.scratch_folder() as folder:
        (folder / "cause-0.json").write_text("{}")
