"""Chunked feed-forwards on a GPU: less memory, nearly the same loss. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_activation_offload import measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")


@pytest.mark.parametrize(
    "words",
    [
        ["compute.recompute=full"],
        ["compute.recompute=none", "parallel.shard=1"],
        ["compute.recompute=full", "compute.compile=true"],
        ["compute.recompute=full", "precision=fp8"],
        ["compute.recompute=full", "lora.rank=8"],
    ],
    ids=" ".join,
)
def test_chunks_free_memory_and_keep_the_loss(words: list[str]) -> None:
    # So few tokens in the vocabulary that the loss is not the peak. Within more steps the model learns these by heart,
    # which multiplies every difference in rounding, and in fp8 that of scales.
    words = [*words, "model.seq_len=65536", "model.vocab=8192", "model.layers=2", "global_batch=1", "--steps=2"]
    plain, chunked = (measure(*words, f"compute.mlp_chunk_tokens={tokens}") for tokens in (0, 2048))
    assert chunked["loss"] == pytest.approx(plain["loss"], rel=2e-3)
    # Of one block, at least three tensors of the inner width, 8,192, less those of a chunk.
    freed_gib = 3 * (65536 - 2048) * 8192 * 2 / 2**30
    assert chunked["peak_memory_gib"] < plain["peak_memory_gib"] - freed_gib
