"""Every setting of keepstep: frozen dataclasses, one section per part.

Each field has its range in its type and its help in the text below it. `keepstep config reference`, `--help` and the
JSON Schema for editors are made from these. Each part gets its own section; the entry points get the whole RunConfig.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from keepstep.config.ranges import (
    BoolOrAuto,
    Fraction,
    FractionBelowOne,
    ModelSize,
    ModelSizeOrZero,
    NonNegativeDuration,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveDuration,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Range,
)
from keepstep.core.units import ByteSize, Duration


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: a layer has `count` small feed-forward blocks, and a router chooses `top_k` of them for each
    token. No token is dropped."""

    count: ModelSizeOrZero = 0
    """Experts of a layer; 0 means an ordinary feed-forward block in every layer."""
    top_k: ModelSize = 2
    """Experts that each token uses."""
    ffn_hidden: ModelSizeOrZero = 0
    """Inner width of one expert; 0 means the width of the ordinary feed-forward block."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    normalize: bool = True
    """Divide the scores of a token's experts by their sum."""
    scale: PositiveFloat = 1.0
    """The scores of a token's experts are multiplied by this."""
    shared_ffn_hidden: ModelSizeOrZero = 0
    """Inner width of the shared expert, which every token uses; 0 means none. Several shared experts are one of their
    added widths."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate, as Qwen2-MoE does."""
    groups: ModelSize = 1
    """Experts are divided into this many groups, and a token uses experts of `top_groups` of them only."""
    top_groups: ModelSize = 1
    """With `groups`: the best groups for a token. A group counts as its best expert, with sigmoid scores as the sum of
    its two best."""
    first_dense_layers: NonNegativeInt = 0
    """The first layers, which have an ordinary feed-forward block."""
    layer_interval: PositiveInt = 1
    """Of the other layers, only those whose number, from 1, is a multiple of this have experts."""
    aux_loss: NonNegativeFloat = 0.0
    """Weight of the auxiliary loss of every layer that spreads the tokens of a micro batch evenly over the experts;
    0 disables it. It is not part of the loss that is reported."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the router z-loss, which keeps the router's logits small; 0 disables it."""
    bias: bool = False
    """Biases in the router and in the experts."""
    swiglu_limit: NonNegativeFloat = 0.0
    """Clipped SwiGLU, as in gpt-oss: gates are at most this, what they multiply is within ± this, and experts compute
    (up + 1) × gate × sigmoid(1.702 × gate). 0 means plain SwiGLU."""
    balance_bias: bool = False
    """Balance without a loss: a bias per expert takes part in the choice of experts, but not in their scores."""
    bias_update_rate: NonNegativeFloat = 0.001
    """With `balance_bias`: after each step the biases of experts with too few tokens grow by this, others shrink."""


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. Choose a preset (`model: llama-1b`) and override single fields."""

    preset: str = "custom"
    """A preset from `keepstep models`, or the path of a Hugging Face config.json (or of its folder), whose weights are
    not read; `custom` starts from the defaults below."""
    layers: Annotated[int, Range(above=0, limit=10_000)] = 12
    """Transformer blocks."""
    hidden: ModelSize = 768
    """Hidden size: the width of the residual stream."""
    heads: ModelSize = 12
    """Attention heads. If you set only `hidden`, the preset's head size is kept and this follows."""
    kv_heads: ModelSizeOrZero = 0
    """Key-value heads for grouped-query attention; 0 means one per attention head."""
    head_dim: ModelSizeOrZero = 0
    """Width of one head; 0 means hidden / heads."""
    ffn_hidden: ModelSizeOrZero = 0
    """Inner width of the feed-forward block; 0 means 4 × hidden."""
    vocab: ModelSize = 50368
    """Vocabulary size: token ids go from 0 to vocab - 1."""
    vocab_multiple: ModelSize = 1
    """The embedding table is padded to a multiple of this; padding tokens are never predicted."""
    seq_len: ModelSize = 2048
    """Tokens in one training row."""
    max_positions: ModelSizeOrZero = 0
    """Size of the learned position table; 0 means seq_len."""
    positions: Literal["learned", "alibi", "rotary", "none"] = "learned"
    """Position encoding."""
    rotary_base: PositiveFloat = 10000.0
    """RoPE base (theta)."""
    rotary_scaling: Mapping[str, Any] | None = None
    """RoPE scaling in Hugging Face's format, for example `{rope_type: yarn, factor: 4.0, ...}`;
    linear, dynamic, llama3, yarn and longrope are supported."""
    rotary_local_base: NonNegativeFloat = 0.0
    """RoPE base of the sliding layers in `layer_types`, without scaling; 0 means the same RoPE as in the others."""
    partial_rotary_factor: Annotated[float, Range(above=0, max=1)] = 1.0
    """Fraction of each head's channels that RoPE rotates, the first ones."""
    no_rope_layer_interval: ModelSizeOrZero = 0
    """Every layer whose number, from 1, is a multiple of this has no RoPE (NoPE); 0 means none."""
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_1p"] = "layernorm"
    """Normalization of the sub-blocks (attention and feed-forward) and at the end. rmsnorm_1p is RMSNorm with weights
    around 0 that are used as 1 + weight."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Normalize the input of each sub-block, its output before it is added to the residual stream, or both."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance, for numerical stability."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh"] = "gelu"
    """Feed-forward activation; swiglu and geglu_tanh are gated."""
    bias: bool = True
    """Biases in linear layers and in LayerNorm."""
    qkv_bias: bool = False
    """A bias on the query, key and value projections even if `bias` is false."""
    out_bias: bool = False
    """A bias on the output projection of attention even if `bias` is false."""
    attention_sinks: bool = False
    """Each head has a learned logit in the softmax of its scores, so that a token may attend to almost nothing. There
    is no fused kernel for it."""
    qk_norm: bool = False
    """RMSNorm on queries and keys."""
    head_qk_norm: bool = True
    """With qk_norm: normalize each head; false normalizes all query heads, and all key heads, as one vector."""
    kv_lora_rank: ModelSizeOrZero = 0
    """Multi-head latent attention, as in DeepSeek: keys and values of all heads come from one vector of this size; 0
    means ordinary attention."""
    q_lora_rank: ModelSizeOrZero = 0
    """With kv_lora_rank: queries come from a vector of this size too; 0 means from the hidden state itself."""
    qk_rope_head_dim: ModelSizeOrZero = 0
    """With kv_lora_rank: channels of each head that RoPE rotates, the last of its `head_dim`. Their key is shared by
    all heads."""
    v_head_dim: ModelSizeOrZero = 0
    """With kv_lora_rank: width of the values of one head; 0 means head_dim."""
    tied: bool = True
    """The output head shares the embedding's weights."""
    alibi_bias_max: PositiveFloat = 8.0
    """Steepest ALiBi slope, as in MPT's config."""
    clip_qkv: NonNegativeFloat = 0.0
    """Clamp query, key and value to ± this; 0 disables clamping."""
    sliding_window: ModelSizeOrZero = 0
    """Attend only to this many most recent tokens; 0 means all."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    """Which layers have the sliding window; a list shorter than `layers` repeats. Empty means all layers."""
    attention_multiplier: NonNegativeFloat = 0.0
    """Scale of the attention scores; 0 means 1 / √(head size)."""
    attn_logit_softcapping: NonNegativeFloat = 0.0
    """Keep attention scores within ± this by tanh; 0 disables it. There is no fused kernel for it."""
    final_logit_softcapping: NonNegativeFloat = 0.0
    """Keep logits within ± this by tanh; 0 disables it."""
    embedding_multiplier: PositiveFloat = 1.0
    """Token embeddings are multiplied by this."""
    residual_multiplier: PositiveFloat = 1.0
    """Outputs of sub-blocks are multiplied by this before they are added to the residual stream."""
    logits_scaling: PositiveFloat = 1.0
    """Logits are divided by this."""
    dropout: FractionBelowOne = 0.0
    """Dropout on the residual stream and on embeddings."""
    linear: str = "dense"
    """Linear layers inside the blocks: `dense`; `bitnet` (ternary weights with straight-through gradients); `sparse`
    (N of M weights count, with straight-through gradients); `fp8` matmuls (set by `precision: fp8`); or a plug-in, an
    entry point of the group keepstep.linear or `package.module:function`."""
    linear_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `linear`, for example `{n: 2, m: 4}` for `sparse`."""
    linear_layers: tuple[str, ...] = ("qkv", "out", "up", "down")
    """Projections of a block that `linear` replaces: any of qkv, out, up (gated: gate and up), down. Others are
    dense."""
    init: Literal["kaiming", "normal"] = "normal"
    """Weight initialization. Both scale residual projections down by √(2·layers)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation for `init: normal`."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Mixture of experts."""
    family: Literal["auto", "phi3"] = "auto"
    """Hugging Face family that an export uses. auto chooses by what the model computes; phi3 computes the same as llama
    or mistral under other names, so an import sets it."""

    @property
    def key_value_heads(self) -> int:
        """`kv_heads` with its default resolved."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """`head_dim` with its default resolved."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_size * self.partial_rotary_factor)

    @property
    def plain_rope(self) -> bool:
        """Whether queries and keys are at most rotated, as whole heads: what the fused kernels compute."""
        return not self.qk_norm and not self.kv_lora_rank and self.rotary_size == self.head_size

    @property
    def scales_rope_by_length(self) -> bool:
        """Whether RoPE depends on the length of a text, not on positions alone."""
        scaling = self.rotary_scaling or {}
        return scaling.get("rope_type", scaling.get("type")) in ("dynamic", "longrope")

    @property
    def value_size(self) -> int:
        """Width of the values of one head."""
        return self.v_head_dim or self.head_size

    @property
    def score_scale(self) -> float | None:
        """What attention scores are multiplied by; None means 1 / √(head size)."""
        scaling = self.rotary_scaling or {}
        sharpness = scaling.get("mscale_all_dim") if self.kv_lora_rank and not self.attention_multiplier else None
        if not sharpness or scaling.get("rope_type", scaling.get("type", "default")) == "default":
            return self.attention_multiplier or None
        # DeepSeek sharpens its scores with YaRN's factor, and not by the tables of cosines and sines.
        growth = 0.1 * sharpness * math.log(max(scaling.get("factor", 1.0), 1.0)) + 1.0
        return float(self.head_size**-0.5 * growth * growth)

    @property
    def kernel_scores(self) -> bool:
        """Whether attention kernels compute the scores: neither soft-capped nor with sinks."""
        return not (self.attn_logit_softcapping or self.attention_sinks)

    @property
    def ffn_size(self) -> int:
        """`ffn_hidden` with its default resolved."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """The projections that can have an adapter: none of experts, nor keys and values of latent attention."""
        attention = ("q", "o") if self.kv_lora_rank else ("q", "k", "v", "o")
        feed_forward = ("gate", "up", "down") if self.gated else ("up", "down")
        return attention if self.experts.count else attention + feed_forward

    @property
    def expert_size(self) -> int:
        """`experts.ffn_hidden` with its default resolved."""
        return self.experts.ffn_hidden or self.ffn_size

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of an ordinary feed-forward block."""
        experts = self.experts
        if not experts.count or layer < experts.first_dense_layers:
            return False
        return (layer + 1) % experts.layer_interval == 0

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has the sliding window."""
        kinds = self.layer_types or ("sliding_attention",)
        return self.sliding_window > 0 and kinds[layer % len(kinds)] == "sliding_attention"

    def has_rope(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        interval = self.no_rope_layer_interval
        return self.positions == "rotary" and not (interval and (layer + 1) % interval == 0)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table."""
        return self.max_positions or self.seq_len


