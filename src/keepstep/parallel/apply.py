"""The one place that states the order: pipeline split, tensor and row split, recomputation, compile, offload, FSDP.

Each step builds on the one before: a stage is a smaller model, recomputation must run inside the compiled block,
offloading sees what the compiled block saves, and FSDP must see the block as it will be called.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from keepstep import models
from keepstep.config.schema import ComputeConfig, ParallelConfig
from keepstep.models.block_plan import BlockPlan, RecomputeMode
from keepstep.models.moe import MoE
from keepstep.models.ops.chunked_mlp import MlpChunks, share_mlp
from keepstep.models.quantized_weight import holds_quantized_weights
from keepstep.models.transformer import Block, Transformer
from keepstep.parallel.activation_offload import ActivationOffload
from keepstep.parallel.context import split_rows
from keepstep.parallel.expert import split_experts
from keepstep.parallel.mesh import ParallelMesh
from keepstep.parallel.pipeline import split_stages
from keepstep.parallel.tensor import first_local_head, split_tensors
from keepstep.parallel.vocabulary import repeat_output

_MOST_GRAPHS = 64
"""Layers of two kinds, modes of recomputation, the first block and others, rows with and without documents, training
and validation, and numbers of rows multiply. Past torch's limit of 8, the rest would not be compiled.
"""
_ATTENTION = (
    "aten::_flash_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "keepstep::attention_forward",
)
_MATMULS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "keepstep::expert_gate_up", "keepstep::expert_down")


def apply_parallel(
    model: Transformer,
    mesh: ParallelMesh,
    parallel: ParallelConfig,
    compute: ComputeConfig,
    shard_dtype: torch.dtype | None,
    modes: Sequence[RecomputeMode],
    fused_attention: bool = False,
) -> list[Transformer]:
    """Reduce a model on the meta device to this process's part of it, in place.

    `shard_dtype` is the precision that sharded weights compute in; None leaves the model whole. `modes` says for each
    block what it recomputes. `fused_attention` says that this GPU has our attention kernels. Returns what is to be
    called: the model itself or, with a pipeline, this process's stages, whose parameters are the model's.
    """
    stages = split_stages(model, mesh.pipeline_rank, mesh.layout.pipeline, parallel.stages_per_process)
    piped, split = mesh.layout.pipeline > 1, mesh.layout.tensor > 1
    # A pipeline runs many micro batches through the same weights: gathering them each time costs more than it saves.
    keep_gathered = parallel.keep_gathered or piped
    for stage in stages:
        if split:
            split_tensors(stage, mesh.device_mesh["tensor"], parallel.async_tensor)
        split_experts(stage, mesh)
        if piped and parallel.schedule == "zero_bubble":
            repeat_output(stage, is_split=split)
        attend = split_rows(stage, mesh.context_group) if mesh.context_group is not None else None
        offload = ActivationOffload() if compute.offload_activations else None
        mlp_chunks = _mlp_chunks(stage, compute.mlp_chunk_tokens)
        for layer, block in stage.blocks.items():
            assert isinstance(block, Block)
            mode = modes[int(layer)]
            block.use(
                BlockPlan(
                    # Selective recomputation saves the plain outputs of matmuls.
                    fused_matmuls=compute.fused_matmuls and mode != "selective",
                    tensor_parallel=split,
                    fused_attention=fused_attention and _is_whole(block, mesh),
                    deferred_add=shard_dtype is None and mode == "none",
                    recompute=mode,
                    mlp_chunks=mlp_chunks,
                    first_head=first_local_head(block.attention, mesh.device_mesh["tensor"]) if split else 0,
                    attend=attend,
                )
            )
            # What is saved serves one backward pass, and zero bubble makes two; a ring would save every step's output.
            # Saving needs the same operators in both passes, and FSDP gathers divided experts with other ones.
            divided = mesh.layout.expert > 1 and isinstance(block.mlp, MoE)
            save_attention = not divided and attend is None and not (piped and parallel.schedule == "zero_bubble")
            # A compiled block hands all that it saves to autograd, outputs of operators included.
            own_saves = None if compute.compile else offload
            # Where rows are split, a block ends in a reduction, which need not be repeated.
            stops = compute.compile or split or not holds_quantized_weights(block)
            apply_recompute(block, mode, save_attention=save_attention, offload=own_saves, early_stop=stops)
            if compute.compile:
                name_compile_cache()
                torch._dynamo.config.recompile_limit = _MOST_GRAPHS
                # Torch warns that recomputed blocks must change no tensor in place. Ours do not.
                logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        if offload is not None:
            _offload_blocks(offload, list(stage.blocks.values()), piped)
        if shard_dtype is not None:
            _shard_model(stage, mesh, shard_dtype, keep_gathered, parallel.offload)
    return stages


def _mlp_chunks(stage: Transformer, tokens: int) -> MlpChunks | None:
    block = next(iter(stage.blocks.values()))
    assert isinstance(block, Block)
    return share_mlp(block.mlp, tokens) if tokens else None


def _offload_blocks(offload: ActivationOffload, blocks: Sequence[nn.Module], piped: bool) -> None:
    for block in blocks:
        # A pipeline runs other micro batches before the last block's backward pass.
        offload.wrap(block, is_first=block is blocks[0], stays=block is blocks[-1] and not piped)


def name_compile_cache() -> None:
    """Give this version's compiled code a name of its own in torch's cache on disk.

    Torch keys the cache by the graph, where an operator of ours is a name: after an upgrade that gives it other
    arguments, the old code would be found, call it with the old ones and fail.
    """
    torch.compiler.config.cache_key_tag = f"keepstep {_operators_digest(Path(models.__file__).parent)}"


@cache
def _operators_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _is_whole(block: Block, mesh: ParallelMesh) -> bool:
    """Whether one operator may compute the block's attention from its projection on."""
    return mesh.layout.tensor == mesh.layout.context == 1 and block.attention.can_fuse_attention()


