"""Parameter names and layouts of Hugging Face families ↔ ours, as rules over tensors.

One rule per parameter of ours: which of their tensors it is packed from, and how to unpack it again. An importer that
goes rule by rule holds one parameter in two layouts at a time, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepstep.config.hf_experts import DEEPSEEK
from keepstep.config.hf_rotary import Family
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, malformed_as
from keepstep.models.attention import pack_qkv, unpack_qkv
from keepstep.models.mlp import gate_blocks, pack_gate_up, unpack_gate_up

BALANCE_BIAS = "gate.e_score_correction_bias"
"""Always fp32 in their files: rounded, it would choose other experts."""


@dataclass(frozen=True)
class Rule:
    """How one parameter of ours is packed from theirs, and unpacked into theirs."""

    ours: str
    theirs: tuple[str, ...]
    pack: Callable[..., Tensor]
    unpack: Callable[[Tensor], tuple[Tensor, ...]]


def import_parameters(
    tensors: Mapping[str, Tensor], config: ModelConfig, family: Family, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters one at a time, each packed when you ask for it; `tensors` may read from disk on demand.

    With `only`, parameters that another pipeline stage holds are not read. A tensor that is missing or left over is an
    error: nothing is dropped silently.
    """
    for rule, names in match_rules(tensors, rules(config, family), config):
        if only is None or rule.ours in only:
            yield rule.ours, pack(rule, (tensors[name] for name in names))


def pack(rule: Rule, tensors: Iterable[Tensor]) -> Tensor:
    """Our parameter from their tensors, read here; an error if they have shapes of another model."""
    with malformed_as(CheckpointError, f"{rule.ours} has another shape", "do config and weights belong together?"):
        return rule.pack(*tensors)