@dataclass(frozen=True)
class DataConfig:
    """Training data and its order."""

    path: str = "demo"
    """Training data: a folder or prefix written by `keepstep data build`; raw .jsonl, .parquet or .txt files, tokenized
    at first use; or conversations in .jsonl, .json or .parquet, rendered at first use. All of these can be local or
    remote (s3://, az://, gs://, https://). `toolcalls` and `toolcalls-domains` generate conversations with tool calls,
    `demo` is the source of this machine's Python standard library, `synthetic` is random tokens for benchmarks. A
    plug-in is an entry point of the group keepstep.data, or `package.module:function`; write `./NAME` for a folder of
    the same name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of a plug-in that `path` names."""
    blend: Mapping[str, float] = field(default_factory=dict)
    """Several data sets with their weights, for example `{web: 0.7, code: 0.3}`; replaces `path`."""
    valid_path: str = ""
    """Validation data; if empty, `valid_share` of the training data is held out."""
    valid_share: FractionBelowOne = 0.01
    """Fraction of documents held out for validation if there is no `valid_path`."""
    test_path: str = ""
    """Test data; if empty, `test_share` of the training data is held out."""
    test_share: FractionBelowOne = 0.0
    """Fraction of documents held out for a final test, from the end of the data."""
    tokenizer: str = ""
    """Path of a tokenizer.json; empty means the one stored with the data."""
    shuffle: bool = True
    """Shuffle samples with a new seeded order in each epoch; false keeps the order on disk."""
    shuffle_window: NonNegativeInt = 0
    """Shuffle only among about this many neighbouring rows: for remote data larger than the cache. 0 shuffles all."""
    order: Literal["keepstep", "gpt"] = "keepstep"
    """gpt is exactly the order of Megatron's GPTDataset."""
    gpt_samples: NonNegativeInt = 0
    """With `order: gpt`: the number of samples of the Megatron run, on which its order depends; 0 means one epoch."""
    strategy: Literal["pack", "overflow", "trunc", "best_fit"] = "pack"
    """How documents become rows. pack concatenates all documents and cuts the stream into rows; overflow gives each
    document as many rows as it needs; trunc keeps the first row of each document; best_fit packs whole documents and
    splits only those longer than a row."""
    stride: NonNegativeInt = 0
    """With `strategy: overflow`: tokens between the starts of two rows of a document; 0 means seq_len, no overlap."""
    separate_documents: bool = False
    """With `strategy: pack`: attention and loss do not cross document boundaries. Other strategies never cross them."""
    column: str = "tokens"
    """MDS data: the column that contains the tokens."""
    text_field: str = "text"
    """Raw text data: the JSON field or column that contains the text."""
    eos: str = ""
    """Raw text data: the token to append to each document, for example `<|endoftext|>`."""
    cache_dir: str = ""
    """Cache folder for remote files; empty means `.data` in `runs_dir`. Use a local disk. If you set it, the files of a
    local path are copied into it too, for a `path` on a mounted store."""
    cache_limit: Annotated[ByteSize, Range(min=1 << 20)] = ByteSize(64 << 30)
    """Size limit of that cache on each node."""
    prefetch: NonNegativeInt = 4
    """Micro batches to load in advance."""


