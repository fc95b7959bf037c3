"""Every kind of damage is found, named, and either mended or fallen back from; none loads in silence."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol import commit, parity
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError
from keepstep.core.step_folders import MARKER
from tests.checkpoint.protocol import fuzz
from tests.checkpoint.support import example_state, load_step, same_tensors, write_step, zeroed

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Steps 1 and 2, each in three data files."""
    store = LocalStore(tmp_path)
    write_step(store, 1, example_state(1))
    write_step(store, 2, example_state(2))
    return store


def data_files(store: LocalStore, step: int) -> list[Path]:
    return sorted((store.root / f"step_{step:08d}").glob("rank*.safetensors"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def zero_fill(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)


def swap(store: LocalStore) -> None:
    first, second, _ = data_files(store, 2)
    first.rename(store.root / "aside")
    second.rename(first)
    (store.root / "aside").rename(second)


DAMAGES: dict[str, Callable[[LocalStore], None]] = {
    "flip": lambda store: flip(data_files(store, 2)[1]),
    "truncate": lambda store: os.truncate(data_files(store, 2)[1], 5000),
    "delete": lambda store: data_files(store, 2)[1].unlink(),
    "zero-fill": lambda store: zero_fill(data_files(store, 2)[1]),
    "swap": swap,
    "stale data": lambda store: shutil.copy(data_files(store, 1)[0], data_files(store, 2)[0]) and None,
    "stale marker": lambda store: (
        shutil.copy(store.root / "step_00000001" / MARKER, store.root / "step_00000002") and None
    ),
    "missing manifest": lambda store: next((store.root / "step_00000002").glob("manifest*")).unlink(),
    "flipped manifest": lambda store: flip(next((store.root / "step_00000002").glob("manifest*"))),
    "flipped marker": lambda store: flip(store.root / "step_00000002" / MARKER),
    "empty marker": lambda store: os.truncate(store.root / "step_00000002" / MARKER, 0),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_newest_whole_step_is_loaded_instead(store: LocalStore, name: str) -> None:
    DAMAGES[name](store)
    events: Events = []
    checkpointer = Checkpointer(store.root, CheckpointConfig(), lambda kind, facts: events.append((kind, facts)))
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    assert loaded is not None
    assert loaded.step == 1
    assert same_tensors(example_state(1), into)
    messages = [facts["message"] for kind, facts in events if facts.get("reason") == "checkpoint_damaged"]
    assert len(messages) == 1
    assert "step_00000002" in messages[0]


def test_a_step_without_a_marker_does_not_exist_and_is_no_damage(store: LocalStore) -> None:
    (store.root / "step_00000002" / MARKER).unlink()
    assert [step.step for step in commit.committed_steps(store)] == [1]
    assert list(commit.uncommitted_folders(store)) == ["step_00000002"]


@pytest.mark.slow
def test_hundreds_of_random_corruptions_load_identical_tensors_or_none(tmp_path: Path) -> None:
    counts = fuzz.run(300, seed=int(time.time()), folder=tmp_path)
    assert counts["silent"] == counts["unnamed"] == 0
    assert counts["named"] > 200


def test_checkpoints_made_without_xxhash_are_checked_as_well(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_step(store, 1, example_state(1), algorithm="crc32")
    into = zeroed(example_state(1))
    load_step(store, "step_00000001", into)
    assert same_tensors(example_state(1), into)
    flip(data_files(store, 1)[0])
    with pytest.raises(CheckpointError, match="damaged"):
        load_step(store, "step_00000001", into)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_cannot_name_a_file_outside_its_folder(store: LocalStore, name: str) -> None:
    from dataclasses import replace

    from keepstep.checkpoint.protocol.manifest import decode_manifest, encode_manifest

    manifest = commit.read_manifest(store, commit.read_step(store, "step_00000002"))
    hostile = replace(manifest, files=(replace(manifest.files[0], name=name), *manifest.files[1:]))
    with pytest.raises(CheckpointError, match="plain file name"):
        decode_manifest(encode_manifest(hostile), "manifest")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_parity_rebuilds_any_one_file_and_loading_does_so_by_itself(tmp_path: Path, victim: int) -> None:
    store = LocalStore(tmp_path)
    write_step(store, 1, example_state(1), with_parity=True)
    content = data_files(store, 1)[victim].read_bytes()
    data_files(store, 1)[victim].unlink()
    events: Events = []
    into = zeroed(example_state(1))
    loaded = Checkpointer(store.root, CheckpointConfig(), lambda *event: events.append(event)).load_newest(into)
    assert loaded is not None
    assert same_tensors(example_state(1), into)
    assert data_files(store, 1)[victim].read_bytes() == content
    assert [facts["reason"] for _, facts in events] == ["checkpoint_repaired"]


def test_two_damaged_files_of_one_group_are_beyond_repair_and_stay_untouched(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    step = write_step(store, 1, example_state(1), with_parity=True)
    first, second, _ = data_files(store, 1)
    flip(first)
    flip(second)
    before = first.read_bytes()
    with pytest.raises(CheckpointError, match="more than one file"):
        parity.repair(store, step)
    assert first.read_bytes() == before


def test_a_write_that_fails_half_way_is_an_event_and_the_last_good_step_stays(tmp_path: Path) -> None:
    write_step(LocalStore(tmp_path), 1, example_state(1))
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep=1), lambda *event: events.append(event))
    checkpointer.prepare(example_state(2))
    assert checkpointer._writer is not None
    # As under a quota: the writer's files may not grow past 40 kB.
    resource.prlimit(checkpointer._writer._process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
    checkpointer.save_async(2, example_state(2), {})
    checkpointer.before_update()
    checkpointer.wait()
    assert [facts.get("reason") for kind, facts in events] == [None, "checkpoint_failed"]
    into = zeroed(example_state(1))
    loaded = checkpointer.load_newest(into)
    checkpointer.close()
    assert loaded is not None
    assert loaded.step == 1


def test_a_full_disk_skips_the_save_with_a_clear_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event))
    checkpointer.save_async(1, example_state(1), {})
    assert [facts["reason"] for _, facts in events] == ["checkpoint_failed"]
    assert "1000 B free" in events[0][1]["message"]
    with pytest.raises(CheckpointError, match="free"):
        checkpointer.save(1, example_state(1), {})
    checkpointer.close()


def test_a_folder_that_cannot_be_written_is_an_event_and_training_goes_on() -> None:
    events: Events = []
    checkpointer = Checkpointer("/proc/keepstep", CheckpointConfig(), lambda *event: events.append(event))
    checkpointer.save_async(1, example_state(1), {})
    checkpointer.close()
    assert [facts["reason"] for _, facts in events] == ["checkpoint_failed"]


@pytest.mark.slow
def test_slow_storage_delays_the_next_save_visibly_instead_of_piling_up(tmp_path: Path) -> None:
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event))
    checkpointer.save(1, example_state(1), {})
    assert checkpointer._writer is not None
    writer = checkpointer._writer._process
    writer.send_signal(signal.SIGSTOP)
    checkpointer.save_async(2, example_state(2), {})
    checkpointer.before_update()
    pid = os.fork()
    if not pid:
        time.sleep(4)
        os.kill(writer.pid, signal.SIGCONT)
        os._exit(0)
    checkpointer.save_async(3, example_state(3), {})
    checkpointer.close()
    os.waitpid(pid, 0)
    delays = [facts for _, facts in events if facts.get("reason") == "checkpoint_delayed"]
    assert len(delays) == 1
    assert delays[0]["seconds"] > 0.2
    assert [facts["step"] for kind, facts in events if kind == "checkpoint_committed"] == [1, 2, 3]