def export_parameters(state: Mapping[str, Tensor], config: ModelConfig, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Their tensors one at a time, unpacked from our parameters or gradients; a tied head is left out."""
    for rule in rules(config, family):
        yield from zip(rule.theirs, rule.unpack(state[rule.ours]), strict=True)


def match_rules(names: Collection[str], rules: Iterable[Rule], config: ModelConfig) -> list[tuple[Rule, list[str]]]:
    """Each rule with the tensors it takes. A tensor that is missing or left over is an error."""
    found = [(rule, [_find(names, name) for name in rule.theirs]) for rule in rules]
    used = {name for _, theirs in found for name in theirs}
    leftover = sorted(name for name in names if name not in used and not _is_derived(name, config))
    if leftover:
        raise CheckpointError(
            f"{len(leftover)} tensors have no place in this model: {', '.join(leftover[:5])}",
            "does config.json belong to these weights?",
        )
    return found


def rules(config: ModelConfig, family: Family) -> Iterator[Rule]:
    """One rule for each of our parameters, in the model's order."""
    match family:
        case "gpt2":
            return _gpt2(config)
        case "mpt":
            return _mpt(config)
        case _:
            return _rotary(config, family)


def _find(tensors: Collection[str], name: str) -> str:
    # Files saved from the bare model, such as the original GPT-2, lack the outer `transformer.` or `model.`.
    for candidate in (name, name.partition(".")[2]):
        if candidate in tensors:
            return candidate
    raise CheckpointError(f"tensor {name} is missing", "does config.json belong to these weights?")


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Whether a tensor follows from others, though some files carry it: causal masks, rope tables, a tied head."""
    masks_and_tables = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
    return name.endswith(masks_and_tables) or (config.tied and name == "lm_head.weight")


_NORMS: Mapping[str, Mapping[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
"""Our norms of a block and theirs, by model.norm_placement."""


def _rotary(config: ModelConfig, family: Family) -> Iterator[Rule]:
    yield vocab_rows("embed.weight", "model.embed_tokens.weight", config)
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        for name, their_name in _NORMS[config.norm_placement].items():
            yield same(f"{ours}{name}.weight", f"{theirs}{their_name}.weight")
        if config.kv_lora_rank:
            yield from _latent_attention(ours + "attention.", theirs + "self_attn.", config)
        for kind in () if config.kv_lora_rank else _kinds(config.bias or config.qkv_bias):
            qkv = ours + f"attention.qkv.{kind}"
            if family == "phi3":
                yield _fused_qkv(qkv, theirs + f"self_attn.qkv_proj.{kind}", config, transposed=False)
            else:
                yield _separate_qkv(qkv, theirs + "self_attn.", kind, config)
        for kind in _kinds(config.bias or config.out_bias):
            yield same(ours + f"attention.out.{kind}", theirs + f"self_attn.o_proj.{kind}")
        if config.attention_sinks:
            yield same(ours + "attention.sinks", theirs + "self_attn.sinks")
        if config.qk_norm:
            yield same(ours + "attention.query_norm.weight", theirs + "self_attn.q_norm.weight")
            yield same(ours + "attention.key_norm.weight", theirs + "self_attn.k_norm.weight")
        if config.has_experts(layer):
            experts = _stacked_experts if family == "gpt_oss" else _experts
            yield from experts(ours + "mlp.", theirs, config, family)
            continue
        for kind in _kinds(config.bias):
            gate_up = _fused_gate_up if family == "phi3" else _gate_up
            yield gate_up(ours + f"mlp.gate_up.{kind}", theirs + "mlp.", kind, config)
            yield same(ours + f"mlp.down.{kind}", theirs + f"mlp.down_proj.{kind}")
    yield same("norm.weight", "model.norm.weight")
    if not config.tied:
        yield vocab_rows("head.weight", "lm_head.weight", config)


def _experts(ours: str, layer: str, config: ModelConfig, family: Family) -> Iterator[Rule]:
    """Router, experts and shared expert of one layer: ours are stacked, theirs have a tensor for each expert."""
    theirs = layer + ("block_sparse_moe." if family == "mixtral" else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    count = config.experts.count
    yield same(ours + "router.weight", theirs + "gate.weight")
    if config.experts.balance_bias:
        yield same(ours + "router.balance_bias", theirs + BALANCE_BIAS)
    each = [f"{theirs}experts.{number}." for number in range(count)]
    yield Rule(
        ours + "experts.gate_up",
        tuple(f"{expert}{part}.weight" for expert in each for part in (gate, up)),
        lambda *parts: torch.cat(parts).unflatten(0, (count, -1)),
        lambda stacked: tuple(part for expert in stacked.unbind() for part in expert.chunk(2)),
    )
    yield Rule(
        ours + "experts.down",
        tuple(f"{expert}{down}.weight" for expert in each),
        lambda *parts: torch.stack(parts),
        lambda stacked: stacked.unbind(),
    )
    if config.experts.shared_ffn_hidden:
        shared = replace(config, ffn_hidden=config.experts.shared_ffn_hidden)
        name = "shared_experts." if family in DEEPSEEK else "shared_expert."
        yield _gate_up(ours + "shared.gate_up.weight", theirs + name, "weight", shared)
        yield same(ours + "shared.down.weight", theirs + name + "down_proj.weight")
    if config.experts.shared_gate:
        yield same(ours + "shared_gate.weight", theirs + "shared_expert_gate.weight")


def _latent_attention(ours: str, theirs: str, config: ModelConfig) -> Iterator[Rule]:
    rotated, head_size, rank = config.qk_rope_head_dim, config.head_size, config.kv_lora_rank
    query = "q_proj.weight"
    if config.q_lora_rank:
        query = "q_b_proj.weight"
        yield same(ours + "query_down.weight", theirs + "q_a_proj.weight")
        yield same(ours + "query_norm.weight", theirs + "q_a_layernorm.weight")
    yield _rotated_rows(ours + "query_up.weight", theirs + query, head_size, rotated)
    yield _rotated_rows(ours + "key_value_down.weight", theirs + "kv_a_proj_with_mqa.weight", rank + rotated, rotated)
    yield same(ours + "key_value_norm.weight", theirs + "kv_a_layernorm.weight")
    yield same(ours + "key_value_up.weight", theirs + "kv_b_proj.weight")


def _rotated_rows(ours: str, theirs: str, size: int, rotated: int) -> Rule:
    """Groups of `size` rows, whose last ones RoPE rotates: theirs in neighbouring pairs, ours row i with i + half."""
    kept = size - rotated
    order = torch.tensor([*range(kept), *range(kept, size, 2), *range(kept + 1, size, 2)])

    def moved(rows: Tensor, order: Tensor) -> Tensor:
        return rows.reshape(-1, size, *rows.shape[1:])[:, order].flatten(0, 1)

    return Rule(ours, (theirs,), lambda rows: moved(rows, order), lambda rows: (moved(rows, order.argsort()),))


def _stacked_experts(ours: str, layer: str, _config: ModelConfig, _family: Family) -> Iterator[Rule]:
    """Theirs are stacked too, [e, inputs, outputs], and gate and up outputs alternate."""
    theirs = layer + "mlp."
    for kind in ("weight", "bias"):
        yield same(f"{ours}router.{kind}", f"{theirs}router.{kind}")
    for end in ("", "_bias"):
        yield Rule(
            f"{ours}experts.gate_up{end}",
            (f"{theirs}experts.gate_up_proj{end}",),
            lambda fused: torch.cat((fused[..., ::2], fused[..., 1::2]), dim=-1).movedim(-1, 1).contiguous(),
            lambda packed: (torch.stack(packed.chunk(2, dim=1), dim=2).flatten(1, 2).movedim(1, -1).contiguous(),),
        )
    yield Rule(
        f"{ours}experts.down",
        (f"{theirs}experts.down_proj",),
        lambda tensor: tensor.mT.contiguous(),
        lambda tensor: (tensor.mT.contiguous(),),
    )
    yield same(f"{ours}experts.down_bias", f"{theirs}experts.down_proj_bias")


def _mpt(config: ModelConfig) -> Iterator[Rule]:
    yield vocab_rows("embed.weight", "transformer.wte.weight", config)
    if config.positions == "learned":
        yield same("position.weight", "transformer.wpe.weight")
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.blocks.{layer}."
        for kind in _kinds(config.bias):
            yield same(ours + f"attention_norm.{kind}", theirs + f"norm_1.{kind}")
            yield _fused_qkv(ours + f"attention.qkv.{kind}", theirs + f"attn.Wqkv.{kind}", config, transposed=False)
            yield same(ours + f"attention.out.{kind}", theirs + f"attn.out_proj.{kind}")
            yield same(ours + f"mlp_norm.{kind}", theirs + f"norm_2.{kind}")
            yield same(ours + f"mlp.up.{kind}", theirs + f"ffn.up_proj.{kind}")
            yield same(ours + f"mlp.down.{kind}", theirs + f"ffn.down_proj.{kind}")
    for kind in _kinds(config.bias):
        yield same(f"norm.{kind}", f"transformer.norm_f.{kind}")
    if not config.tied:
        yield vocab_rows("head.weight", "lm_head.weight", config)


def _gpt2(config: ModelConfig) -> Iterator[Rule]:
    # GPT-2 stores the weights of its linears as [in, out].
    yield vocab_rows("embed.weight", "transformer.wte.weight", config)
    yield same("position.weight", "transformer.wpe.weight")
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind, alike in (("weight", _transposed), ("bias", same)):
            qkv, flip = theirs + f"attn.c_attn.{kind}", kind == "weight"
            yield same(ours + f"attention_norm.{kind}", theirs + f"ln_1.{kind}")
            yield _fused_qkv(ours + f"attention.qkv.{kind}", qkv, config, transposed=flip)
            yield alike(ours + f"attention.out.{kind}", theirs + f"attn.c_proj.{kind}")
            yield same(ours + f"mlp_norm.{kind}", theirs + f"ln_2.{kind}")
            yield alike(ours + f"mlp.up.{kind}", theirs + f"mlp.c_fc.{kind}")
            yield alike(ours + f"mlp.down.{kind}", theirs + f"mlp.c_proj.{kind}")
    for kind in ("weight", "bias"):
        yield same(f"norm.{kind}", f"transformer.ln_f.{kind}")
    if not config.tied:
        yield vocab_rows("head.weight", "lm_head.weight", config)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def same(ours: str, theirs: str) -> Rule:
    """A parameter with the same layout on both sides."""
    return Rule(ours, (theirs,), lambda tensor: tensor, lambda tensor: (tensor,))


def _transposed(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda tensor: tensor.t().contiguous(), lambda tensor: (tensor.t().contiguous(),))


def vocab_rows(ours: str, theirs: str, config: ModelConfig) -> Rule:
    """Embedding or head: ours has zero rows up to the padded vocabulary."""

    def pack(tensor: Tensor) -> Tensor:
        padding = config.padded_vocab - tensor.shape[0]
        if padding < 0:
            raise CheckpointError(
                f"{theirs} has {tensor.shape[0]} rows, more than model.vocab ({config.vocab})",
                "does config.json belong to these weights? set no model.vocab below theirs",
            )
        return torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]) if padding else tensor

    return Rule(ours, (theirs,), pack, lambda tensor: (tensor[: config.vocab],))


def _separate_qkv(ours: str, prefix: str, kind: str, config: ModelConfig) -> Rule:
    ratio = config.heads // config.key_value_heads
    return Rule(
        ours,
        tuple(f"{prefix}{part}_proj.{kind}" for part in "qkv"),
        lambda query, key, value: pack_qkv(query, key, value, config.head_size),
        lambda packed: unpack_qkv(packed, ratio, config.head_size),
    )


def _fused_qkv(ours: str, theirs: str, config: ModelConfig, *, transposed: bool) -> Rule:
    """Theirs is all queries, then all keys, then all values; ours groups them by key-value head."""
    ratio, head_size = config.heads // config.key_value_heads, config.head_size
    query_end = config.heads * head_size
    key_end = query_end + config.key_value_heads * head_size

    def pack(fused: Tensor) -> Tensor:
        rows = fused.t() if transposed else fused
        return pack_qkv(rows[:query_end], rows[query_end:key_end], rows[key_end:], head_size)

    def unpack(packed: Tensor) -> tuple[Tensor, ...]:
        fused = torch.cat(unpack_qkv(packed, ratio, head_size))
        return (fused.t().contiguous() if transposed else fused,)

    return Rule(ours, (theirs,), pack, unpack)


def _gate_up(ours: str, prefix: str, kind: str, config: ModelConfig) -> Rule:
    blocks = gate_blocks(config)
    return Rule(
        ours,
        (f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}"),
        lambda gate, up: pack_gate_up(gate, up, blocks),
        lambda packed: unpack_gate_up(packed, blocks),
    )


def _fused_gate_up(ours: str, prefix: str, kind: str, config: ModelConfig) -> Rule:
    """Theirs is all gate rows, then all up rows; ours has them in blocks."""
    blocks, width = gate_blocks(config), config.ffn_size
    return Rule(
        ours,
        (f"{prefix}gate_up_proj.{kind}",),
        lambda fused: pack_gate_up(fused[:width], fused[width:], blocks),
        lambda packed: (torch.cat(unpack_gate_up(packed, blocks)),),
    )