@dataclass(frozen=True)
class ChatConfig:
    """How conversations become tokens, and which tokens have a loss. Used if `data.path` contains conversations."""

    format: Literal["auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca"] = "auto"
    """Format of the rows; auto detects it from the keys of each row."""
    template: str = ""
    """Path of a Jinja chat template; empty means the tokenizer's own, or else a built-in one (ChatML, Hermes calls)."""
    loss_on: Literal["assistant", "tool_calls", "all"] = "assistant"
    """Compute the loss on all assistant messages, only on those with tool calls, or on the whole text."""
    read_first: NonNegativeDuration = Duration(0, "ba")
    """Compute the loss on the whole text for this long, then as `loss_on` says. A model with random weights must learn
    to read first. In steps, samples or tokens."""
    packing: bool = True
    """Pack several conversations into one row; attention does not cross from one to another."""
    generated_rows: PositiveInt = 12000
    """With `data.path: toolcalls` or `toolcalls-domains`: number of conversations to generate."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Start from existing weights instead of random ones."""

    start_from: str = ""
    """A run folder, a Hugging Face folder with config.json and safetensors files, or OWNER/NAME on the Hub. The model's
    shape is read from there; set `model` fields only for what may differ (seq_len, dropout)."""
    neftune: NonNegativeFloat = 0.0
    """NEFTune alpha: training noise on the input embeddings, alpha / √(tokens × hidden). 5 is usual, 0 disables it."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference learning: the model learns which of two answers is better, measured against the frozen weights that it
    started from (with LoRA: itself without adapters)."""

    method: Literal["none", "dpo", "ipo", "kto"] = "none"
    """dpo and ipo learn from rows with `chosen` and `rejected` answers, kto from rows with a `completion` and a `label`
    and from pairs as two such rows. none predicts the next token."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the frozen weights; a larger value allows less change. IPO's paper calls it
    tau."""
    label_smoothing: Annotated[float, Range(min=0, below=0.5)] = 0.0
    """With dpo: the probability that a pair is the wrong way round (conservative DPO)."""
    desirable_weight: PositiveFloat = 1.0
    """With kto: weight of the answers with the label true."""
    undesirable_weight: PositiveFloat = 1.0
    """With kto: weight of the answers with the label false."""


