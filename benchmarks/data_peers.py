"""The peers' part of benchmarks/data.py, run by a Python that has them installed (requirements/bench-data.txt).

Each action does one piece of work as the peer's own tools do it and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEQ_LEN = 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=sorted(ACTIONS))
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eos", default="<|endoftext|>")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--samples", type=int, default=0)
    args = parser.parse_args()
    if args.out is not None:
        shutil.rmtree(args.out, ignore_errors=True)
    print(json.dumps(ACTIONS[args.action](args)))


def _hf_tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def prep_llm_foundry(args: argparse.Namespace) -> dict[str, Any]:
    """llm-foundry's ConcatTokensDataset into streaming's MDSWriter, as its convert_dataset_json does."""
    import datasets
    from streaming import MDSWriter

    # The package's own __init__ imports its whole training stack; the class itself needs none of it.
    place = Path(importlib.util.find_spec("llmfoundry").submodule_search_locations[0]) / "data" / "data.py"  # type: ignore[union-attr, index]
    spec = importlib.util.spec_from_file_location("llmfoundry_data", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    start_s = time.perf_counter()
    rows = datasets.load_dataset(
        "json", data_files=str(args.corpus), split="train", cache_dir=str(args.out.with_name(args.out.name + ".cache"))
    )
    dataset = module.ConcatTokensDataset(
        hf_dataset=rows,
        tokenizer=_hf_tokenizer(args.tokenizer),
        max_length=SEQ_LEN,
        bos_text="",
        eos_text=args.eos,
        no_wrap=False,
    )
    samples = 0
    with MDSWriter(columns={"tokens": "ndarray:int32"}, out=str(args.out), compression=None, hashes=["sha1"]) as out:
        for sample in dataset:
            out.write(sample)
            samples += 1
    return {"seconds": time.perf_counter() - start_s, "samples": samples, "tokens": samples * SEQ_LEN}


_STATE: dict[str, Any] = {}


def _start_worker(tokenizer: str, eos: str) -> None:
    _STATE["tokenizer"] = _hf_tokenizer(Path(tokenizer))
    _STATE["eos"] = _STATE["tokenizer"].convert_tokens_to_ids(eos)


def _encode_line(line: str) -> list[int]:
    return [*_STATE["tokenizer"](json.loads(line)["text"], add_special_tokens=False)["input_ids"], _STATE["eos"]]


def prep_megatron(args: argparse.Namespace) -> dict[str, Any]:
    """A pool of workers encodes line by line, one process writes: what tools/preprocess_data.py does."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start_s = time.perf_counter()
    args.out.mkdir(parents=True)
    vocab = len(_hf_tokenizer(args.tokenizer))
    builder = IndexedDatasetBuilder(
        str(args.out / "set_text_document.bin"), dtype=DType.optimal_dtype(vocab) if vocab else np.int32
    )
    tokens = 0
    pool = multiprocessing.Pool(args.workers, initializer=_start_worker, initargs=(str(args.tokenizer), args.eos))
    with args.corpus.open(encoding="utf-8") as lines:
        for ids in pool.imap(_encode_line, lines, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
            tokens += len(ids)
    builder.finalize(str(args.out / "set_text_document.idx"))
    pool.close()
    pool.join()
    return {"seconds": time.perf_counter() - start_s, "tokens": tokens}


def prep_datasets(args: argparse.Namespace) -> dict[str, Any]:
    """Hugging Face datasets.map with batches, saved to Arrow."""
    import datasets

    start_s = time.perf_counter()
    cache = args.out.with_name(args.out.name + ".cache")
    rows = datasets.load_dataset("json", data_files=str(args.corpus), split="train", cache_dir=str(cache))
    tokenizer = _hf_tokenizer(args.tokenizer)
    encoded = rows.map(
        lambda batch: {"input_ids": tokenizer([text + args.eos for text in batch["text"]])["input_ids"]},
        batched=True,
        remove_columns=rows.column_names,
        num_proc=args.workers,
    )
    encoded.save_to_disk(str(args.out))
    return {"seconds": time.perf_counter() - start_s, "documents": len(encoded)}


def _pace(samples: Iterator[Any], seconds: float) -> dict[str, Any]:
    """Samples per second of an endless iterator, after a short warm-up."""
    start_s = time.perf_counter()
    next(samples)
    first_s = time.perf_counter() - start_s
    for _ in range(200):
        next(samples)
    count, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(100):
            next(samples)
        count += 100
    return {"samples_per_s": count / (time.perf_counter() - start_s), "first_sample_s": first_s}


def _forever(dataset: Any) -> Iterator[Any]:
    while True:
        yield from dataset


def load_streaming(args: argparse.Namespace) -> dict[str, Any]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(args.data), shuffle=True, shuffle_seed=args.seed, batch_size=16)
    return _pace((sample["tokens"] for sample in _forever(dataset)), args.seconds)


