"""Rules of mixtures of experts: a shape that can be routed, and what they are not combined with yet."""

from __future__ import annotations

from keepstep.config.rules import Found, around, divisors, rule
from keepstep.config.schema import RunConfig
from keepstep.core.messages import listed


@rule("model.experts.top_k", "model.experts.count", "model.experts.groups", "model.experts.top_groups")
def tokens_find_enough_experts(config: RunConfig) -> Found:
    """A token's experts are in the groups that it may use."""
    experts = config.model.experts
    if not experts.count or experts.count % experts.groups or experts.top_groups > experts.groups:
        return None
    usable = experts.count // experts.groups * experts.top_groups
    if experts.top_k <= usable:
        return None
    groups = f" in {experts.top_groups} of {experts.groups} groups" if experts.groups > 1 else ""
    return f"must be at most {usable}, the experts that a token may use{groups}", f"model.experts.top_k={usable}"


@rule("model.experts.groups", "model.experts.count", "model.experts.top_groups")
def groups_divide_experts(config: RunConfig) -> Found:
    """Groups are equally large, and a token uses some of them."""
    experts = config.model.experts
    if not experts.count:
        return None
    if experts.count % experts.groups:
        groups = around(divisors(experts.count), experts.groups)
        return f"must divide model.experts.count ({experts.count})", f"model.experts.groups={listed(groups)}"
    if experts.top_groups > experts.groups:
        needs = f"must be at least model.experts.top_groups ({experts.top_groups})"
        return needs, f"model.experts.top_groups={experts.groups}"
    return None


@rule("model.experts.shared_gate", "model.experts.shared_ffn_hidden", "model.experts.count")
def shared_gate_needs_a_shared_expert(config: RunConfig) -> Found:
    """The gate multiplies the output of the shared expert."""
    experts = config.model.experts
    if not experts.count or not experts.shared_gate or experts.shared_ffn_hidden:
        return None
    return "needs a shared expert", "model.experts.shared_gate=false, or set model.experts.shared_ffn_hidden"


@rule(
    "model.experts.count", "model.experts.first_dense_layers", "model.experts.layer_interval", "model.layers",
    "model.activation", "model.bias", "model.linear",
)  # fmt: skip
def experts_are_plain_swiglu(config: RunConfig) -> Found:
    """Experts exist in some layer, and are SwiGLU without biases."""
    model = config.model
    if not model.experts.count:
        return None
    if not model.expert_layers:
        hint = "model.experts.first_dense_layers=0 and model.experts.layer_interval=1"
        return f"has no layer to be in: none of the {model.layers} layers has experts", hint
    if model.activation != "swiglu":
        return f"needs model.activation swiglu, and it is {model.activation}", "model.activation=swiglu"
    if model.bias:
        return "needs feed-forward blocks without biases, and model.bias is true", "model.bias=false"
    if model.linear not in ("dense", "fp8"):
        return f"needs model.linear dense, and it is {model.linear}", "model.linear=dense"
    return None


@rule("parallel.expert", "model.experts.count")
def processes_divide_experts(config: RunConfig) -> Found:
    """Each process of an expert parallel group holds as many experts."""
    count, degree = config.model.experts.count, config.parallel.expert
    if degree == 1:
        return None
    if not count:
        return "needs a model with experts, and model.experts.count is 0", "parallel.expert=1"
    if count % degree:
        choices = around(divisors(count), degree)
        return f"must divide model.experts.count ({count})", f"parallel.expert={listed(choices)}"
    return None


@rule("compute.recompute", "parallel.expert")
def divided_experts_recompute_whole_blocks(config: RunConfig) -> Found:
    """Saving some operators needs the same ones in both passes, and FSDP gathers divided experts with other ones."""
    if config.parallel.expert == 1 or config.compute.recompute != "selective":
        return None
    return "does not support parallel.expert above 1", "compute.recompute=full or none"


@rule("parallel.schedule", "parallel.pipeline", "model.experts.count")
def zero_bubble_needs_dense_blocks(config: RunConfig) -> Found:
    """Experts compute all their gradients in one backward pass."""
    parallel = config.parallel
    if parallel.pipeline == 1 or parallel.schedule != "zero_bubble" or not config.model.experts.count:
        return None
    return "splits the backward pass, which experts cannot", "parallel.schedule=interleaved"


@rule(
    "compute.recompute", "parallel.pipeline", "model.experts.count", "model.experts.aux_loss", "model.experts.z_loss"
)  # fmt: skip
def pipelines_keep_router_losses(config: RunConfig) -> Found:
    """Recomputation would weigh the losses of a router by the targets of a later micro batch."""
    experts = config.model.experts
    if not experts.count or config.parallel.pipeline == 1 or not (experts.aux_loss or experts.z_loss):
        return None
    if config.compute.recompute in ("none", "auto"):
        return None
    needs = "must be none with parallel.pipeline above 1 and losses of routers"
    return needs, "compute.recompute=none, or model.experts.aux_loss=0 with model.experts.balance_bias=true"


@rule("precision", "model.experts.count", "model.experts.bias", "model.experts.swiglu_limit")
def fp8_experts_are_plain(config: RunConfig) -> Found:
    """The fp8 operators of experts have no biases and plain SwiGLU."""
    experts = config.model.experts
    if config.precision != "fp8" or not experts.count:
        return None
    if experts.bias or experts.swiglu_limit:
        return "does not support experts with biases or clipped SwiGLU", "precision=bf16"
    return None