def apply_recompute(
    block: nn.Module,
    mode: RecomputeMode,
    *,
    save_attention: bool = True,
    offload: ActivationOffload | None = None,
    early_stop: bool = True,
) -> None:
    """Wrap the block's forward in place, so that parameter names stay as they are.

    `full` keeps the block's input and, with `save_attention`, what attention returns: as much memory again, and in long
    rows most of the time that recomputation would take. With `offload` both go to host memory. With `early_stop`
    recomputation ends at the last saved tensor.
    """
    if mode == "none":
        return
    # Torch stops early by an exception from the operator that saves last, which passes through C++. There it was lost
    # where a quantised matmul saved last (torch 2.11 on a GPU). Compiled blocks raise none.
    options: dict[str, Any] = {"use_reentrant": False, "early_stop": early_stop}
    saved = (*_ATTENTION, *_MATMULS) if mode == "selective" else _ATTENTION if save_attention else ()
    if saved and offload is not None:
        options["context_fn"] = partial(offload.save_outputs, saved)
    elif saved:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_save, saved))
    plain, recomputed = block.forward, partial(checkpoint, block.forward, **options)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Without gradients nothing is kept. A CUDA graph of decoding could not save the random generator's state.
        return recomputed(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    block.forward = forward


def _save(names: tuple[str, ...], _context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = operation.name().split(".")[0] in names
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _shard_model(
    model: Transformer, mesh: ParallelMesh, compute_dtype: torch.dtype, keep_gathered: bool, offload: bool
) -> None:
    """FSDP2, in place: each block is one unit, and so are its experts if processes divide them; what is left belongs
    to the root.

    Weights compute in `compute_dtype`; masters, gradients sums and reductions stay fp32. A (replicate, shard) mesh
    shards inside a group and copies across groups; a mesh of one process shards nothing and still runs the same code.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        # Inputs are token ids and integer positions: casting them would be wrong.
        cast_forward_inputs=False,
    )
    weights_mesh, layout = mesh.weights_mesh, mesh.layout
    where = CPUOffloadPolicy(pin_memory=weights_mesh.device_type == "cuda") if offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=weights_mesh, mp_policy=precision, offload_policy=where)
    for block in model.blocks.values():
        if layout.expert > 1 and isinstance(block.mlp, MoE):
            copies = layout.weight_shards // layout.expert
            # By expert where each process gets as many, else inside every expert.
            dim = int(model.config.experts.count // layout.expert % copies != 0)
            sharded = shard(
                block.mlp.experts,
                mesh=mesh.expert_weights_mesh,
                reshard_after_forward=not keep_gathered,
                shard_placement_fn=lambda _parameter, dim=dim: Shard(dim),
            )
            # Tokens of all processes have added to these gradients, so they are divided as those of other weights are.
            sharded.set_gradient_divide_factor(layout.replicate * layout.weight_shards)
            # Gloo cannot divide on the way. Where nothing is reduced, torch would divide twice.
            by_gloo = weights_mesh.device_type == "cpu" and copies > 1
            sharded.set_force_sum_reduction_for_comms(by_gloo)
        shard(block, reshard_after_forward=not keep_gathered)
    shard(model, reshard_after_forward=False)