class _Tokenizer:
    """The attributes that GPTDataset needs of a tokenizer."""

    eod = 0
    pad = -1
    vocab_size = 65_536
    unique_identifiers = {"class": "bench"}  # noqa: RUF012


def _gpt_dataset(prefix: Path, samples: int, seed: int, seq_len: int = SEQ_LEN) -> Any:
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([str(prefix)], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=_Tokenizer(),
        path_to_cache=None,
        mmap_bin_files=True,
    )
    indexed = IndexedDataset(str(prefix), multimodal=False, mmap=True)
    documents = np.arange(len(indexed), dtype=np.int32)
    return GPTDataset(indexed, str(prefix), documents, samples or None, Split.train, config)


def load_gptdataset(args: argparse.Namespace) -> dict[str, Any]:
    dataset = _gpt_dataset(args.data, 0, args.seed)

    def samples() -> Iterator[Any]:
        while True:
            for number in range(len(dataset)):
                yield dataset[number]

    return _pace(samples(), args.seconds)


def gpt_order(args: argparse.Namespace) -> dict[str, Any]:
    """Every sample of a small data set in GPTDataset's order, for comparison."""
    dataset = _gpt_dataset(args.data, args.samples, args.seed, seq_len=32)
    rows = [[*dataset[number]["tokens"].tolist(), int(dataset[number]["labels"][-1])] for number in range(len(dataset))]
    return {"rows": rows}


def read_mds(args: argparse.Namespace) -> dict[str, Any]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(args.data), shuffle=False, batch_size=1, validate_hash="sha256")
    return {"rows": [dataset[number]["tokens"].tolist() for number in range(dataset.num_samples)]}


def read_megatron(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(args.data), multimodal=False, mmap=True)
    return {"rows": [dataset[number].tolist() for number in range(len(dataset))]}


def write_samples(args: argparse.Namespace) -> dict[str, Any]:
    """Small data sets written by the peers, for us to read."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from streaming import MDSWriter

    generator = np.random.default_rng(args.seed)
    rows = [generator.integers(0, 60_000, size=int(size)) for size in generator.integers(1, 300, size=24)]
    args.out.mkdir(parents=True)
    for name, compression in (("mds", None), ("mds-zstd", "zstd"), ("mds-gz", "gz")):
        columns = {"tokens": "ndarray:int32", "source": "str"}
        with MDSWriter(
            out=str(args.out / name),
            columns=columns,
            compression=compression,
            hashes=["sha1", "xxh64"],
            size_limit=6_000,
        ) as out:
            for row in rows:
                out.write({"tokens": row.astype(np.int32), "source": "x" * int(row[0] % 7)})
    for name, dtype in (("u16", np.uint16), ("i32", np.int32)):
        builder = IndexedDatasetBuilder(str(args.out / f"{name}.bin"), dtype=dtype)
        for row in rows:
            builder.add_document(torch.from_numpy(row.astype(np.int64)), [len(row)])
        builder.finalize(str(args.out / f"{name}.idx"))
    return {"rows": [row.tolist() for row in rows]}


def load_litdata(args: argparse.Namespace) -> dict[str, Any]:
    """litdata's optimized token chunks, read back through its TokensLoader."""
    from litdata import StreamingDataset, TokensLoader

    dataset = StreamingDataset(
        input_dir=str(args.data),
        item_loader=TokensLoader(block_size=SEQ_LEN),
        shuffle=True,
        drop_last=True,
        seed=args.seed,
    )
    return _pace(_forever(dataset), args.seconds)


def _litdata_tokens(part: tuple[str, int, int]) -> Iterator[Any]:
    import numpy as np
    import torch

    path, first, count = part
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    yield torch.from_numpy(np.asarray(tokens[first : first + count]).astype(np.int32))


def prep_litdata(args: argparse.Namespace) -> dict[str, Any]:
    """A token stream as litdata chunks; only loading is compared, so the tokens are already encoded."""
    from litdata import TokensLoader, optimize

    step = SEQ_LEN * 512
    total = args.data.stat().st_size // 2
    parts = [(str(args.data), first, min(step, total - first)) for first in range(0, total, step)]
    optimize(
        fn=_litdata_tokens,
        inputs=parts,
        output_dir=str(args.out),
        chunk_size=SEQ_LEN * 8192,
        item_loader=TokensLoader(block_size=SEQ_LEN),
        num_workers=1,
    )
    return {"tokens": total}


ACTIONS = {
    "prep-llm-foundry": prep_llm_foundry,
    "prep-megatron": prep_megatron,
    "prep-datasets": prep_datasets,
    "prep-litdata": prep_litdata,
    "load-streaming": load_streaming,
    "load-gptdataset": load_gptdataset,
    "load-litdata": load_litdata,
    "gpt-order": gpt_order,
    "read-mds": read_mds,
    "read-megatron": read_megatron,
    "write-samples": write_samples,
}

if __name__ == "__main__":
    main()
