"""First weights depend on the seed and the parameter's name, never on how many processes hold them."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from keepstep.config.schema import ModelConfig
from keepstep.models.init import init_weights, parameter_seed
from keepstep.models.transformer import Transformer
from tests.models.model_variants import VARIANTS, build

SHARDED = {
    # 3 heads of 5 channels and a vocabulary of 61: rows that two processes cannot share evenly.
    2: ModelConfig(layers=2, hidden=15, heads=3, vocab=61, seq_len=7, ffn_hidden=45),
    4: VARIANTS["grouped rotary"],
}


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (build(VARIANTS["learned"], seed).state_dict() for seed in (17, 17, 18))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_a_further_layer_changes_no_other_parameter() -> None:
    config = replace(VARIANTS["learned"], init_std=0.02)
    small, large = build(config).state_dict(), build(replace(config, layers=3)).state_dict()
    same = [name for name in small if not name.endswith(("attention.out.weight", "mlp.down.weight"))]
    assert all(torch.equal(small[name], large[name]) for name in same)


def test_norms_are_one_and_biases_zero() -> None:
    for name, parameter in build(VARIANTS["query and key norm"]).named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        if name.endswith("bias"):
            assert (parameter == 0).all()


@pytest.mark.parametrize("kind", ["normal", "kaiming"])
def test_spread_follows_the_rule_and_residual_matrices_are_scaled_down(kind: str) -> None:
    config = ModelConfig(layers=8, hidden=128, heads=4, vocab=500, seq_len=300, init=kind, init_std=0.01, tied=False)
    model = build(config)

    def expected(inputs: int) -> float:
        return math.sqrt(2 / inputs) if kind == "kaiming" else 0.01

    block = model.blocks["3"]
    for weight, inputs, divisor in (
        (model.embed.weight, 128, 1),
        (model.position.weight, 128, 1),
        (model.head.weight, 128, 1),
        (block.attention.qkv.weight, 128, 1),
        (block.attention.out.weight, 128, 4),
        (block.mlp.up.weight, 128, 1),
        (block.mlp.down.weight, 512, 4),
    ):
        assert weight.std().item() == pytest.approx(expected(inputs) / divisor, rel=0.03)
        assert abs(weight.mean().item()) < 0.05 * expected(inputs)


def test_parameter_seeds_are_the_same_on_every_machine() -> None:
    assert parameter_seed(17, "embed.weight") == 2221279758498586089
    assert parameter_seed(17, "embed.weight") != parameter_seed(1, "7embed.weight")


def test_half_precision_weights_are_the_rounded_fp32_ones() -> None:
    exact = build(VARIANTS["learned"])
    half = Transformer(VARIANTS["learned"]).bfloat16()
    init_weights(half, 17)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).bfloat16())


def shard_and_save(rank: int, world: int, port: int, file: str) -> None:
    """Two processes shard by FSDP alone; four cut matrices in two first and shard the parts."""
    from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("shard", "tensor"))
    with torch.device("meta"):
        model = Transformer(SHARDED[world])
    if world == 4:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"attention.qkv": columns, "attention.out": rows, "mlp.gate_up": columns, "mlp.down": rows}
        for block in model.blocks.values():
            parallelize_module(block, mesh["tensor"], plan)
    for unit in (*model.blocks.values(), model):
        fully_shard(unit, mesh=mesh["shard"])
    model.to_empty(device="cpu")
    init_weights(model, 17)
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if rank == 0:
        torch.save(whole, file)
    destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_weights_are_bitwise_the_same_however_they_are_sharded(world: int, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(shard_and_save, args=(world, port, str(tmp_path / "weights.pt")), nprocs=world)
    sharded = torch.load(tmp_path / "weights.pt")
    for name, parameter in build(SHARDED[world]).named_parameters():
        assert torch.equal(sharded[name], parameter), name
