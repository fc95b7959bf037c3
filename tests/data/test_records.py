"""Pieces of a file share no line and lose none, wherever it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.errors import DataError
from keepstep.data import records
from keepstep.data.records import RecordOptions, Rejects, read_documents
from keepstep.data.sources import Piece, SourceFile, cut_tasks, kind_of

quiet = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(texts=st.lists(st.text(min_size=1, max_size=40), max_size=30), size=st.integers(1, 400), end=st.booleans())
@quiet
def test_any_cut_gives_every_line_once(tmp_path: Path, texts: list[str], size: int, end: bool) -> None:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines) + ("\n" if end and lines else ""))
    file = SourceFile(str(path), path.stat().st_size, "jsonl", "")
    rejects = Rejects()
    found: list[str] = []
    for pieces in cut_tasks([file], size):
        for piece in pieces:
            for batch in read_documents(piece, RecordOptions(), rejects):
                found += batch
    # A lone surrogate cannot be UTF-8, so such a line is rejected, not changed.
    assert found == [text for text in texts if not any("\ud800" <= one <= "\udfff" for one in text)]


@given(
    lines=st.lists(
        st.sampled_from([b"", b" ", b"{", b'{"text": "\xff"}', b'{"text": 1}'])
        | st.text(max_size=40).map(
            lambda text: json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace")
        ),
        max_size=20,
    ),
    block=st.integers(1, 90),
)
@quiet
def test_the_size_of_a_read_changes_neither_documents_nor_rejects(
    tmp_path: Path, lines: list[bytes], block: int
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))

    def read() -> tuple[list[str], Rejects]:
        rejects = Rejects()
        piece = Piece(str(path), "jsonl", "", 0, path.stat().st_size)
        return [text for batch in read_documents(piece, RecordOptions(), rejects) for text in batch], rejects

    whole = read()
    with mock.patch.object(records, "BLOCK_BYTES", block):
        assert read() == whole


@given(raw=st.binary(max_size=400), kind=st.sampled_from([".gz", ".zst", ""]))
@quiet
def test_any_bytes_are_documents_rejects_or_one_clear_error(tmp_path: Path, raw: bytes, kind: str) -> None:
    path = tmp_path / f"in.jsonl{kind}"
    path.write_bytes(raw)
    rejects = Rejects()
    try:
        for batch in read_documents(Piece(str(path), "jsonl", kind, 0, len(raw)), RecordOptions(), rejects):
            assert all(isinstance(text, str) and text for text in batch)
    except DataError as error:
        assert path.name in error.message


@given(raw=st.binary(max_size=300))
@quiet
def test_any_bytes_called_parquet_are_a_clear_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(raw)
    try:
        list(read_documents(Piece(str(path), "parquet", "", 0, -1), RecordOptions(), Rejects()))
    except DataError as error:
        assert path.name in error.message


def test_kinds_are_known_by_name() -> None:
    assert kind_of("a/b.jsonl.zst") == ("jsonl", ".zst")
    assert kind_of("c4-train.00000-of-01024.json.gz") == ("jsonl", ".gz")
    assert kind_of("x.parquet") == ("parquet", "")
    assert kind_of("x.html") is None