@dataclass(frozen=True)
class RLConfig:
    """Reinforcement learning with verifiable rewards: each prompt is answered several times, and the model learns from
    the answers that are rewarded above the others. Prompts are conversations up to the assistant's first answer, which
    is the reference for rewards."""

    method: Literal["none", "grpo", "dr_grpo", "rloo"] = "none"
    """grpo divides a group's rewards by their deviation and averages over an answer's tokens; dr_grpo does neither;
    rloo compares each answer with the mean of the others. none predicts the next token."""
    rewards: Mapping[str, float] = field(default_factory=lambda: {"tool_calls": 1.0})
    """Rewards and their weights. tool_calls: 1 if the calls equal the reference's. arguments: the share of their
    functions, arguments and values that is right. schema: 1 if all calls fit the prompt's tools. format: 1 if the
    answer ends itself and its calls can be parsed. Others are plug-ins: entry points of the group keepstep.rewards, or
    `package.module:function`."""
    num_generations: Annotated[int, Range(min=2, limit=2**16)] = 8
    """Answers to each prompt. global_batch and microbatch count answers."""
    max_new_tokens: PositiveInt = 512
    """Most tokens of an answer."""
    rollout_batch: PositiveInt = 256
    """Most answers that a process writes at a time. When one ends, the next prompt takes its place."""
    beta: Annotated[float, Range(min=-1)] = -1.0
    """Weight of the KL divergence from the frozen start; 0 needs no reference. -1 chooses as TRL does: 0.05 for rloo, 0
    for the others."""

    @property
    def kl_weight(self) -> float:
        """`beta`, or what it chooses."""
        return self.beta if self.beta >= 0 else 0.05 if self.method == "rloo" else 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA): the base weights are frozen, and checkpoints contain only the adapters."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 disables LoRA and trains all weights."""
    alpha: PositiveFloat = 16.0
    """Adapters are scaled by alpha / rank."""
    dropout: FractionBelowOne = 0.0
    """Dropout on the input of the adapters."""
    targets: tuple[str, ...] = ("all",)
    """Projections that get an adapter: any of q, k, v, o, gate, up, down. all stands for those that the model has,
    without experts."""
    base: Literal["bf16", "fp8", "nf4"] = "bf16"
    """Format of the frozen matrices inside the blocks, quantised one at a time while they are loaded. bf16 keeps them
    in the precision of the run. fp8 has a scale per output and fp8 matmuls on Hopper GPUs; `precision: fp8` chooses it
    too. nf4 is QLoRA's 4 bits, computed in the precision of the run. Embeddings, norms and head stay as they are."""

    def targets_in(self, model: ModelConfig) -> tuple[str, ...]:
        """`targets`, with `all` resolved for a model."""
        return model.adapter_targets if "all" in self.targets else self.targets


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside blocks and adamw for all other weights."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Range(min=0, below=1)] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment, for numerical stability."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay: each step reduces a weight by lr × this × its value."""
    decay_norms: bool = False
    """Apply weight decay to norm weights and biases as well."""
    decay_embeddings: bool = True
    """Apply weight decay to embeddings as well."""
    clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    muon_lr: PositiveFloat = 0.02
    """With muon: peak learning rate of the matrices."""
    muon_momentum: FractionBelowOne = 0.95
    """With muon: Nesterov momentum."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "two_stage", "wsd", "constant"] = "cosine"
    """Shape after warmup. two_stage is linear to `stage_lr` at `stage_at`, then linear to `final`; wsd stays at the
    peak, then decays."""
    warmup: NonNegativeDuration = Duration(100, "ba")
    """Linear warmup from zero. In steps, tokens, samples or epochs."""
    final: Fraction = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    stage_at: Annotated[float, Range(above=0, below=1)] = 0.5
    """With two_stage: where the second stage starts, as a fraction of the run."""
    stage_lr: Fraction = 0.5
    """With two_stage: learning rate at that point, as a fraction of the peak."""
    decay_share: Annotated[float, Range(above=0, max=1)] = 0.1
    """With wsd: fraction of the run that decays at the end."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is distributed over processes. The degrees multiply to the number of processes."""

    replicate: Annotated[int, Range(above=0, or_equal=-1, limit=10**6)] = 1
    """Replicas of the sharded group (hybrid sharding, HSDP), usually one per node; -1 takes the remaining processes."""
    shard: Annotated[int, Range(above=0, or_equal=-1, limit=10**6)] = -1
    """Processes that shard weights, gradients and optimizer state (FSDP); -1 takes the remaining processes. A single
    process uses FSDP only if you write 1."""
    tensor: PositiveInt = 1
    """Tensor parallel degree: splits each matrix, and the sequence between matrices (sequence parallel)."""
    pipeline: PositiveInt = 1
    """Pipeline parallel degree: each process holds some of the blocks."""
    context: PositiveInt = 1
    """Context parallel degree: splits each row of tokens, with ring attention."""
    expert: PositiveInt = 1
    """Expert parallel degree: each of so many neighbours in the shard axis holds a part of every layer's experts, and
    tokens travel to them. Must divide `shard` × `context` and the number of experts."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule. interleaved gives each process several stages; zero_bubble fills the bubbles with weight
    gradients."""
    stages: NonNegativeInt = 0
    """Pipeline stages per process; 0 means 2 with `interleaved` and 1 with the others."""
    keep_gathered: bool = False
    """Keep weights gathered between forward and backward (ZeRO-2, SHARD_GRAD_OP): less traffic, more memory. Always on
    with a pipeline."""
    async_tensor: bool = False
    """Overlap tensor parallel communication with matmuls through symmetric memory; needs `compute.compile` and
    NVLink."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and update them there: slow, but saves GPU memory."""

    @property
    def stages_per_process(self) -> int:
        """`stages` with its default resolved."""
        return self.stages or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class ComputeConfig:
    """How one step is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one."""
    compile: BoolOrAuto = None
    """torch.compile each block. auto does so on GPUs where Triton and a C compiler are installed, in runs that divide
    only data and weights over processes and have no linear layers from plug-ins. A run keeps what it started with."""
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    """Activation checkpointing. selective saves the outputs of matmuls and attention; full saves block inputs and the
    outputs of attention; auto chooses per block, so that as little is recomputed as the GPU's memory allows, and is
    full with `offload_activations`."""
    offload_activations: bool = False
    """Activation offloading: what blocks save for the backward pass waits in pinned host memory. It is copied while
    later blocks compute, and copied back one block ahead. Tensors below 1 MiB and those of the last block stay on the
    GPU. Not with the pipeline schedule zero_bubble."""
    attention: Literal["auto", "math", "flash", "cudnn"] = "auto"
    """Attention kernel. auto lets torch choose, except for causal attention with head sizes 64 and 128 on Hopper GPUs,
    which uses our own backward kernel, also inside packed documents and sliding windows; heads of 96 to 120 use that of
    128 unless `reproducible: off`. With auto and flash, documents and windows are passed to the flash kernel as bounds,
    so tokens outside them cost nothing. math and cudnn compute these tokens and mask them. auto does so too where flash
    cannot be used: no GPU, fp32, ALiBi, pipeline or context parallelism, or a head size that is above 256 or no
    multiple of 8. In these cases `flash` is an error. cudnn needs `reproducible: off`."""
    fused_matmuls: bool = True
    """Use matmuls with fused epilogues: the residual add on every GPU; SwiGLU, GELU and RoPE on Hopper GPUs. false
    computes each of these in its own kernel."""
    loss_chunks: NonNegativeInt = 0
    """Compute the head and the cross-entropy in this many chunks, to save the memory of the logits; 0 chooses by
    size."""
    mlp_chunk_tokens: NonNegativeInt = 0
    """Compute the feed-forward (MLP) of each block over chunks of this many tokens, so that the inner tensors of only
    one chunk exist at a time; 0 takes all tokens of a micro batch as one. The backward pass computes each chunk again,
    in every mode of `recompute`. Not with experts or the pipeline schedule zero_bubble."""
    threads: NonNegativeInt = 0
    """CPU threads per process; 0 divides the cores evenly, or the time that a container has on them."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Validation during the run."""

    interval: NonNegativeDuration = Duration(500, "ba")
    """How often; `0ba` means only at the end."""
    batches: PositiveInt = 16
    """Global batches of validation data per evaluation."""
    at_end: bool = True
    """Evaluate after the last step."""
    keep_best: bool = False
    """Keep the weights with the lowest validation loss as `best` in the run folder."""
    patience: NonNegativeInt = 0
    """Stop after this many evaluations in a row without a lower validation loss; 0 never stops."""
    prompts: tuple[str, ...] = ()
    """Prompts that the model continues at each evaluation; the samples appear on the run's page and in TensorBoard. Not
    with tensor, context or pipeline parallelism or fp8: use `keepstep chat` with the run's checkpoints there."""
    prompt_tokens: PositiveInt = 48
    """Tokens to generate after each prompt (greedy)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving checkpoints and resuming from them."""

    interval: NonNegativeDuration = Duration(1000, "ba")
    """How often; `0ba` means only at the end."""
    folder: str = ""
    """Checkpoint folder; empty means `checkpoints` in the run folder."""
    keep: NonNegativeInt = 3
    """Number of newest committed checkpoints to keep; older ones are deleted after the next commit. 0 keeps all."""
    at_end: bool = True
    """Save after the last step."""
    retry_s: NonNegativeFloat = 600.0
    """Seconds to retry a save that must succeed (after the last step, or on a stop request) when the disk is full or
    not reachable. The run fails after that, instead of ending without its last step on disk."""
    autoresume: bool = True
    """Running the same command again resumes from the newest complete checkpoint. With false, each command starts from
    the beginning; restarts after a crash still resume."""
    resume_from: str = ""
    """Start from this checkpoint folder, for example of another run. Started again, the run resumes from its own newer
    checkpoints; with `autoresume: false` it starts here each time."""
    skip_optimizer: bool = False
    """With resume_from: load only the weights; optimizer, schedule and data start from the beginning."""
    asynchronous: bool = True
    """Write in the background: training waits only for the copy in memory. false waits for the disk."""
    format: Literal["sharded", "full", "local"] = "sharded"
    """sharded: all processes write their own shards in parallel. full: one file with whole tensors, gathered first.
    local: shards on each node's own disk, with a copy on the next node. All can be loaded with any number of
    processes."""
    parity: Literal[0, 1] = 0
    """1 adds a parity file for every eight data files: one lost or damaged file among them is rebuilt automatically."""
    keep_every: NonNegativeInt = 0
    """Steps divisible by this are kept permanently, in addition to the newest; 0 disables this."""
    keep_best: NonNegativeInt = 0
    """This many steps with the lowest loss are kept, in addition to the newest; 0 disables this."""


