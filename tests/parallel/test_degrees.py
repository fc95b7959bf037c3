"""Degrees: what is left, what does not multiply to the world, what does not fit the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keepstep.config.layout import Layout, check_microbatches, resolve_layout, stage_layers
from keepstep.config.load import load_config
from keepstep.config.schema import ParallelConfig
from keepstep.core.errors import ConfigError
from keepstep.data.batch import Batch
from keepstep.parallel.context import own_part

_CUDA = torch.device("cuda")


def test_what_is_left_goes_to_the_open_axis() -> None:
    assert resolve_layout(ParallelConfig(tensor=2, pipeline=2), 16) == Layout(1, 4, tensor=2, pipeline=2)
    assert resolve_layout(ParallelConfig(replicate=-1, shard=2, context=2), 8) == Layout(2, 2, context=2)


@pytest.mark.parametrize(
    ("config", "processes", "message", "hint"),
    [
        (ParallelConfig(tensor=3), 4, "tensor 3 does not multiply to 4 process", "a multiple of 3 processes"),
        (ParallelConfig(shard=2, context=2), 8, "shard 2 × context 2 does not multiply to 8", "start 4 processes"),
        (ParallelConfig(shard=2), 4, "shard 2 does not multiply to 4", "parallel.replicate=-1 for 2 replicas"),
        (ParallelConfig(shard=4), 6, "shard 4 does not multiply to 6", "start 4 processes, or parallel.shard=-1"),
        (ParallelConfig(replicate=-1), 8, "are both -1", "parallel.replicate=1"),
        (ParallelConfig(pipeline=4), 2, "does not multiply to 2", "a multiple of 4 processes"),
    ],
)
def test_degrees_that_do_not_make_up_the_world(config: ParallelConfig, processes: int, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_layout(config, processes)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (5, 4), (7, 4), (12, 8), (80, 16), (3, 2), (9, 1)])
def test_every_block_is_on_one_stage_and_the_last_holds_no_more_than_others(layers: int, stages: int) -> None:
    split = stage_layers(layers, stages)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert len(split[-1]) <= min(map(len, split)) or layers % stages == 0


def test_a_pipeline_says_how_many_micro_batches_it_needs() -> None:
    check_microbatches(ParallelConfig(pipeline=4), 5)
    check_microbatches(ParallelConfig(pipeline=4, schedule="interleaved"), 8)
    with pytest.raises(ConfigError, match="at least 4 micro batches a step, and has 3"):
        check_microbatches(ParallelConfig(pipeline=4), 3)
    with pytest.raises(ConfigError, match="a multiple of 4 micro batches a step, and has 6"):
        check_microbatches(ParallelConfig(pipeline=4, schedule="zero_bubble"), 6)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["parallel.tensor=2", "model.vocab=50257"], "rows of the embedding (50257)\n hint: model.vocab_multiple=2"),
        (["parallel.tensor=2", "model.linear=bitnet"], "must be 1 with model.linear bitnet"),
        (["parallel.tensor=4", "model.seq_len=30"], "tokens of a row on one process (30)"),
        (["parallel.pipeline=16"], "more stages than model.layers (12)\n hint: parallel.pipeline=10, 11 or 12"),
        (["parallel.pipeline=8", "parallel.schedule=interleaved"], "8 × 2 stages each, more stages than"),
        (["parallel.stages=2"], "must be 1 with parallel.schedule 1f1b\n hint: parallel.schedule=interleaved"),
        (["parallel.stages=1", "parallel.schedule=interleaved"], "must be 2 or more"),
        (["parallel.context=3"], "cuts a row into 6 equal pieces, and model.seq_len is 2048"),
        (["parallel.async_tensor=true"], "needs parallel.tensor above 1"),
        (["parallel.async_tensor=true", "parallel.tensor=2", "compute.compile=false"], "hint: compute.compile=true"),
        (
            ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "compute.compile=true"],
            "splits the backward pass, which compiled blocks cannot",
        ),
        (
            ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "compute.recompute=selective"],
            "saves matmul outputs for one backward pass, and parallel.schedule zero_bubble runs two\n hint: ",
        ),
    ],
)
def test_degrees_that_do_not_fit_the_model_are_named_with_some_that_do(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    found = "\n".join(caught.value.lines())
    assert expected in found
    assert found.count("error:") == 1


def test_parts_of_a_row_hold_every_token_once_with_its_position() -> None:
    tokens = np.arange(2 * 24).reshape(2, 24)
    documents = np.repeat([[0, 0, 1, 1, 1, 2]], 4, axis=1).reshape(1, 24)[[0, 0]]
    documents = np.sort(documents, axis=1)
    batch = Batch(tokens, tokens + 1, None, documents, 0)
    parts = [own_part(batch, rank, 3) for rank in range(3)]
    assert np.array_equal(np.sort(np.concatenate([part.inputs for part in parts], axis=1), axis=1), tokens)
    for part in parts:
        assert part.inputs.shape == (2, 8)
        assert np.array_equal(part.targets, part.inputs + 1)
        first_of_document = np.array([0, 8, 20])
        assert part.positions is not None
        assert part.documents is not None
        assert np.array_equal(part.positions, part.inputs % 24 - first_of_document[part.documents])
