"""Parameters by where they live: in a block, or at the two ends of the model; for one tensor-parallel process."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config.layout import stage_layers
from keepstep.config.schema import ModelConfig
from keepstep.models.size import parameter_count
from keepstep.plan.workload import Workload


@dataclass(frozen=True)
class StageParameters:
    """Counts for one process of one pipeline stage, before FSDP shards them."""

    block: int
    """One block."""
    blocks: int
    """How many blocks the stage has."""
    ends: int
    """Embedding, positions, last norm and head, as far as the stage has them: FSDP's root unit."""
    table: int
    """The head's or the embedding's matrix, where the stage computes a gradient for it."""
    adapters: int = 0
    """Low-rank adapters of one block; with any, nothing else is trained."""

    @property
    def trained_block(self) -> int:
        """Parameters of one block that have gradients."""
        return self.adapters or self.block

    @property
    def trained(self) -> int:
        """Parameters of the stage that have gradients and moments."""
        return self.adapters * self.blocks if self.adapters else self.total

    @property
    def total(self) -> int:
        """All parameters of the stage."""
        return self.block * self.blocks + self.ends


def block_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one block on one tensor-parallel process: matrices are split, norms are whole."""
    ends = (1 if model.tied else 2) * model.padded_vocab * model.hidden + _positions(model) + _norm(model)
    per_block = (parameter_count(model) - ends) // model.layers
    whole = 2 * _norm(model) + (2 * model.hidden if model.bias else 0) + (2 * model.head_size if model.qk_norm else 0)
    return (per_block - whole) // tensor + whole


def stage_parameters(work: Workload, stage: int) -> StageParameters:
    """What stage number `stage` of the pipeline holds."""
    model, tensor, stages = work.model, work.degrees.tensor, work.degrees.pipeline
    table = model.padded_vocab * model.hidden // tensor
    first, last = stage == 0, stage == stages - 1
    positions = _positions(model)
    # A tied table exists once where one stage has both ends, and twice where the ends are apart.
    tables = int(first) + int(last and (not model.tied or not first))
    ends = tables * table + (positions if first else 0) + (_norm(model) if last else 0)
    held = stage_layers(model.layers, stages * work.stages_per_process)
    blocks = sum(len(held[number]) for number in range(stage, len(held), stages))
    learned_table = table if (first or last) and not work.lora_rank else 0
    return StageParameters(block_parameters(model, tensor), blocks, ends, learned_table, block_adapters(work))


def received_streams(work: Workload, stage: int) -> int:
    """How often a micro batch reaches a process of the pipeline, there and back: twice for each of its stages.

    The first stage gets tokens and the last makes its own gradients.
    """
    if work.degrees.pipeline == 1:
        return 0
    return 2 * work.stages_per_process - int(stage == 0) - int(stage == work.degrees.pipeline - 1)


@dataclass(frozen=True)
class AdaptedLinear:
    """One of a block's linears with adapters on it."""

    projections: int
    """With an adapter: each has a first factor of its own, the second is shared."""
    inputs: int
    outputs: int


def adapted_linears(work: Workload) -> list[AdaptedLinear]:
    """A block's linears that have adapters."""
    model, targets = work.model, set(work.lora_targets)
    query, key = model.heads * model.head_size, model.key_value_heads * model.head_size
    gated = model.activation == "swiglu"
    linears = {
        ("q", "k", "v"): (model.hidden, query + 2 * key),
        ("o",): (query, model.hidden),
        ("gate", "up") if gated else ("up",): (model.hidden, (2 if gated else 1) * model.ffn_size),
        ("down",): (model.ffn_size, model.hidden),
    }
    counted = ((len(targets & set(names)), sizes) for names, sizes in linears.items())
    return [AdaptedLinear(projections, *sizes) for projections, sizes in counted if projections]


def block_adapters(work: Workload) -> int:
    """Numbers in one block's adapters."""
    numbers = sum(linear.projections * linear.inputs + linear.outputs for linear in adapted_linears(work))
    return work.lora_rank * numbers // work.degrees.tensor


def _positions(model: ModelConfig) -> int:
    return model.position_rows * model.hidden if model.positions == "learned" else 0


def _norm(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" and model.bias else 1)
