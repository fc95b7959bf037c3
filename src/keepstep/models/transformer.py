"""The decoder: embed, blocks, norm, head. MPT, GPT-3, Llama and their kin are values of `ModelConfig`.

Shape legend: b rows, t tokens, d hidden, v rows of the head (vocabulary with padding).
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from keepstep.config.check import check_shape
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import UsageError
from keepstep.models.attention import Attention
from keepstep.models.attention_context import Context, KeyValueCache, make_context
from keepstep.models.block_plan import BlockPlan
from keepstep.models.head import Head, capped_output, head_output, token_losses
from keepstep.models.latent_attention import LatentAttention
from keepstep.models.mlp import GatedMLP
from keepstep.models.moe import MoE, make_feed_forward
from keepstep.models.norm import add_norm, fp8_add_norm, is_fused, make_norm
from keepstep.models.ops.backend import backend
from keepstep.models.ops.varlen_attention import VarlenSpans
from keepstep.models.positions import document_positions


class Block(nn.Module):
    """Attention and feed-forward, each normalised before, after or both, and added back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.residual_multiplier = config.residual_multiplier
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.attention_norm = make_norm(config) if before else None
        self.attention = (LatentAttention if config.kv_lora_rank else Attention)(config, layer)
        self.attention_post_norm = make_norm(config) if after else None
        self.mlp_norm = make_norm(config) if before else None
        self.mlp = make_feed_forward(config, layer)
        self.mlp_post_norm = make_norm(config) if after else None
        self.plan = BlockPlan()

    def use(self, plan: BlockPlan) -> None:
        """Compute by this plan from now on."""
        self.plan = self.attention.plan = self.mlp.plan = plan
        if isinstance(self.mlp, MoE):
            self.mlp.use(plan)

    def forward(self, x_btd: Tensor, context: Context, added_btd: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is still to be added to it: accepted and returned alike."""
        x_btd, normed_btd = self._add_norm(x_btd, added_btd, self.attention_norm, self.attention)
        if self._fuses_residual() and backend().fuses_matmuls(x_btd):
            x_btd, normed_btd = add_norm(self.attention(normed_btd, context, x_btd), None, self.mlp_norm)
            return self.mlp(normed_btd, x_btd), None
        attended_btd = self._to_add(self.attention(normed_btd, context), self.attention_post_norm)
        x_btd, normed_btd = self._add_norm(x_btd, attended_btd, self.mlp_norm, self.mlp)
        added_btd = self._to_add(self.mlp(normed_btd), self.mlp_post_norm)
        return (x_btd, added_btd) if self.plan.deferred_add else (x_btd + added_btd, None)

    def _add_norm(
        self, x_btd: Tensor, added_btd: Tensor | None, norm: nn.Module | None, sub_block: nn.Module
    ) -> tuple[Tensor, Any]:
        """The residual stream and its norm: in fp8, `Fp8Rows`, for a sub-block that only multiplies it so."""
        takes_fp8 = isinstance(sub_block, Attention | GatedMLP) and sub_block.takes_fp8()
        if takes_fp8 and is_fused(norm, x_btd):
            return fp8_add_norm(x_btd, added_btd, norm.weight, norm.eps)
        return add_norm(x_btd, added_btd, norm)

    def _to_add(self, output_btd: Tensor, norm: nn.Module | None) -> Tensor:
        """What a sub-block adds to the residual stream."""
        if norm is not None:
            output_btd = norm(output_btd)
        if self.residual_multiplier != 1.0:
            output_btd = output_btd * self.residual_multiplier
        return F.dropout(output_btd, self.dropout, self.training)

    def _fuses_residual(self) -> bool:
        """Whether both sub-blocks add to the residual stream in the epilogues of their last matmuls."""
        changes = (self.dropout > 0 and self.training) or self.residual_multiplier != 1.0
        if changes or self.attention_post_norm is not None:
            return False
        return self.plan.deferred_add and self.attention.fuses_residual() and self.mlp.fuses_residual()


class Transformer(nn.Module):
    """A decoder-only language model.

    Build it on the meta device, spread it over processes, `to_empty()`, then `init_weights`. With a tied head the
    embedding's weights are used outside the embedding's own call, so FSDP must gather them with the root.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_shape(config)
        fix_cpu_matmuls()
        self.config = config
        self.embed = nn.Embedding(config.padded_vocab, config.hidden)
        self.position = nn.Embedding(config.position_rows, config.hidden) if config.positions == "learned" else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.layers)})
        self.norm: nn.Module | None = make_norm(config)
        self.head = None if config.tied else Head(config.hidden, config.padded_vocab, config.vocab)
        # Where tensor and context parallelism put their own form of the same computation.
        self.make_context: Callable[..., Context] = make_context
        self.tied_output: Callable[..., Tensor] = head_output
        self.tied_losses: Callable[..., Tensor] = token_losses
        cap = config.final_logit_softcapping
        if cap:
            self.tied_output = functools.partial(capped_output, cap=cap)
            self.tied_losses = functools.partial(token_losses, cap=cap)
            if self.head is not None:
                self.head.output, self.head.each_loss = self.tied_output, self.tied_losses

    def forward(
        self,
        tokens_bt: Tensor,
        targets_bt: Tensor | None = None,
        *,
        positions_bt: Tensor | None = None,
        documents_bt: Tensor | None = None,
        spans: VarlenSpans | None = None,
        loss_chunks: int = 0,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
        each_loss: bool = False,
    ) -> Tensor:
        """Logits [b, t, v] without targets; with them the sum of token losses, an fp32 scalar.

        With `each_loss` and targets the loss of each token [b, t], for objectives that are no sum over tokens.

        With `last_only` logits [b, 1, v] of each row's last token: decoding needs no others, and those of whole prompts
        take more memory than the model.

        A target of IGNORE_INDEX adds no loss. `documents_bt` numbers the documents packed into a row: tokens attend
        within their own, and positions start again with each unless `positions_bt` is given. `spans` say the same to
        attention without a mask (`models/ops/varlen_attention.py`). With a cache the tokens follow those it holds.

        A stage of a pipeline holds a part of the blocks. It takes the residual stream of the stage before (numbers with
        a fraction, and explicit positions) in place of tokens, and without a norm of its own hands the stream on.
        """
        self._check_room(tokens_bt.shape[1], documents_bt, cache)
        if positions_bt is None and cache is not None:
            positions_bt = cache.positions(tokens_bt.shape[1], tokens_bt.device)
        elif positions_bt is None and documents_bt is not None:
            positions_bt = document_positions(documents_bt)
        elif positions_bt is None:
            positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)[None]
        x_btd = tokens_bt if tokens_bt.is_floating_point() else self._embed(tokens_bt, positions_bt)
        context = self.make_context(self.config, x_btd, positions_bt, documents_bt, cache, spans)
        added_btd: Tensor | None = None
        for block in self.blocks.values():
            x_btd, added_btd = block(x_btd, context, added_btd)
        if self.norm is None:
            return x_btd if added_btd is None else x_btd + added_btd
        _, x_btd = add_norm(x_btd, added_btd, self.norm)
        if cache is not None:
            cache.advance(tokens_bt.shape[1])
        if last_only:
            x_btd = x_btd[:, -1:]
        if self.config.logits_scaling != 1.0:
            x_btd = x_btd / self.config.logits_scaling
        if self.head is None:
            compute = self.tied_losses if each_loss else self.tied_output
            return compute(x_btd, self.embed.weight, targets_bt, self.config.vocab, loss_chunks)
        output: Tensor = self.head(x_btd, targets_bt, loss_chunks, each=each_loss)
        return output

    def _embed(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        x_btd: Tensor = self.embed(tokens_bt)
        if self.config.embedding_multiplier != 1.0:
            # Rounded to the precision of the embeddings, as Gemma was trained.
            x_btd = x_btd * torch.tensor(self.config.embedding_multiplier, dtype=x_btd.dtype, device="cpu").item()
        if self.position is not None:
            x_btd = x_btd + self.position(positions_bt)
        # The embedding's own mode: a stage shares modules with the model that is set to evaluate, but not its flag.
        return F.dropout(x_btd, self.config.dropout, self.embed.training)

    def _check_room(self, tokens: int, documents_bt: Tensor | None, cache: KeyValueCache | None) -> None:
        """Raise where these tokens do not fit."""
        past = 0
        if cache is not None:
            if documents_bt is not None:
                raise UsageError("packed documents cannot be used with a key-value cache", "put one document in a row")
            cache.check_room(tokens)
            past = cache.length
        # A document inside a row may be short enough: then its positions are, whatever the row's length.
        if self.position is not None and documents_bt is None and past + tokens > self.config.position_rows:
            raise UsageError(
                f"{past + tokens} tokens are more than the {self.config.position_rows} learned positions",
                "shorten the text, or train with a larger model.max_positions",
            )


def use_fp8_head(model: Transformer) -> None:
    """Let the head compute its gradients by fp8 matmuls; one with soft-capped logits stays as it is."""
    if model.config.final_logit_softcapping:
        return
    model.tied_output = functools.partial(head_output, fp8=True)
    if model.head is not None:
        model.head.output = model.tied_output


def add_embedding_noise(model: Transformer, alpha: float, row_parts: int = 1) -> None:
    """NEFTune: add noise in ±alpha / √(tokens × hidden) to what the embedding returns; evaluation is left alone.

    It makes fine-tuned answers less brittle. Tokens are those of a whole row, of which `row_parts` processes hold a
    part each. A later stage of a pipeline embeds nothing and gets no noise.
    """
    if model._modules["embed"] is None:
        return

    def noisy(_module: Any, _inputs: Any, embedded_btd: Tensor) -> Tensor:
        if not model.training:
            return embedded_btd
        bound = alpha / math.sqrt(embedded_btd.shape[1] * row_parts * embedded_btd.shape[2])
        # The blocks get the noise multiplied like the embeddings.
        bound /= model.config.embedding_multiplier
        return embedded_btd + torch.empty_like(embedded_btd).uniform_(-bound, bound)

    model.embed.register_forward_hook(noisy)


@functools.cache
def fix_cpu_matmuls() -> None:
    """Decide once whether fp32 matmuls use oneDNN; called before the first model is built.

    On Arm, torch tries oneDNN for bf16 matmuls on every CPU. If the CPU has no bf16 instructions, the first try fails
    and torch switches oneDNN off for the rest of the process, so later fp32 results have other bits. Switching it off
    from the start keeps them equal. On x86, torch asks the CPU first and switches nothing.
    """
    if platform.machine() in ("aarch64", "arm64") and not computes_bf16():
        torch.backends.mkldnn.set_flags(False)


def computes_bf16() -> bool:
    """Whether oneDNN computes bf16 on this CPU. True where torch has no oneDNN: then nothing can be switched off."""
    return not torch.backends.mkldnn.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
