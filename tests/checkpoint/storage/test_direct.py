"""Files written past the page cache hold exactly the bytes given, whatever their lengths and alignment."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.storage import store
from keepstep.checkpoint.storage.store import write_durable


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.one_of(st.integers(0, 9000), st.sampled_from([4096, 8192, 40960, 50001])), max_size=6))
def test_any_pieces_come_out_as_one_file(tmp_path: Path, lengths: list[int]) -> None:
    pieces = [bytes((index * 37 + number) % 251 for index in range(length)) for number, length in enumerate(lengths)]
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    write_durable(path, [memoryview(piece) for piece in pieces])
    assert path.read_bytes() == b"".join(pieces)


def test_pieces_longer_than_the_staging_buffer_come_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WRITE_BYTES", 8192)
    content = bytes(range(256)) * 200 + b"tail"
    write_durable(tmp_path / "file", [memoryview(content[:100]), memoryview(content[100:])])
    assert (tmp_path / "file").read_bytes() == content


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_durable(tmp_path / "file", [memoryview(b"new")])
    assert (tmp_path / "file").read_bytes() == b"old"
