"""Saves that go wrong half way, and places that cannot be reached: the run hears of it, and no step is the worse."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol import commit, retention
from keepstep.checkpoint.storage.object_store import ObjectStore
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.cli import main as cli
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, ConfigError
from keepstep.core.step_folders import MARKER
from tests.checkpoint.support import example_state, load_step, same_tensors, write_step, zeroed

Events = list[tuple[str, dict[str, Any]]]


def test_a_step_whose_latest_cannot_be_written_is_committed_and_whole(tmp_path: Path) -> None:
    """The disk may fill up right after the marker: that must not take a file from a step that exists."""
    (tmp_path / "latest" / "in-the-way").mkdir(parents=True)
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event))
    checkpointer.save(1, example_state(1), {})
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    checkpointer.close()
    assert loaded is not None
    assert same_tensors(example_state(1), into)
    assert any("cleaning up after it failed" in facts.get("message", "") for _, facts in events)


class LostAnswer(LocalStore):
    """Does what it is asked, and the answer gets lost; whoever asks again hears that it is there already."""

    error = OSError("lost")

    def create(self, name: str, content: bytes, check: Callable[[], None] = lambda: None) -> None:
        super().create(name, content, check)
        if name.endswith(MARKER):
            raise self.error


@pytest.mark.parametrize("error", [FileExistsError("there already"), OSError("timed out")])
def test_a_marker_whose_answer_was_lost_counts(tmp_path: Path, error: OSError) -> None:
    store = LostAnswer(tmp_path)
    store.error = error
    write_step(store, 1, example_state(1))
    into = zeroed(example_state(1))
    load_step(store, "step_00000001", into)
    assert same_tensors(example_state(1), into)


def test_gc_spares_a_step_that_is_committed_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for step in (1, 2):
        write_step(store, step, example_state(step))
    marker, aside = tmp_path / "step_00000002" / MARKER, tmp_path / "aside"
    marker.rename(aside)
    real = retention.apply

    def slowly(*words: Any) -> list[str]:
        aside.rename(marker)
        return real(*words)

    monkeypatch.setattr(retention, "apply", slowly)
    assert cli.main(["ckpt", "gc", str(tmp_path), "--keep", "1", "--yes"]) == 0
    assert [step.step for step in commit.committed_steps(store)] == [2]


def test_a_reader_whose_step_is_retired_under_it_takes_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `keep: 1` a live run removes a step right after the next commit, wherever a reader stands just then."""
    store = LocalStore(tmp_path)
    write_step(store, 1, example_state(1))
    real = commit.read_manifest

    def overtaken(*words: Any) -> Any:
        if store.names() == ["latest", "step_00000001"]:
            write_step(store, 2, example_state(2))
            retention.remove_step(store, "step_00000001")
        return real(*words)

    monkeypatch.setattr(commit, "read_manifest", overtaken)
    events: Events = []
    into = zeroed(example_state(2))
    loaded = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event)).load_newest(into)
    assert loaded is not None
    assert loaded.step == 2
    assert same_tensors(example_state(2), into)
    assert events == [], "nothing is damaged"


class BrokenLibrary:
    """A store's library whose errors are its own, as botocore's are."""

    def __getattr__(self, name: str) -> Any:
        def fail(*words: Any, **named: Any) -> Any:
            raise RuntimeError("Could not connect to the endpoint URL")

        return fail


@pytest.fixture
def unreachable(tmp_path: Path) -> Checkpointer:
    checkpointer = Checkpointer(f"memory://{tmp_path.name}", CheckpointConfig())
    assert isinstance(checkpointer._store, ObjectStore)
    checkpointer._store._files = BrokenLibrary()
    return checkpointer


def test_a_store_that_cannot_be_reached_fails_the_save_and_not_the_run(unreachable: Checkpointer) -> None:
    events: Events = []
    unreachable._on_event = lambda *event: events.append(event)
    unreachable.save_async(1, example_state(1), {})
    unreachable.wait()
    unreachable.close()
    kind, facts = events[-1]
    assert (kind, facts["reason"]) == ("warning", "checkpoint_failed")
    assert "Could not connect" in facts["message"]


def test_a_store_that_cannot_be_reached_is_named_with_a_remedy_at_the_start(unreachable: Checkpointer) -> None:
    with pytest.raises(CheckpointError, match=r"memory://.*Could not connect") as caught:
        unreachable.find()
    assert caught.value.hint


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_leaves_no_files_of_the_others(tmp_path: Path) -> None:
    """Their room would be missing for every later save."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.async_save.one_fails", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == ["step_00000002"]


def test_a_place_that_no_save_can_go_to_is_refused_before_training(tmp_path: Path, unreachable: Checkpointer) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match=r"checkpoint\.folder .* cannot be written") as caught:
            Checkpointer(place, CheckpointConfig()).check_place()
        assert "name a folder" in (caught.value.hint or "")
    Checkpointer(tmp_path / "new" / "folder", CheckpointConfig()).check_place()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    # A store that is away may come back before the first save.
    unreachable.check_place()


@pytest.mark.parametrize("asked", ["size", "read_into", "read"])
@pytest.mark.parametrize(
    ("error", "failures", "step", "waits_s"),
    [
        (OSError(errno.EIO, "input/output error"), 2, 2, [1.0, 5.0]),
        (TimeoutError("timed out"), 2, 2, [1.0, 5.0]),
        (OSError(errno.EIO, "input/output error"), 99, 1, [1.0, 5.0, 20.0]),
        (PermissionError(errno.EACCES, "permission denied"), 99, 1, []),
    ],
)
def test_a_storage_that_hiccups_costs_no_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    error: OSError,
    failures: int,
    step: int,
    waits_s: list[float],
) -> None:
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event))
    for number in (1, 2):
        checkpointer.save(number, example_state(number), {})
    plain, left, slept = getattr(LocalStore, asked), [failures], []

    def failing(store: LocalStore, name: str, *more: Any) -> Any:
        # Markers are looked at in another way, which does not pass over what it cannot read.
        if name.startswith("step_00000002/") and not name.endswith(MARKER) and left[0] > 0:
            left[0] -= 1
            raise error
        return plain(store, name, *more)

    monkeypatch.setattr(LocalStore, asked, failing)
    monkeypatch.setattr("keepstep.checkpoint.loader.time.sleep", slept.append)
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    checkpointer.close()
    assert loaded is not None
    assert loaded.step == step
    assert same_tensors(example_state(step), into)
    assert slept == waits_s
    reasons = [facts["reason"] for kind, facts in events if kind == "warning"]
    assert reasons == ["checkpoint_unreadable"] * len(waits_s) + ["checkpoint_damaged"] * (step == 1)
