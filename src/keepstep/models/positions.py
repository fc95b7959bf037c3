"""Position encodings: document-relative positions, RoPE angles, ALiBi slopes.

Shape legend: b rows, t tokens, f rotary frequencies (half the rotated channels), g key-value heads, r query
heads a key-value head, n heads, e head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keepstep.config.schema import ModelConfig
from keepstep.core.errors import ConfigError


def document_positions(documents_bt: Tensor) -> Tensor:
    """Positions that start again at 0 with each document; a document is a run of equal numbers."""
    index_t = torch.arange(documents_bt.shape[1], device=documents_bt.device)
    # Rolled, the first token meets the row's last; its index is 0, so a false start there changes nothing.
    starts_bt = torch.where(documents_bt != documents_bt.roll(1, dims=1), index_t, 0)
    return index_t - starts_bt.cummax(dim=1).values


def text_lengths(positions_bt: Tensor) -> Tensor:
    """The length of the text that each token is in, as its last position says; positions start again with a text."""
    index_t = torch.arange(positions_bt.shape[1], device=positions_bt.device)
    follows_bt = positions_bt.roll(-1, dims=1) > positions_bt
    last_bt = (
        torch.where(follows_bt & (index_t < index_t[-1]), index_t[-1], index_t).flip(1).cummin(dim=1).values.flip(1)
    )
    return positions_bt.gather(1, last_bt) + 1


def rope_frequencies(config: ModelConfig, device: torch.device, lengths_bt: Tensor | None = None) -> Tensor:
    """Radians a token for each pair of a head's channels, in fp32, with `rotary_scaling` applied: [f], or [b, t, f] for
    scalings that depend on the length of each token's text.

    Computed when needed instead of kept in a buffer: `model.to(bfloat16)` or a meta-device build cannot spoil it.
    """
    size = config.rotary_size
    exponent_f = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequency_f = 1.0 / (config.rotary_base**exponent_f)
    scaling = config.rotary_scaling
    if not scaling:
        return frequency_f
    match scaling.get("rope_type", scaling.get("type", "default")):
        case "default":
            return frequency_f
        case "linear":
            return frequency_f / _scaling_value(scaling, "factor")
        case "llama3":
            return _llama3_frequencies(frequency_f, scaling)
        case "yarn":
            return _yarn_frequencies(frequency_f, scaling, size, config.rotary_base)
        case "longrope":
            short_f, long_f = (torch.tensor(scaling[key], device=device) for key in ("short_factor", "long_factor"))
            return frequency_f / (
                short_f if lengths_bt is None else torch.where(_is_long(scaling, lengths_bt), long_f, short_f)
            )
        case "dynamic":
            return frequency_f if lengths_bt is None else _dynamic_frequencies(frequency_f, scaling, lengths_bt)
        case other:
            raise ConfigError(
                f"model.rotary_scaling has rope_type {other!r}",
                "known types: default, linear, dynamic, llama3, yarn, longrope",
            )


def _llama3_frequencies(frequency_f: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    # Wavelengths longer than the original context are stretched by `factor`, short ones kept, those between blended.
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, context = (_scaling_value(scaling, key) for key in keys)
    wavelength_f = 2 * math.pi / frequency_f
    blend_f = ((context / wavelength_f - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend_f) * frequency_f / factor + blend_f * frequency_f


def _yarn_frequencies(frequency_f: Tensor, scaling: Mapping[str, Any], head_size: int, base: float) -> Tensor:
    """Channels that rotate often within the original context keep their frequency, slow ones are stretched.

    Between the channels that rotate `beta_fast` and `beta_slow` times in it, both are blended.
    """
    factor, context = (_scaling_value(scaling, key) for key in ("factor", "original_max_position_embeddings"))

    def channel_of(rotations: float) -> float:
        return head_size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel_of(scaling.get("beta_fast") or 32), channel_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    channel_f = torch.arange(frequency_f.numel(), dtype=torch.float32, device=frequency_f.device)
    stretched_f = ((channel_f - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return frequency_f / factor * stretched_f + frequency_f * (1 - stretched_f)


def _is_long(scaling: Mapping[str, Any], lengths_bt: Tensor) -> Tensor:
    return lengths_bt[..., None] > _scaling_value(scaling, "original_max_position_embeddings")


def _dynamic_frequencies(frequency_f: Tensor, scaling: Mapping[str, Any], lengths_bt: Tensor) -> Tensor:
    """Longer texts than the model was trained with have a larger base (dynamic NTK)."""
    factor, context = (_scaling_value(scaling, key) for key in ("factor", "original_max_position_embeddings"))
    growth_bt1 = factor * lengths_bt[..., None].clamp(min=context) / context - (factor - 1)
    count = frequency_f.numel()
    exponent_f = torch.arange(count, dtype=torch.float32, device=frequency_f.device) / max(count - 1, 1)
    return frequency_f / growth_bt1**exponent_f


def _amplitude(scaling: Mapping[str, Any]) -> float:
    """What cosine and sine are multiplied by: attention is a little sharper the longer the context of the model."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor"):
        return float(scaling["attention_factor"])
    if kind == "longrope":
        factor, context = (_scaling_value(scaling, key) for key in ("factor", "original_max_position_embeddings"))
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(context))
    growth = math.log(max(_scaling_value(scaling, "factor"), 1.0))
    sharp, smooth = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if sharp and smooth:
        return float((0.1 * sharp * growth + 1.0) / (0.1 * smooth * growth + 1.0))
    return 0.1 * growth + 1.0


