"""How large a model is and what a token costs, from its shape alone. No torch: planning and reporting share it."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.config.schema import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """All parameters, exactly as the built model holds them; a tied head counts once."""
    embedding = config.padded_vocab * config.hidden
    positions = config.position_rows * config.hidden if config.positions == "learned" else 0
    head = 0 if config.tied else embedding
    return embedding + positions + all_block_parameters(config) + norm_parameters(config) + head


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all but those of the experts that its router does not choose."""
    experts = config.experts
    expert = 3 * config.hidden * config.expert_size + (_expert_biases(config) if experts.bias else 0)
    unused = config.expert_layers * (experts.count - experts.top_k) * expert
    return parameter_count(config) - unused


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters that every token is multiplied with: the matrices of the blocks and the head, tied or not.

    Of experts these are the ones that a token uses. The input embedding and learned positions are looked up, and norms
    and biases cost next to nothing: left out.
    """
    ordinary = config.layers - config.expert_layers
    feed_forward = ordinary * _mlp_matrices(config) + config.expert_layers * expert_matrices(config, active=True)
    return config.layers * sum(attention_matrices(config)) + feed_forward + config.padded_vocab * config.hidden


def flops_per_token(config: ModelConfig, seq_len: int, *, frozen: bool = False) -> int:
    """Floating-point operations of forward and backward for one token in a row of `seq_len`.

    Six for each multiplied parameter, and twelve for each layer, attention channel and token of the row: attention is
    counted as if nothing were masked, as is usual. Of experts those that a token uses count. `frozen` weights
    need no gradients: four each.
    """
    attention = 6 * config.layers * config.heads * (config.head_size + config.value_size) * seq_len
    return (4 if frozen else 6) * matmul_parameters(config) + attention


def mfu(tokens_per_s: float, config: ModelConfig, seq_len: int, peak_flops: float) -> float:
    """Model FLOP utilisation of one device: the share of its peak that `tokens_per_s` on it amounts to."""
    return tokens_per_s * flops_per_token(config, seq_len) / peak_flops


def mfu_llm_foundry(tokens_per_s: float, config: ModelConfig, seq_len: int, peak_flops: float) -> float:
    """The same by llm-foundry's formula, which counts all parameters: for comparison with its published tables."""
    flops_per_row = 3 * (2 * parameter_count(config) * seq_len + 4 * config.layers * config.hidden * seq_len**2)
    return tokens_per_s / seq_len * flops_per_row / peak_flops


def attention_matrices(config: ModelConfig) -> tuple[int, ...]:
    """Parameters of each matrix of one block's attention, the output projection last."""
    hidden, query = config.hidden, config.heads * config.head_size
    out = config.heads * config.value_size * hidden
    if not config.kv_lora_rank:
        return hidden * (query + 2 * config.key_value_heads * config.head_size), out
    rank, rotated = config.q_lora_rank, config.qk_rope_head_dim
    queries = (hidden * rank, rank * query) if rank else (hidden * query,)
    expanded = config.heads * (config.head_size - rotated + config.value_size)
    return *queries, hidden * (config.kv_lora_rank + rotated), config.kv_lora_rank * expanded, out


def latent_matrices(config: ModelConfig) -> int:
    """Parameters of the matrices that make latents, which tensor parallelism leaves whole."""
    if not config.kv_lora_rank:
        return 0
    return config.hidden * (config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim)


def _mlp_matrices(config: ModelConfig) -> int:
    return (3 if config.gated else 2) * config.hidden * config.ffn_size


def expert_matrices(config: ModelConfig, *, active: bool) -> int:
    """Parameters of one layer's router, experts and shared expert; of `active` experts, those that a token uses."""
    experts = config.experts
    width = (experts.top_k if active else experts.count) * config.expert_size + experts.shared_ffn_hidden
    return config.hidden * (experts.count + int(experts.shared_gate) + 3 * width)


def _expert_biases(config: ModelConfig) -> int:
    return 2 * config.expert_size + config.hidden


def active_width(config: ModelConfig) -> int:
    """Inner width of the feed-forward that one token passes in a block; the mean where some blocks have experts."""
    experts, layers = config.experts, config.expert_layers
    width = experts.top_k * config.expert_size + experts.shared_ffn_hidden
    return ((config.layers - layers) * config.ffn_size + layers * width) // config.layers


def token_copies(config: ModelConfig) -> float:
    """Copies of a token that a block sorts by expert; the mean over all blocks, 0 without experts."""
    return config.experts.top_k * config.expert_layers / config.layers


def all_block_parameters(config: ModelConfig) -> int:
    """Parameters of all blocks."""
    experts = config.expert_layers
    difference = expert_matrices(config, active=False) - _mlp_matrices(config) if experts else 0
    if config.experts.bias:
        difference += config.experts.count * (1 + _expert_biases(config))
    return config.layers * _ordinary_block(config) + experts * difference


def block_parameters(config: ModelConfig) -> int:
    """Parameters of one block; the mean, rounded up, where some have experts and others have not."""
    return -(-all_block_parameters(config) // config.layers)


def _ordinary_block(config: ModelConfig) -> int:
    qkv_rows = (config.heads + 2 * config.key_value_heads) * config.head_size
    biases = qkv_rows if config.bias or config.qkv_bias else 0
    biases += config.hidden if config.bias or config.out_bias else 0
    if config.bias:
        biases += (2 if config.gated else 1) * config.ffn_size + config.hidden
    biases += config.heads if config.attention_sinks else 0
    return sum(attention_matrices(config)) + _mlp_matrices(config) + biases + block_norm_parameters(config)


def block_norm_parameters(config: ModelConfig) -> int:
    """Parameters of one block's norms, those of queries, keys and latents included."""
    heads = 2 if config.head_qk_norm else config.heads + config.key_value_heads
    qk_norms = heads * config.head_size if config.qk_norm else 0
    latents = config.kv_lora_rank + config.q_lora_rank
    return qk_norms + latents + (4 if config.norm_placement == "both" else 2) * norm_parameters(config)


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of one norm."""
    return config.hidden * (2 if config.norm == "layernorm" and config.bias else 1)


PEAK_FLOPS: Mapping[str, Mapping[str, float]] = {
    "GB200": {"bf16": 2500e12, "fp16": 2500e12, "fp8": 5000e12},
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
    "H200": {"bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12, "fp32": 66.9e12},
    "H100 PCIe": {"bf16": 756.5e12, "fp16": 756.5e12, "fp8": 1513e12, "fp32": 51.2e12},
    "H100 NVL": {"bf16": 835.5e12, "fp16": 835.5e12, "fp8": 1671e12, "fp32": 60e12},
    "H100": {"bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12, "fp32": 66.9e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
}
"""Dense FLOP/s from the makers' data sheets by a part of the device's name; the first that fits counts."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak of the named device in this precision; None if it is not known (for example for a CPU)."""
    for part, by_precision in PEAK_FLOPS.items():
        if part.lower() in device_name.lower():
            return by_precision.get(precision)
    return None
