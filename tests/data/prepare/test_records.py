"""Pieces of a file share no line and lose none, wherever it is cut."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from unittest import mock

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.errors import DataError
from keepstep.data.prepare import parquet_rows, records
from keepstep.data.prepare.records import RecordOptions, Rejects, read_documents
from keepstep.data.prepare.sources import Piece, SourceFile, kind_of, split_tasks

quiet = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(texts=st.lists(st.text(min_size=1, max_size=40), max_size=30), size=st.integers(1, 400), end=st.booleans())
@quiet
def test_any_cut_gives_every_line_once(tmp_path: Path, texts: list[str], size: int, end: bool) -> None:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines) + ("\n" if end and lines else ""))
    file = SourceFile(str(path), path.stat().st_size, "jsonl", "")
    rejects = Rejects()
    found: list[str] = []
    for pieces in split_tasks([file], size):
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


def documents_of(piece: Piece, rejects: Rejects | None = None) -> list[str]:
    return [text for batch in read_documents(piece, RecordOptions(), rejects or Rejects()) for text in batch]


def test_a_file_that_became_shorter_is_an_error_and_not_an_endless_wait(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 100)
    size = path.stat().st_size
    path.write_text('{"text": "a"}\n' * 10)
    for first, last in ((0, size), (size // 2, size)):
        with pytest.raises(DataError, match="became shorter"):
            documents_of(Piece(str(path), "jsonl", "", first, last))


@pytest.mark.parametrize("checksum", [False, True])
def test_a_zstd_file_cut_anywhere_is_an_error(tmp_path: Path, checksum: bool) -> None:
    generator = random.Random(1)
    lines = [json.dumps({"text": f"{generator.random()}" * 20 + "a" * number}) for number in range(400)]
    lines.append(json.dumps({"text": "a" * 500_000}))
    compressor = zstandard.ZstdCompressor(write_checksum=checksum)
    first, second = ("\n".join(part).encode() + b"\n" for part in (lines[:200], lines[200:]))
    skipped = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    chunks = compressor.compressobj()
    # One frame that knows its size, one to be skipped, one that was streamed and does not know it.
    frames = [compressor.compress(first), skipped, chunks.compress(second) + chunks.flush()]
    raw = b"".join(frames)
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(raw)
    piece = Piece(str(path), "jsonl", ".zst", 0, len(raw))
    assert documents_of(piece) == [json.loads(line)["text"] for line in lines]
    whole = {0, len(frames[0]), len(frames[0]) + len(frames[1])}
    edges = [*range(1, 60), *(place + near for place in sorted(whole) for near in (-4, -1, 1, 3, 4, 5, 12) if place)]
    cuts = [*edges, *generator.sample(range(len(raw)), 40), *(len(raw) - number for number in range(1, 12))]
    for cut in cuts:
        if cut in whole:
            continue
        path.write_bytes(raw[:cut])
        with pytest.raises(DataError, match=r"in\.jsonl\.zst (ends in the middle|cannot be unpacked)"):
            documents_of(piece)


@pytest.mark.parametrize("zeros", [1, 512, 1 << 20])
def test_zeros_behind_a_gzip_file_are_no_damage(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "in.jsonl.gz"
    two = b"".join(gzip.compress(b'{"text": "%s"}\n' % text) for text in (b"a", b"b"))
    path.write_bytes(two + bytes(zeros))
    piece = Piece(str(path), "jsonl", ".gz", 0, path.stat().st_size)
    assert documents_of(piece) == ["a", "b"]
    path.write_bytes(two + bytes(zeros) + b"garbage")
    with pytest.raises(DataError, match="cannot be unpacked"):
        documents_of(piece)


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_byte_order_mark_costs_no_document_and_is_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"text": "a"}' if name.endswith("jsonl") else "a", encoding="utf-8-sig")
    kind = kind_of(name)
    assert kind is not None
    rejects = Rejects()
    assert documents_of(Piece(str(path), *kind, 0, path.stat().st_size), rejects) == ["a"]
    assert rejects.total == 0


@given(raw=st.binary(max_size=300))
@quiet
def test_any_bytes_called_parquet_are_a_clear_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(raw)
    try:
        list(read_documents(Piece(str(path), "parquet", "", 0, -1), RecordOptions(), Rejects()))
    except DataError as error:
        assert path.name in error.message


@pytest.mark.slow
def test_rows_that_share_one_large_value_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "word " * (1 << 20)
    parquet.write_table(pyarrow.table({"text": [text] * 40}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    rejects, seen = Rejects(), 0
    piece = Piece(str(tmp_path / "x.parquet"), "parquet", "", 0, -1)
    for texts in read_documents(piece, RecordOptions(), rejects):
        assert sum(map(len, texts)) <= 1 << 26
        assert set(texts) == {text}
        seen += len(texts)
    assert seen == 40
    assert not rejects.total


@pytest.mark.parametrize("dictionary", [True, False])
def test_documents_of_all_lengths_come_whole_and_in_order_from_parquet(tmp_path: Path, dictionary: bool) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{number} " + "x" * (1 << number % 23) for number in range(120)]
    table = pyarrow.table({"other": texts, "text": texts})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=17, use_dictionary=dictionary)
    for start, stop in ((0, -1), (2, 5)):
        piece = Piece(str(tmp_path / "x.parquet"), "parquet", "", start, stop)
        found = [text for batch in read_documents(piece, RecordOptions(), Rejects()) for text in batch]
        assert found == texts[17 * start : None if stop < 0 else 17 * stop]


def test_a_parquet_file_that_unpacks_to_absurd_amounts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_rows, "_BOMB_BYTES", 1 << 24)
    table = pyarrow.table({"text": [str(number) + "a" * (1 << 20) for number in range(40)]})
    parquet.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"packs 40\.0 MiB of 'text'") as caught:
        list(read_documents(Piece(str(tmp_path / "x.parquet"), "parquet", "", 0, -1), RecordOptions(), Rejects()))
    assert "leave the file out" in caught.value.hint


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_end_of_a_line_is_no_part_of_its_document(tmp_path: Path, end: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(end.join(["one", "", "two \r three", "four"]).encode())
    piece = Piece(str(path), "text", "", 0, path.stat().st_size)
    found = list(read_documents(piece, RecordOptions(lines=True), Rejects()))
    assert [text for batch in found for text in batch] == ["one", "two \r three", "four"]


def test_kinds_are_known_by_name() -> None:
    assert kind_of("a/b.jsonl.zst") == ("jsonl", ".zst")
    assert kind_of("c4-train.00000-of-01024.json.gz") == ("jsonl", ".gz")
    assert kind_of("x.parquet") == ("parquet", "")
    assert kind_of("x.html") is None


def read_all(path: Path, text_field: str = "text") -> tuple[list[str], Rejects]:
    known, rejects = kind_of(path.name), Rejects()
    assert known is not None
    piece = Piece(str(path), known[0], known[1], 0, -1)
    batches = read_documents(piece, RecordOptions(text_field), rejects)
    return [text for batch in batches for text in batch], rejects


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.TSV", "\t"), ("a.csv.gz", ",")])
def test_tables_are_read_by_column(tmp_path: Path, name: str, mark: str) -> None:
    rows = ["\ufeffid,text", "1,hello", '2,"two\nlines, and a ""quote"""', "3,", "4", "", "5,last"]
    raw = "\n".join(rows).encode()
    raw = raw if mark == "," else raw.replace(b"id,text", b"id\ttext").replace(b"1,", b"1\t").replace(b"5,", b"5\t")
    raw = raw if mark == "," else raw.replace(b"2,", b"2\t").replace(b"3,", b"3\t")
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    found, rejects = read_all(path)
    assert found == ["hello", 'two\nlines, and a "quote"', "last"]
    assert rejects.counts == {"empty": 1, "missing field": 1}
    with pytest.raises(DataError, match="has no column 'body'") as caught:
        read_all(path, "body")
    assert caught.value.hint == "--field one of id, text"


def test_table_with_bad_bytes_or_an_open_quote(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\ngood\nb\xffd\n")
    found, rejects = read_all(path)
    assert (found, rejects.counts) == (["good"], {"bad UTF-8": 1})
    path.write_text('text\n"' + "x\n" * 100)
    piece = Piece(str(path), "csv", "", 0, -1)
    with pytest.raises(DataError, match="field larger than") as caught:
        list(read_documents(piece, RecordOptions(max_document_bytes=50), Rejects()))
    assert "close the quote" in str(caught.value.hint)


def test_rejected_records_are_counted_from_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbroken\n')
    _, rejects = read_all(path)
    assert rejects.samples[0]["place"] == 2
    assert f"the first is record 2 of {path}" in rejects.error("reading", 2).message
