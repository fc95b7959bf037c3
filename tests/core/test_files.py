"""Files are whole or absent, whoever writes them at the same time."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keepstep.core.files import finished_in, is_vacant, write_atomic, write_once
from tests.patience import PATIENCE_S


def test_two_writers_with_one_process_id_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers on a shared disk: each has a process 1."""
    both_have_written = threading.Barrier(2)
    really = os.fsync

    def meet(handle: int) -> None:
        really(handle)
        if not os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112 - a link of the kernel's
            both_have_written.wait(PATIENCE_S)

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


def written_into(folder: Path) -> None:
    with finished_in(folder) as aside:
        aside.mkdir(parents=True)
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
            (aside / name).write_text("{}")


@pytest.mark.parametrize("cut_at", range(1, 5))
def test_an_export_that_is_killed_has_no_config_while_anything_is_missing(
    cut_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the order of names, one of those that a file system may list them in.
    listed, moves = Path.iterdir, 0
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path))))
    monkeypatch.setattr("keepstep.core.files.shutil.rmtree", lambda *_, **__: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    replace = Path.replace

    def killed(path: Path, target: Path) -> None:
        nonlocal moves
        moves += 1
        if moves == cut_at:
            raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written_into(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_an_export_that_is_interrupted_as_it_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", lambda _: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            written_into(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert is_vacant(tmp_path / "out")
    written_into(tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 4
