"""Mixture of experts: a router chooses a few of many small feed-forward blocks for each token. No token is dropped.

Tokens are sorted by expert, so that each of the two matmuls of all experts is one grouped matmul. Every step is a
permutation or a sum in a fixed order: the same input gives the same bits.

Shape legend: b rows, t tokens, n = b·t, d hidden, e experts, k experts of a token, m = n·k, f width of an expert.

Layout: `experts.gate_up` [e, 2·f, d], in an expert first its gate rows and then its up rows; `experts.down` [e, d, f].
Their biases, where there are some, are `experts.gate_up_bias` [e, 2·f] and `experts.down_bias` [e, d].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.schema import ModelConfig
from keepstep.models.block_plan import BlockPlan
from keepstep.models.mlp import GatedMLP, PlainMLP, make_mlp
from keepstep.models.ops.biased_experts import ExpertWeights, biased_experts
from keepstep.models.ops.expert_rows import top_experts
from keepstep.models.ops.routed_experts import Routes, fp32_linear, routed_experts, sort_by_expert

ROUTER_METRICS = ("expert_load_max", "expert_load_entropy", "expert_bias_max")
"""Names of the numbers of `router_health`."""


class Router(nn.Module):
    """Chooses experts for tokens, in fp32, and notes how many tokens each expert got."""

    balance_bias: Tensor
    """Added to the scores when experts are chosen [e], fp32: state of the run, which steps change and checkpoints
    hold."""
    loss_weight: Tensor | None = None
    """Weight of the balancing losses of the next forward pass; None computes none. Set by the training step."""

    rows_group: dist.ProcessGroup | None = None
    """Processes that share the tokens of a micro batch; None where this one has them all. Each weighs its mean by its
    share in `loss_weight`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts = config.experts
        self.weight = nn.Parameter(torch.empty(config.experts.count, config.hidden))
        nn.init.normal_(self.weight, std=config.init_std)
        self.bias = nn.Parameter(torch.zeros(config.experts.count)) if config.experts.bias else None
        if config.experts.balance_bias:
            self.register_buffer("balance_bias", torch.zeros(config.experts.count, dtype=torch.float32))
        self.tokens_e: Tensor | None = None
        """Tokens of each expert since `take_tokens`, counted when their backward pass runs."""

    def forward(self, x_nd: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, fp32 [n, k], and their numbers."""
        logits_ne = self._logits(x_nd)
        scores_ne = logits_ne.softmax(-1) if self.experts.scores == "softmax" else logits_ne.sigmoid()
        chosen_nk = self._choose(scores_ne.detach())
        if self.training and torch.is_grad_enabled():
            scores_ne = self._observed(logits_ne, scores_ne, chosen_nk)
        weights_nk = scores_ne.gather(1, chosen_nk)
        if self.experts.normalize:
            weights_nk = weights_nk / (weights_nk.sum(-1, keepdim=True) + 1e-20)
        return weights_nk * self.experts.scale, chosen_nk

    def _logits(self, x_nd: Tensor) -> Tensor:
        if x_nd.dtype == self.weight.dtype == torch.bfloat16:
            logits_ne = fp32_linear(x_nd, self.weight)
        else:
            logits_ne = F.linear(x_nd.float(), self.weight.float())
        return logits_ne if self.bias is None else logits_ne + self.bias.float()

    def _choose(self, scores_ne: Tensor) -> Tensor:
        experts = self.experts
        if experts.balance_bias:
            scores_ne = scores_ne + self.balance_bias.float()
        if experts.groups > 1:
            grouped = scores_ne.unflatten(1, (experts.groups, -1))
            best = min(2 if experts.scores == "sigmoid" else 1, grouped.shape[-1])
            top = grouped.topk(best, dim=-1).values.sum(-1).topk(experts.top_groups, dim=-1).indices
            others = torch.ones(grouped.shape[:2], dtype=torch.bool, device=top.device).scatter(1, top, False)
            scores_ne = grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
        chosen_nk: Tensor = top_experts(scores_ne, experts.top_k)
        return chosen_nk

    def _observed(self, logits_ne: Tensor, scores_ne: Tensor, chosen_nk: Tensor) -> Tensor:
        """The scores, whose gradient brings the balancing losses in and counts the tokens of each expert.

        Backward runs once for each micro batch, also where recomputation runs forward twice.
        """
        tokens_e = count_tokens(chosen_nk, self.experts.count)
        weight = self.loss_weight
        if weight is not None and (self.experts.aux_loss or self.experts.z_loss):
            scores_ne = _AddLoss.apply(scores_ne, self._losses(logits_ne, scores_ne, tokens_e), weight)  # type: ignore[no-untyped-call]
        if scores_ne.requires_grad:
            scores_ne.register_hook(lambda _gradient: self._count(tokens_e))
        return scores_ne

    def _losses(self, logits_ne: Tensor, scores_ne: Tensor, tokens_e: Tensor) -> Tensor:
        """Auxiliary loss and z-loss: means over the tokens of one micro batch.

        The auxiliary loss is 1 where tokens and probabilities are spread evenly.
        """
        if self.rows_group is not None:
            # Of the whole micro batch, of which this process has a part.
            dist.all_reduce(tokens_e := tokens_e.clone(), group=self.rows_group)
        share_e = tokens_e / tokens_e.sum()
        probability_e = (scores_ne / scores_ne.sum(-1, keepdim=True)).mean(0)
        even = self.experts.count * (share_e * probability_e).sum()
        return self.experts.aux_loss * even + self.experts.z_loss * logits_ne.logsumexp(-1).square().mean()

    @torch.no_grad()
    def _count(self, tokens_e: Tensor) -> None:
        self.tokens_e = tokens_e if self.tokens_e is None else self.tokens_e + tokens_e

    def take_tokens(self) -> Tensor:
        """Tokens of each expert since the last call, int64 [e]."""
        taken, self.tokens_e = self.tokens_e, None
        if taken is None:
            return torch.zeros(self.experts.count, dtype=torch.int64, device=self.weight.device)
        return taken

    @torch.no_grad()
    def update_bias(self, tokens_e: Tensor, counts: Tensor) -> None:
        """Move each expert's bias towards an even load; `counts` is 1 for a step that updates weights, else 0."""
        # The bias of a frozen router is one of the weights that adapters were trained on.
        if self.experts.balance_bias and self.weight.requires_grad:
            mean = tokens_e.sum() / self.experts.count
            self.balance_bias.add_(torch.sign(mean - tokens_e) * (self.experts.bias_update_rate * counts))


class Experts(nn.Module):
    """The feed-forward blocks of all experts, their weights stacked: FSDP shards them by expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width = config.experts.count, config.expert_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, config.hidden))
        self.down = nn.Parameter(torch.empty(count, config.hidden, width))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.init_std)
        self.swiglu_limit, biased = config.experts.swiglu_limit, config.experts.bias
        self.is_plain = not (self.swiglu_limit or biased)
        self.fp8 = config.linear == "fp8"
        self.gate_up_bias = nn.Parameter(torch.zeros(count, 2 * width)) if biased else None
        self.down_bias = nn.Parameter(torch.zeros(count, config.hidden)) if biased else None

    def forward(self, x_nd: Tensor, weights_nk: Tensor, routes: Routes) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        if self.is_plain:
            gate_up, down = self.gate_up.to(x_nd.dtype), self.down.to(x_nd.dtype)
            # Other precisions are those of evaluations and exports, which compute what they hold.
            return routed_experts(
                x_nd, weights_nk, gate_up, down, routes, fp8=self.fp8 and x_nd.dtype == torch.bfloat16
            )
        weights = ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return biased_experts(x_nd, weights_nk, weights, self.swiglu_limit, routes)


class MoE(nn.Module):
    """Router, experts and the shared expert in place of a block's feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.plan = BlockPlan()
        self.count = config.experts.count
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.experts.shared_ffn_hidden
        self.shared = GatedMLP(replace(config, ffn_hidden=shared)) if shared else None
        self.shared_gate = nn.Linear(config.hidden, 1, bias=False) if config.experts.shared_gate else None
        self.dispatch: Callable[..., Tensor] | None = None
        """Where expert parallelism puts its form of calling the experts."""

    # A compiled block calls it as it is: how many rows an expert gets changes with every call, and its operators are
    # fused already.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_btd: Tensor, residual_btd: Tensor | None = None) -> Tensor:
        """The sub-block's output [b, t, d], before dropout and residual."""
        assert residual_btd is None, "fuses_residual() says no"
        x_nd = x_btd.flatten(0, 1)
        weights_nk, chosen_nk = self.router(x_nd)
        routes = sort_by_expert(chosen_nk, count_tokens(chosen_nk, self.count))
        out_nd: Tensor = (
            self.experts(x_nd, weights_nk, routes)
            if self.dispatch is None
            else self.dispatch(self.experts, x_nd, weights_nk, routes)
        )
        return (out_nd if self.shared is None else out_nd + self._shared(x_nd)).view_as(x_btd)

    def _shared(self, x_nd: Tensor) -> Tensor:
        assert self.shared is not None
        out_nd: Tensor = self.shared(x_nd[None])[0]
        return out_nd if self.shared_gate is None else out_nd * self.shared_gate(x_nd).sigmoid()

    def use(self, plan: BlockPlan) -> None:
        """Compute by this plan, the shared expert too."""
        self.plan = plan
        if self.shared is not None:
            self.shared.plan = plan

    def fuses_residual(self) -> bool:
        """Whether the last matmul may add the residual in its epilogue."""
        return False


def routers(model: nn.Module) -> Iterator[tuple[int, Router]]:
    """Every router of a model or of a stage of one, with the number of its layer."""
    named = ((name.split(".")[1], module) for name, module in model.named_modules() if isinstance(module, Router))
    return ((int(layer), router) for layer, router in named)


def router_health(tokens_le: Tensor, biases: Iterable[Tensor]) -> Tensor:
    """Three numbers about the load of the experts of all layers, in a step, on the device.

    The largest load of an expert over the mean of its layer, in the worst layer; the entropy of the load as a share of
    that of an even one, the mean over layers; and the largest magnitude of a bias.
    """
    share_le = tokens_le.float() / tokens_le.sum(1, keepdim=True).clamp(min=1)
    count = tokens_le.shape[1]
    entropy = torch.special.entr(share_le).sum(1).mean() / math.log(count) if count > 1 else share_le.new_ones(())
    largest = [bias.float().abs().max() for bias in biases]
    bias = torch.stack(largest).max() if largest else share_le.new_zeros(())
    return torch.stack([count * share_le.max(), entropy, bias])


def make_feed_forward(config: ModelConfig, layer: int) -> MoE | GatedMLP | PlainMLP:
    """The feed-forward sub-block of one layer."""
    return MoE(config) if config.has_experts(layer) else make_mlp(config)


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of a model holds next to its trained weights: the routers' biases, by name."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("balance_bias")}


def count_tokens(chosen_nk: Tensor, count: int) -> Tensor:
    """Tokens of each expert, int64 [e]; whole numbers, so the order of adding is free."""
    if chosen_nk.is_cuda:
        # Sums in each processor's own memory: adding to so few places in that of the device would queue.
        return chosen_nk.flatten().histc(bins=count, min=0, max=count)
    ones_m = torch.ones(chosen_nk.numel(), dtype=torch.int64, device=chosen_nk.device)
    return torch.zeros(count, dtype=torch.int64, device=chosen_nk.device).scatter_add(0, chosen_nk.flatten(), ones_m)


class _AddLoss(torch.autograd.Function):
    """Passes `x` on; the gradient of `loss` is `weight`, as if it were part of the loss of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0], weight, None
