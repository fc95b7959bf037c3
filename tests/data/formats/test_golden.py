"""What other libraries wrote, we read to the same tokens; their files lie in golden/ (see benchmarks/data_peers.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from keepstep.config.schema import DataConfig
from keepstep.data.datasets import MdsSet
from keepstep.data.formats.megatron import HEADER, MegatronReader
from keepstep.data.gpt_order import GptRows
from keepstep.data.open_dataset import open_data
from keepstep.data.stores import MdsDocuments

GOLDEN = Path(__file__).parent / "golden"
ROWS = json.loads((GOLDEN / "rows.json").read_text())["rows"]


@pytest.mark.parametrize("name", ["u16", "i32"])
def test_a_pair_written_by_megatron_core(name: str) -> None:
    reader = MegatronReader(GOLDEN / name)
    assert [reader.document(number).tolist() for number in range(reader.documents)] == ROWS


@pytest.mark.parametrize("name", ["mds", "mds-zstd", "mds-gz"])
def test_shards_written_by_mosaicml_streaming(name: str, tmp_path: Path) -> None:
    data = open_data(str(GOLDEN / name), DataConfig(), tmp_path)
    assert isinstance(data, MdsSet)
    documents = MdsDocuments(data.store, range(len(ROWS)))
    assert documents.lengths.tolist() == [len(row) for row in ROWS]
    assert [documents.part(number, 0, len(row)).tolist() for number, row in enumerate(ROWS)] == ROWS


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "gpt_order.json").read_text()), ids=lambda case: str(case["seed"])
)
@pytest.mark.parametrize("sequences_each", [1, 3])
def test_the_order_of_gptdataset_bit_for_bit(case: dict[str, object], sequences_each: int, tmp_path: Path) -> None:
    """GPTDataset orders sequences: how many of them make a document is nothing to it."""
    for name in ("u16.bin", "u16.idx"):
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    raw = (tmp_path / "u16.idx").read_bytes()
    magic, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size])
    ends = sorted({*range(0, sequences, sequences_each), sequences})
    head = HEADER.pack(magic, version, code, sequences, len(ends))
    (tmp_path / "u16.idx").write_bytes(head + raw[HEADER.size : -8 * documents] + np.array(ends, "<i8").tobytes())
    reader = MegatronReader(tmp_path / "u16")
    rows = GptRows(reader, range(reader.documents), 32, int(str(case["samples"])), int(str(case["seed"])), 65_536)
    found = rows.read(np.arange(rows.count)).tokens
    assert rows.count == case["count"]
    assert [hashlib.sha256(json.dumps(row.tolist()).encode()).hexdigest()[:16] for row in found] == case["rows_sha256"]
