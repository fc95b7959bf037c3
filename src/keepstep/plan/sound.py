"""Which layouts make sense for a model: the rules of the configuration, asked without building one."""

from __future__ import annotations

from keepstep.plan.workload import Workload


def sound(work: Workload) -> bool:
    """Whether a run with these degrees would start, and every process would have the same work, as most kinds need."""
    model, degrees = work.model, work.degrees
    tensor, context = degrees.tensor, degrees.context
    if work.exact:
        # Each process holds whole weights, whatever shard degree is asked for, and some may have a micro batch more.
        return max(tensor, context, degrees.pipeline, degrees.shard) == 1 and work.global_batch % work.microbatch == 0
    if tensor > 1 and model.linear == "bitnet":
        return False
    if model.key_value_heads % tensor or model.ffn_size % tensor or model.padded_vocab % tensor:
        return False
    # Each context rank holds two pieces of a row (an early and a late one); the tensor axis splits what it holds.
    if (context > 1 and model.seq_len % (2 * context)) or (model.seq_len // context) % tensor:
        return False
    if work.global_batch % (work.microbatch * degrees.data_ranks):
        return False
    if degrees.pipeline == 1:
        return True
    if work.schedule == "zero_bubble" and (work.compiled or work.recompute == "selective"):
        return False
    stages = degrees.pipeline * work.stages_per_process
    if stages > model.layers or work.microbatches < stages:
        return False
    return work.schedule == "1f1b" or work.microbatches % degrees.pipeline == 0
