"""Mapped files: as many as a data set has, whatever number of open files a process may have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keepstep.config.schema import DataConfig
from keepstep.data.formats.mapped import map_file
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.data.formats.megatron import MegatronWriter, token_dtype
from keepstep.data.loader import build_loaders

FILES = 200

_READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from pathlib import Path
from keepstep.config.schema import DataConfig
from keepstep.data.loader import build_loaders
folder = Path(sys.argv[1])
train = build_loaders(DataConfig(path=str(folder), valid_share=0.0), 8, 1000, 1, folder).train
print(train.samples_per_epoch, int(train.rows(0, train.samples_per_epoch).inputs.sum()))
"""


def write_pairs(folder: Path) -> None:
    for number in range(FILES):
        with MegatronWriter(folder / f"part-{number}", token_dtype(1000)) as writer:
            writer.add(np.arange(9) + number)


def write_shards(folder: Path) -> None:
    writer = TokenShardWriter(folder, "shard", np.dtype(np.int32))
    for number in range(FILES):
        writer.add(np.arange(9) + number)
        writer.flush()
    write_index(folder, writer.entries)


@pytest.mark.parametrize("write", [write_pairs, write_shards])
def test_a_set_may_have_more_files_than_a_process_may_have_open(write: object, tmp_path: Path) -> None:
    assert callable(write)
    write(tmp_path)
    found = subprocess.run([sys.executable, "-c", _READ, str(tmp_path)], capture_output=True, text=True)
    expected = sum(int((np.arange(8) + number).sum()) for number in range(FILES))
    assert found.stdout.split() == [str(FILES), str(expected)], found.stderr


def test_a_set_of_very_many_shards_maps_a_part_of_them_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path)
    monkeypatch.setattr("keepstep.data.open_dataset._MOST_MAPPED", 3)
    config = DataConfig(path=str(tmp_path), valid_share=0.0, shuffle=False)
    train = build_loaders(config, 8, 1000, 1, tmp_path).train
    for first in range(0, FILES, 50):
        assert train.rows(first, 50).inputs[:, 0].tolist() == list(range(first, first + 50))
        assert _mappings(tmp_path) <= 3


def test_a_mapping_goes_with_the_last_view_of_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    (tmp_path / "empty").touch()
    whole = map_file(tmp_path / "file")
    view = whole[8:16].view("<u4")
    del whole
    assert _mappings(tmp_path) == 1
    (tmp_path / "file").unlink()
    assert view.tobytes() == bytes(range(8, 16))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del view
    assert _mappings(tmp_path) == 0
    assert len(map_file(tmp_path / "empty")) == 0


def _mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
