"""The files of an export as other people and programs meet them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from keepstep.interop.safetensors_files import write_shards


@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_written_files_follow_the_umask(umask: int, rights: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_shards({"a": torch.zeros(4), "b": torch.ones(4)}.items(), tmp_path, largest_bytes=16)
    finally:
        os.umask(before)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [rights, rights]
