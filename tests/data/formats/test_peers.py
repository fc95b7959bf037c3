"""What we write, mosaicml-streaming and megatron-core read to the same tokens.

Runs where `make bench-data` has installed them, or with the path of a Python that has them in KEEPSTEP_PEERS.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepstep.data.formats.megatron import MegatronReader, find_prefixes
from keepstep.data.gpt_order import GptRows
from keepstep.data.prepare.build import build
from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file

ROOT = Path(__file__).parents[3]
PEERS = Path(os.environ.get("KEEPSTEP_PEERS", ROOT / ".venv-bench" / "bin" / "python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.is_file(), reason="the peers are not installed: make bench-data installs them"),
]


def ask(action: str, data: Path, *more: str) -> list[list[int]]:
    command = [str(PEERS), str(ROOT / "benchmarks" / "data_peers.py"), action, "--data", str(data), *more]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[list[int]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


def prepare(out: Path, corpus: Path, tokenizer: Path, **changes: Any) -> Path:
    options = BuildOptions((str(corpus),), sha256_file(tokenizer), eos="<|endoftext|>", task_bytes=80_000, **changes)
    build(out, make_plan(options), tokenizer, workers=1)
    return out


def documents(folder: Path) -> list[list[int]]:
    readers = [MegatronReader(prefix) for prefix in find_prefixes(folder)]
    return [reader.document(number).tolist() for reader in readers for number in range(reader.documents)]


def test_streaming_reads_our_shards(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    expected = documents(prepare(tmp_path / "bin", corpus, tokenizer))
    single = prepare(tmp_path / "single", corpus, tokenizer, format="mds")
    assert ask("read-mds", single) == expected
    joined = prepare(tmp_path / "joined", corpus, tokenizer, format="mds", concat=50)
    rows = ask("read-mds", joined)
    assert all(len(row) == 50 for row in rows)
    assert [token for row in rows[:40] for token in row] == [token for row in expected for token in row][:2000]


def test_megatron_core_reads_our_pairs_and_orders_them_as_we_do(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    folder = prepare(tmp_path / "bin", corpus, tokenizer)
    prefix = find_prefixes(folder)[0]
    reader = MegatronReader(prefix)
    assert ask("read-megatron", prefix) == [reader.document(number).tolist() for number in range(reader.documents)]
    for seed, samples in ((7, 0), (8, 3000)):
        rows = GptRows(reader, range(reader.documents), 32, samples, seed, 1000)
        ours = rows.read(np.arange(rows.count)).tokens.tolist()
        assert ask("gpt-order", prefix, "--seed", str(seed), "--samples", str(samples)) == ours
