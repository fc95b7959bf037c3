"""The lease of a run folder: exactly one holder, numbers that rise, and no commit by a former holder."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.checkpoint.protocol import commit, lease
from keepstep.checkpoint.protocol.lease import Candidate, Fence, Holder, Lease, Leases, this_process
from keepstep.checkpoint.protocol.manifest import Manifest, decode_manifest, encode_manifest
from keepstep.checkpoint.storage.store import LocalStore
from keepstep.core import proc
from keepstep.core.errors import CheckpointError, RunTakenError, StopRequested
from tests.patience import PATIENCE_S

LEASE_S = 30.0


def elsewhere(host: str = "far", lease_s: float = LEASE_S) -> Holder:
    """A process of another machine: nothing but its heartbeats tells whether it lives."""
    return replace(this_process("job", lease_s), host=host, boot=f"boot of {host}")


def take(place: Path, own: Holder | None = None, now_s: float = 0.0) -> Lease:
    taken = Candidate(str(place), own or elsewhere()).attempt(now_s)
    assert taken is not None
    return taken


def fence(*leases: Lease) -> Fence:
    return Fence(tuple(each.entry for each in leases))


def test_lease_is_taken_over_after_silence_on_the_observers_clock(tmp_path: Path) -> None:
    first = take(tmp_path)
    # Whatever its clock shows at the start, only differences count.
    for start_s in (0.0, -1e6, 1e9):
        observer = Candidate(str(tmp_path), elsewhere("other"))
        assert observer.attempt(start_s) is None
        assert observer.attempt(start_s + LEASE_S - 0.1) is None
        first.beat()
        assert observer.attempt(start_s + LEASE_S) is None, "a heartbeat starts the time anew"
        assert observer.attempt(start_s + 2 * LEASE_S - 0.1) is None
    second = observer.attempt(start_s + 2 * LEASE_S)
    assert second is not None
    assert second.contested
    assert second.number == first.number + 1
    with pytest.raises(RunTakenError, match=r"process \d+ on other has taken over"):
        fence(first).check()
    fence(second).check()


@pytest.mark.parametrize(("launch", "taken"), [("job", True), ("another", False)])
def test_replica_does_not_wait_for_one_that_the_others_evicted(tmp_path: Path, launch: str, taken: bool) -> None:
    evicted = take(tmp_path)
    own = replace(elsewhere("other"), launch=launch)
    lease = Candidate(str(tmp_path), own, evicts_own=True).attempt(0.0)
    assert (lease is not None and lease.contested) is taken
    if taken:
        with pytest.raises(RunTakenError):
            fence(evicted).check()


@pytest.mark.parametrize(("launch", "resumes"), [("job", True), ("another", False)])
def test_full_disk_does_not_keep_a_launcher_from_replacing_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, resumes: bool
) -> None:
    ended = take(tmp_path)
    ended.release()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LocalStore, "create", refuse)
    if not resumes:
        with pytest.raises(OSError, match="No space"):
            take(tmp_path, this_process(launch, LEASE_S))
        return
    successor = take(tmp_path, this_process(launch, LEASE_S))
    fence(successor).check()
    with pytest.raises(RunTakenError):
        fence(ended).check()


def test_wall_clock_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(tmp_path)
    observer = Candidate(str(tmp_path), elsewhere("other"))
    assert observer.attempt(0.0) is None
    for jump_s in (-1e8, 1e8):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 1.8e9 + jump_s)
        first.beat()
        os.utime(tmp_path / "lease" / "0000000001", (1.8e9 + jump_s, 1.8e9 + jump_s))
        assert observer.attempt(1.0) is None
    assert first.lost is None


def test_live_holder_is_named_with_exit_code_5(tmp_path: Path) -> None:
    first = take(tmp_path, elsewhere("node-7"))
    observer = Candidate(str(tmp_path), elsewhere("other"))
    for now_s in range(int(2 * LEASE_S)):
        assert observer.attempt(float(now_s)) is None
        first.beat()
    with pytest.raises(RunTakenError, match=rf"process {os.getpid()} on node-7 trains in .* already") as caught:
        observer.attempt(2 * LEASE_S)
    assert caught.value.exit_code == 5
    assert caught.value.hint is not None


def test_released_lease_is_free_at_once(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        with Leases(elsewhere(), lambda: False, print) as leases:
            leases.hold(tmp_path)
            numbers.append(leases.fence.number)
            assert not leases.contested
    assert numbers == [1, 2, 3]
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["0000000003"]


def test_dead_holder_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        status = proc.status(process.pid)
        assert status is not None
        own = this_process("job", LEASE_S)
        take(tmp_path, replace(own, pid=process.pid, start_ticks=status.start_ticks))
        observer = Candidate(str(tmp_path), own)
        assert observer.attempt(0.0) is None
        process.kill()
        # Killed, but not waited for: it is as dead.
        deadline = time.monotonic() + PATIENCE_S
        while (second := observer.attempt(0.0)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert second is not None
    assert not second.contested
    # Another process has its number meanwhile.
    take(tmp_path / "b", replace(own, start_ticks=own.start_ticks + 1))
    assert take(tmp_path / "b", own).number == 2
    # The same number on another machine, or in another container, says nothing.
    take(tmp_path / "c", replace(elsewhere(), pid=2**22 + 1))
    assert Candidate(str(tmp_path / "c"), own).attempt(0.0) is None


def test_wait_is_announced_and_ends_on_a_stop_request(tmp_path: Path) -> None:
    take(tmp_path, elsewhere("node-7"))
    notes: list[str] = []
    with Leases(elsewhere("other"), lambda: True, notes.append) as leases, pytest.raises(StopRequested):
        leases.hold(tmp_path)
    assert len(notes) == 1
    assert "node-7 trains in" in notes[0]
    assert "30 s without a sign of life" in notes[0]


@pytest.mark.parametrize("paused", ["before the check", "after the check"])
def test_paused_holder_cannot_commit_when_it_wakes_up(tmp_path: Path, paused: str) -> None:
    """Wherever it was paused, it wakes up to the check or to a folder that its successor has removed."""
    store = LocalStore(tmp_path / "checkpoints")
    first = take(tmp_path)
    attempt = commit.new_attempt(store, 1, 0, 1)
    manifest = Manifest(1, 1, 0.0, 0, attempt.algorithm, (), {}, {}, {}, {})

    class Pause(Fence):
        def check(self) -> None:
            if paused == "after the check":
                super().check()
            observer = Candidate(str(tmp_path), elsewhere("other"))
            assert observer.attempt(0.0) is None
            second = observer.attempt(LEASE_S)
            assert second is not None
            assert second.contested
            for name in commit.uncommitted_folders(store):
                commit.remove_uncommitted(store, name)
            if paused == "before the check":
                super().check()

    with pytest.raises((RunTakenError, FileNotFoundError)):
        commit.publish(store, attempt, manifest, fence=Pause(fence(first).leases))
    assert commit.committed_steps(store) == []


def test_commit_carries_the_fencing_number(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "checkpoints")
    take(tmp_path).release()
    attempt = commit.new_attempt(store, 1, 0, 1)
    manifest = Manifest(1, 1, 0.0, 0, attempt.algorithm, (), {}, {}, {}, {})
    step = commit.publish(store, attempt, manifest, fence=fence(take(tmp_path)))
    assert commit.read_manifest(store, step).fence == 2
    # Checkpoints from before there were leases have none.
    old = json.loads(encode_manifest(manifest))
    del old["fence"]
    assert decode_manifest(json.dumps(old).encode(), "old").fence == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"pid": 1}', b"\xff" * 99, b"[" * 100_000])
def test_damaged_lease_expires_like_any_other(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    store.create("lease/0000000041", content)
    observer = Candidate(str(tmp_path), elsewhere())
    assert observer.attempt(0.0) is None
    taken = observer.attempt(LEASE_S)
    assert taken is not None
    assert taken.number == 42


def test_removed_lease_ends_the_run(tmp_path: Path) -> None:
    first = take(tmp_path)
    (tmp_path / "lease" / "0000000001").unlink()
    first.beat()
    assert first.lost is not None
    assert "is gone from" in first.lost.message


def test_heartbeat_outlives_storage_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "names", _fail)
        first.beat()
    assert first.lost is None
    first.beat()
    fence(first).check()
    monkeypatch.setattr(LocalStore, "create", _fail)
    with pytest.raises(CheckpointError, match="cannot be leased: Input/output error"):
        Leases(elsewhere(), lambda: False, print).hold(tmp_path / "other")


def _fail(*_: object) -> list[str]:
    raise OSError(5, "Input/output error")


def test_lease_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    _race(tmp_path)


def test_lease_in_an_object_store_is_a_conditional_put(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    first = Candidate(place, elsewhere()).attempt(0.0)
    assert first is not None
    observer = Candidate(place, elsewhere("other"))
    assert observer.attempt(0.0) is None
    first.beat()
    assert observer.attempt(LEASE_S) is None
    second = observer.attempt(2 * LEASE_S)
    assert second is not None
    with pytest.raises(RunTakenError):
        fence(first).check()


def test_one_of_many_starts_gets_the_lease(tmp_path: Path) -> None:
    _race(tmp_path)


def _race(place: Path) -> None:
    """Many processes, as threads, want one folder at the same moment."""
    ready = threading.Barrier(8)
    got: list[Lease] = []

    def want(number: int) -> None:
        candidate = Candidate(str(place), elsewhere(f"host-{number}"))
        ready.wait(PATIENCE_S)
        found = candidate.attempt(0.0)
        if found is not None:
            got.append(found)

    _run_threads([lambda number=number: want(number) for number in range(8)])  # type: ignore[misc]
    assert [each.number for each in got] == [1]
    fence(*got).check()


def _run_threads(targets: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures


@pytest.mark.parametrize("seed", range(8))
def test_numbers_rise_and_only_the_newest_commits(tmp_path: Path, seed: int) -> None:
    """Two machines with clocks of their own take, lose, pause and release in a random order."""
    chance = random.Random(seed)
    clocks = [0.0, 1e6]
    candidates = [Candidate(str(tmp_path), elsewhere(f"host-{number}")) for number in range(2)]
    held: list[Lease | None] = [None, None]
    numbers: list[int] = []
    for _ in range(300):
        me = chance.randrange(2)
        clocks[me] += chance.choice((0.1, 1.0, LEASE_S))
        mine = held[me]
        match chance.choice(("want", "want", "beat", "commit", "release")):
            case "want" if mine is None:
                try:
                    held[me] = candidates[me].attempt(clocks[me])
                except RunTakenError:
                    candidates[me] = Candidate(str(tmp_path), elsewhere(f"host-{me}"))
                if (found := held[me]) is not None:
                    numbers.append(found.number)
            case "beat" if mine is not None:
                mine.beat()
            case "commit" if mine is not None:
                if mine.number == numbers[-1]:
                    fence(mine).check()
                else:
                    with pytest.raises(RunTakenError):
                        fence(mine).check()
            case "release" if mine is not None:
                mine.release()
                held[me], candidates[me] = None, Candidate(str(tmp_path), elsewhere(f"host-{me}"))
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 10


@pytest.mark.parametrize("seed", range(3))
def test_threads_with_random_pauses_never_hold_one_number(tmp_path: Path, seed: int) -> None:
    numbers: list[int] = []

    def work(name: str) -> None:
        chance = random.Random(f"{seed} {name}")
        for _ in range(30):
            candidate = Candidate(str(tmp_path), elsewhere(name))
            found = candidate.attempt(0.0) or candidate.attempt(LEASE_S)
            if found is not None:
                numbers.append(found.number)
                time.sleep(chance.random() * 0.002)
                found.beat()
                if found.lost is None and chance.random() < 0.5:
                    found.release()

    _run_threads([lambda: work("a"), lambda: work("b")])
    assert sorted(numbers) == sorted(set(numbers)), "one number, one holder"
    assert lease.newest(LocalStore(tmp_path))[0] == max(numbers)


def test_record_keeps_its_length_and_names_the_process() -> None:
    own = this_process("job", LEASE_S)
    assert len(own.encode()) == len(replace(own, heartbeat=10**9, state="released").encode()) == lease.RECORD_BYTES
    assert lease.decode(own.encode()) == own
    assert (own.host, own.pid) == (socket.gethostname()[:64], os.getpid())