def _scaling_value(scaling: Mapping[str, Any], key: str) -> float:
    if key not in scaling:
        raise ConfigError(f"model.rotary_scaling lacks {key}", f"it has {', '.join(sorted(scaling))}")
    return float(scaling[key])


def rope_tables(config: ModelConfig, positions_bt: Tensor, longest: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, fp32 [b, t, f]; made once a forward and shared by all blocks.

    `longest` is how long the texts in a key-value cache may become, [b, 1] where they differ. Scalings that depend on
    the length of a text use it in place of the length: keys in the cache cannot change when the text grows.
    """
    lengths_bt = None
    if config.scales_rope_by_length:
        cached = isinstance(longest, Tensor) or longest > 0
        lengths_bt = positions_bt * 0 + longest if cached else text_lengths(positions_bt)
    angle_btf = positions_bt.float()[..., None] * rope_frequencies(config, positions_bt.device, lengths_bt)
    amplitude = _amplitude(config.rotary_scaling or {})
    if amplitude == 1.0:
        return angle_btf.cos(), angle_btf.sin()
    return angle_btf.cos() * amplitude, angle_btf.sin() * amplitude


def apply_rope(x_btge: Tensor, cos_btf: Tensor, sin_btf: Tensor) -> Tensor:
    """Rotate each head by its token's angles, in fp32: keys [b, t, g, e] or queries [b, t, g, r, e].

    Channel i is paired with channel i + f; channels from 2·f on stay as they are.
    """
    heads = (1,) * (x_btge.dim() - 3)
    cos, sin = (table.view(*table.shape[:2], *heads, table.shape[2]) for table in (cos_btf, sin_btf))
    half = cos.shape[-1]
    first, second, rest = x_btge.float().split((half, half, x_btge.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x_btge.dtype)


def alibi_slopes(heads: int, bias_max: float, device: torch.device) -> Tensor:
    """One slope a head, fp32 [n]: geometric from 2^(-bias_max/n) down to 2^-bias_max, MPT's order for odd counts."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes_n = torch.pow(2.0, -torch.arange(1, power + 1, dtype=torch.float32, device=device) * (bias_max / power))
    if power == heads:
        return slopes_n
    return torch.cat([slopes_n[1::2], slopes_n[::2]])[:heads]
