"""Files are whole or absent, whoever writes them at the same time."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.core.files import write_atomic, write_once


def test_two_writers_with_one_process_id_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers on a shared disk: each has a process 1."""
    both_have_written = threading.Barrier(2)
    really = os.fsync

    def meet(handle: int) -> None:
        really(handle)
        if not os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112 - a link of the kernel's
            both_have_written.wait(60)

    monkeypatch.setattr(os, "fsync", meet)
    path = tmp_path / "plan.json"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda text: write_atomic(path, text), ["a" * 10, "b" * 20]))
    assert path.read_text() in ("a" * 10, "b" * 20)
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_who_write_a_file_once_one_does(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda number: write_once(path, str(number)), range(64)))
    assert [path.read_text()] == [str(number) for number, did in enumerate(wrote) if did]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "plan.json", "a")
    assert list(tmp_path.iterdir()) == []