def test_a_killed_writer_costs_one_save_and_the_next_gets_a_new_one(tmp_path: Path) -> None:
    events: Events = []
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), lambda *event: events.append(event))
    checkpointer.save(1, example_state(1), {})
    assert checkpointer._writer is not None
    checkpointer._writer._process.send_signal(signal.SIGSTOP)
    checkpointer.save_async(2, example_state(2), {})
    checkpointer._writer._process.kill()
    # A busy machine ends it a moment later, and the next save would still go to it.
    checkpointer._writer._process.wait()
    checkpointer.save_async(3, example_state(3), {})
    checkpointer.close()
    kinds = [(kind, facts["step"]) for kind, facts in events if kind != "checkpoint_started"]
    assert kinds == [("checkpoint_committed", 1), ("warning", 2), ("checkpoint_committed", 3)]


def test_what_is_saved_is_the_state_of_the_call_even_if_training_goes_on(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.full((1024, 1024), 1.0)}}
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep=0))
    for step in range(1, 6):
        checkpointer.save_async(step, state, {})
        checkpointer.before_update()
        state["model"]["weight"] += 1.0
    checkpointer.wait()
    for step in commit.committed_steps(LocalStore(tmp_path)):
        into = {"model": {"weight": torch.zeros(1024, 1024)}}
        checkpointer.load(step, into)
        assert torch.equal(into["model"]["weight"], torch.full((1024, 1024), float(step.step)))
    checkpointer.close()