@dataclass(frozen=True)
class GuardConfig:
    """What to do about NaN, loss spikes, gradient outliers and silent data corruption."""

    nan: Literal["retry", "skip", "rollback", "stop"] = "retry"
    """On a loss or gradient norm that is not finite. retry: repeat the step from the last state in memory, so that a
    transient fault leaves no trace; if it happens again, skip the step. skip: do not update weights and optimizer in
    this step. rollback: return to the last good state and never use these samples again. stop: end the run."""
    spike: Literal["ignore", "rollback"] = "ignore"
    """On a loss far above the previous ones, see `spike_factor`."""
    spike_factor: PositiveFloat = 10.0
    """A loss is a spike if it is this many median absolute deviations above the median of the last `window` losses."""
    outlier_factor: NonNegativeFloat = 10.0
    """Log the samples of a step whose gradient norm is this many times the median of the last `window`; 0 logs none."""
    window: PositiveInt = 100
    """Number of steps for the medians and for `limit`."""
    limit: NonNegativeInt = 5
    """More skips and rollbacks than this within `window` steps end the run."""
    keep_interval: PositiveInt = 10
    """Steps between two snapshots in host memory, if one of the policies is rollback."""
    recheck_interval: NonNegativeInt = 0
    """Steps between two checks for silent data corruption: all processes compute the same micro batch and compare the
    bits of its loss. 0 disables it."""

    @property
    def rolls_back(self) -> bool:
        """Whether any policy needs earlier states."""
        return "rollback" in (self.nan, self.spike)


