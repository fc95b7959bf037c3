"""The .bin/.idx pair: what was written is read, and a hostile index is an error, never a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.errors import DataError
from keepstep.data.formats.megatron import HEADER, MegatronReader, MegatronWriter, index_bytes, token_dtype


def write(prefix: Path, documents: list[list[int]], vocab: int = 1000) -> Path:
    with MegatronWriter(prefix, token_dtype(vocab)) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))
    return prefix


@pytest.mark.parametrize("vocab", [1000, 200_000])
def test_documents_come_back(tmp_path: Path, vocab: int) -> None:
    documents = [[1, 2, 3], [], [999, vocab - 1], [5]]
    reader = MegatronReader(write(tmp_path / "set", documents, vocab))
    assert [reader.document(number).tolist() for number in range(reader.documents)] == documents
    assert reader.tokens.dtype.itemsize == (2 if vocab == 1000 else 4)


def test_an_empty_set_is_no_error(tmp_path: Path) -> None:
    assert MegatronReader(write(tmp_path / "set", [])).documents == 0


def test_megatrons_empty_documents_are_read(tmp_path: Path) -> None:
    """For a text without tokens, Megatron's preprocess_data.py adds a document that has no sequence."""
    documents = [[1, 2, 3], [], [4, 5], [], [], [6, 7, 8, 9]]
    lengths = np.array([len(document) for document in documents if document], dtype=np.int32)
    pointers = np.cumsum(np.concatenate([[0], lengths[:-1]])) * 2
    ends = np.cumsum([0, *(bool(document) for document in documents)])
    header = HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(ends))
    (tmp_path / "set.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + ends.tobytes())
    (tmp_path / "set.bin").write_bytes(np.concatenate(documents).astype(np.uint16).tobytes())
    reader = MegatronReader(tmp_path / "set")
    reader.check()
    assert [reader.document(number).tolist() for number in range(reader.documents)] == documents
    assert reader.document_lengths().tolist() == [3, 0, 2, 0, 0, 4]


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), MegatronWriter(tmp_path / "set", token_dtype(10)):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_stream_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[1, 2, 3], [4]])
    stream = tmp_path / "set.bin"
    stream.write_bytes(stream.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"holds 3 tokens, but its index ends at 4"):
        MegatronReader(prefix)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_a_damaged_index_is_a_data_error_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    write(tmp_path / "set", [[1, 2, 3], [4, 5], [6]])
    raw = bytearray((tmp_path / "set.idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "set.idx").write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        reader = MegatronReader(tmp_path / "set")
        for number in range(min(reader.documents, 10)):
            assert reader.document(number).size <= 6
        reader.starts_between(0, 6)
    except DataError:
        pass


def test_absurd_counts_allocate_nothing(tmp_path: Path) -> None:
    write(tmp_path / "set", [[1]])
    header = HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 2**62, 2**62)
    (tmp_path / "set.idx").write_bytes(header + bytes(64))
    with pytest.raises(DataError, match="claims"):
        MegatronReader(tmp_path / "set")


def test_the_index_is_laid_out_as_the_format_says() -> None:
    raw = index_bytes(np.array([3, 1], dtype=np.int32), 8)
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert np.frombuffer(raw[34:42], "<i4").tolist() == [3, 1]
    assert np.frombuffer(raw[42:58], "<i8").tolist() == [0, 6]
    assert np.frombuffer(raw[58:], "<i8").tolist() == [0, 1, 2]