@dataclass(frozen=True)
class ObserveConfig:
    """Metrics and logs of the run."""

    log_interval: PositiveInt = 1
    """Steps between log lines and metric flushes. The losses of all steps are always recorded."""
    tensorboard: bool = True
    """Write TensorBoard scalars into the run folder."""
    rank_interval: NonNegativeInt = 20
    """Steps between two reports of every rank (step time, data wait, memory); 0 disables them."""
    metrics_port: Annotated[int, Range(min=0, max=65535)] = 0
    """Serve Prometheus metrics on this port in the first process of each node; 0 disables it. 9464 is a usual
    choice."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on. Any other than loopback needs the environment variable KEEPSTEP_METRICS_TOKEN, which
    Prometheus must send as its credentials."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (needs the package wandb); empty disables it."""
    mlflow_experiment: str = ""
    """Also log to this MLflow experiment (needs the package mlflow and MLFLOW_TRACKING_URI); empty disables it."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """Callbacks with their options, for example `{my-alarm: {every: 10}}`: entry points of the group
    keepstep.callbacks, or `package.module:function`."""


@dataclass(frozen=True)
class ResilienceConfig:
    """Crashes, hangs and restarts."""

    max_restarts: NonNegativeInt = 8
    """Give up after this many restarts in a row without a new step; 0 disables restarts."""
    hang_s: PositiveFloat = 10.0
    """A step that takes longer than this, and longer than three times the slowest of the last 100, counts as a hang."""
    start_timeout_s: PositiveFloat = 1800.0
    """The same limit for everything that is not a step: building, compiling, evaluating, saving. In seconds."""
    snapshot_interval: Annotated[int, Range(min=-1, limit=10**12)] = -1
    """Steps between snapshots of the state in memory that survives a crash of the processes. A crash costs only the
    steps since the last one. -1 chooses: every step where that is cheap, about twice a minute on GPUs. 0 disables
    them."""
    survive: bool = False
    """Keep the other replicas running when one is lost: they redo the step in flight with its micro batches, and a
    replacement copies their state. Every process is a replica with whole weights, or with `parallel.shard` above 1 so
    many processes are one (HSDP). With `reproducible: elastic` the losses do not depend on who was lost."""
    spares: NonNegativeInt = 0
    """With `survive`: replicas that have built the run and wait. One of them takes the place of a lost replica, and
    another is started behind it. On GPUs each process needs a GPU of its own. The same as `--spares`."""
    exchange: Literal["host", "nccl"] = "host"
    """With `survive`: how replicas sum gradients. host: through sockets and host memory. nccl: from GPU to GPU, which
    has not been run yet."""
    lease_s: Annotated[float, Range(min=1, max=3600)] = 30.0
    """A run holds its folder against other runs by a heartbeat in the folder. After this many seconds without one,
    another run may take over. Raise it where the storage shows changes of other machines late."""
    grace_s: NonNegativeFloat = 0.0
    """Seconds between a stop request and the kill, if known (Slurm's KillWait, Kubernetes' grace period). A save that
    would not fit is left out, and the last checkpoint counts. 0 means that there is enough time."""


@dataclass(frozen=True)
class ProfileConfig:
    """Schedule of the torch profiler, and a memory snapshot on out-of-memory errors."""

    active: NonNegativeInt = 0
    """Steps to record in each cycle; 0 disables the profiler."""
    skip_first: NonNegativeInt = 10
    """Steps to skip before the first cycle."""
    wait: NonNegativeInt = 1
    """Idle steps at the start of each cycle."""
    warmup: NonNegativeInt = 1
    """Steps that run under the profiler but are discarded."""
    repeat: NonNegativeInt = 1
    """Number of cycles; 0 repeats until the end."""
    memory_snapshot: bool = True
    """Record allocations and write a memory snapshot if a GPU runs out of memory."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run."""

    name: str = "run"
    """Name of the run, and of its folder in `runs_dir`."""
    runs_dir: str = "runs"
    """Folder of all runs."""
    seed: Annotated[int, Range(min=0, max=10**13)] = 17
    """Seed of weights, data order and dropout."""
    max_duration: PositiveDuration = Duration(1000, "ba")
    """Length of the run. A time (`2h`) needs `schedule.name: constant`."""
    global_batch: PositiveInt = 256
    """Rows per optimizer step over all processes. Gradient accumulation follows from it."""
    microbatch: PositiveIntOrAuto = 0
    """Rows per forward pass of one process. auto: as many as the plan says is fastest among those that fit into the
    GPU's memory; on CPUs and with `reproducible: elastic` at most 8. A run keeps the number that it started with."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """auto is bf16 on GPUs that support it, otherwise fp32. fp8 is bf16 with fp8 matmuls inside the blocks and for
    the gradients of the output head. Master weights and optimizer state are always fp32."""
    reproducible: Literal["off", "resume", "elastic"] = "resume"
    """When two runs have bitwise equal losses. resume: with the same number of processes, including stops and restarts.
    elastic: with any number of processes, even if it changes during the run; data parallel only, with whole weights on
    every process. off: no promise on GPUs, where some kernels are then a little faster."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Your own values, to be referenced as `${variables.name}`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def integer_sums(self) -> bool:
        """Whether the gradients of micro batches, or of one for each process of a replica, are summed as integers."""
        return self.reproducible == "elastic" or self.resilience.survive

    @property
    def replica_size(self) -> int:
        """Processes of each replica that outlives others: more than one shard its weights (HSDP)."""
        return max(1, self.parallel.shard) if self.resilience.survive else 1

    @property
    def whole_weights(self) -> bool:
        """Whether every process holds whole weights."""
        return self.integer_sums and self.replica_size == 1

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the weights that it started from."""
        return self.preference.method != "none" or (self.rl.method != "none" and self.rl.kl_weight > 0)

    @property
    def adapters(self) -> LoraConfig:
        """`lora`, with a base in fp8 where `precision` is fp8."""
        chosen = self.precision == "fp8" and self.lora.base == "bf16"
        return replace(self.lora, base="fp8") if chosen else self.lora


RENAMED: Mapping[str, str] = {"compute.joined_products": "compute.fused_matmuls"}
"""Old names of fields and their new ones. Files, overrides, references and stored runs may use either."""

SHORT_FORMS: Mapping[str, str] = {"model": "preset", "data": "path", "optimizer": "name", "schedule": "name"}
"""The field that a plain value sets: `model: llama-1b` means `model.preset: llama-1b`."""
