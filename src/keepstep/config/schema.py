"""Every setting keepstep knows: frozen dataclasses, one section per part, each field with its own help.

The text under a field is its help: `keepstep config reference`, `--help` and the editors' schema are made from it.
A section is handed to the part it belongs to; only `train/run.py` sees the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keepstep.core.units import ByteSize, Duration


@dataclass(frozen=True)
class ModelConfig:
    """The decoder. Name a preset (`model: llama-1b`) and override what differs."""

    preset: str = "custom"
    """A named shape from `keepstep models`; `custom` starts from the defaults below."""
    layers: int = 12
    """Transformer blocks."""
    hidden: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Attention heads. Follows `hidden` at the preset's head size when only `hidden` is given."""
    kv_heads: int = 0
    """Key and value heads for grouped-query attention; 0 means one for each attention head."""
    head_dim: int = 0
    """Width of one head; 0 means hidden / heads."""
    ffn_hidden: int = 0
    """Inner width of the feed-forward block; 0 means 4 × hidden."""
    vocab: int = 50368
    """Tokens the model can name."""
    vocab_multiple: int = 1
    """Rows of the embedding are padded to a multiple of this; padded rows never win a prediction."""
    seq_len: int = 2048
    """Tokens in one training row."""
    max_positions: int = 0
    """Rows of a learned position table; 0 means seq_len."""
    positions: Literal["learned", "alibi", "rotary", "none"] = "learned"
    """How the model tells places apart."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_scaling: Mapping[str, Any] | None = None
    """Frequency scaling as Hugging Face writes it, for example `{rope_type: llama3, factor: 8.0, ...}`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sub-block and at the end."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Feed-forward non-linearity; swiglu has a gate."""
    bias: bool = True
    """Biases in linear layers and in LayerNorm."""
    qkv_bias: bool = False
    """A bias on the query, key and value projection even when `bias` is off."""
    qk_norm: bool = False
    """RMSNorm on each query and key head."""
    tied: bool = True
    """The output head shares the embedding's weights."""
    alibi_bias_max: float = 8.0
    """Steepest ALiBi slope, as MPT names it."""
    clip_qkv: float = 0.0
    """Clamp query, key and value to ± this; 0 leaves them alone."""
    sliding_window: int = 0
    """Attend to this many latest tokens only; 0 means all."""
    dropout: float = 0.0
    """Residual and embedding dropout."""
    linear: Literal["dense", "bitnet", "fp8"] = "dense"
    """The linear module inside the blocks: plain, ternary weights with straight-through gradients, or products in fp8
    (`precision: fp8` chooses the last)."""
    init: Literal["kaiming", "normal"] = "normal"
    """Weight initialisation; residual projections are scaled down by √(2·layers) in both."""
    init_std: float = 0.02
    """Standard deviation for `init: normal`."""

    @property
    def key_value_heads(self) -> int:
        """`kv_heads` with its default resolved."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """`head_dim` with its default resolved."""
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_size(self) -> int:
        """`ffn_hidden` with its default resolved."""
        return self.ffn_hidden or 4 * self.hidden

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
    """Where tokens come from and in which order."""

    path: str = "demo"
    """Training data: a folder or prefix that `keepstep data build` wrote, here or at an s3://, az://, gs:// or https://
    address; raw .jsonl, .parquet or .txt files, here or there, tokenised at first use; conversations in .jsonl,
    .json or .parquet, rendered at first use; `toolcalls` generates conversations that call tools; `demo` is the text of
    this machine's Python standard library; `synthetic` makes tokens up, for benchmarks."""
    blend: Mapping[str, float] = field(default_factory=dict)
    """Several data sets and their weights, for example `{web: 0.7, code: 0.3}`; takes the place of `path`."""
    valid_path: str = ""
    """Validation data; empty takes `valid_share` from the end of the training data."""
    valid_share: float = 0.01
    """Share of documents held out when there is no `valid_path`."""
    test_path: str = ""
    """Test data; empty takes `test_share` from behind the validation share."""
    test_share: float = 0.0
    """Share of documents held out for a last test, from the very end."""
    tokenizer: str = ""
    """Path of a tokenizer.json; empty means the one stored beside the data."""
    shuffle: bool = True
    """Visit samples in a seeded random order, a new one each epoch; off keeps the order on disk."""
    shuffle_window: int = 0
    """Shuffle among about this many neighbouring rows instead of all: for remote data larger than the cache."""
    order: Literal["keepstep", "gpt"] = "keepstep"
    """gpt is Megatron's GPTDataset order, bit for bit."""
    gpt_samples: int = 0
    """order gpt: samples the Megatron run asked for (its order depends on it); 0 means one epoch."""
    strategy: Literal["pack", "overflow", "trunc", "best_fit"] = "pack"
    """Documents to rows. pack cuts one endless stream; overflow gives a document as many rows as it needs; trunc keeps
    its first row; best_fit puts whole documents together and cuts only those longer than a row."""
    stride: int = 0
    """overflow: tokens between the starts of a document's rows; 0 means seq_len, that is no overlap."""
    separate_documents: bool = False
    """pack: attention and loss stay inside documents. The other strategies always do."""
    column: str = "tokens"
    """MDS: the column that holds the tokens."""
    text_field: str = "text"
    """Raw text: the JSON field or column that holds it."""
    eos: str = ""
    """Raw text: the token put after each document, by its text, for example `<|endoftext|>`."""
    cache_dir: str = ""
    """Where copies of remote files are kept; empty means `.data` below `runs_dir`. Use a local disk."""
    cache_limit: ByteSize = ByteSize(64 << 30)
    """Most bytes of remote files kept on a node."""
    prefetch: int = 4
    """Micro batches read ahead of the step that needs them."""


@dataclass(frozen=True)
class ChatConfig:
    """Conversations: how they become tokens, and which of these carry a loss. Read where `data.path` names some."""

    format: Literal["auto", "messages", "glaive", "xlam", "hermes", "toolace", "sharegpt", "alpaca"] = "auto"
    """How rows are written; auto tells it from each row's keys."""
    template: str = ""
    """Path of a jinja2 chat template; empty takes the tokenizer's own, or a built-in one (ChatML, Hermes calls)."""
    loss_on: Literal["assistant", "tool_calls", "all"] = "assistant"
    """Learn everything the assistant says, only its turns that call a tool, or the whole text."""
    read_first: Duration = Duration(0, "ba")
    """Learn the whole text for this long before `loss_on` counts: a model that starts from random weights has to learn
    reading first. In steps, samples or tokens."""
    packing: bool = True
    """Put several conversations into one row; none sees another."""
    generated_rows: int = 12000
    """`data.path: toolcalls`: conversations to generate."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Start from weights that are there instead of random ones."""

    start_from: str = ""
    """A run's folder, or a folder with a Hugging Face config.json and safetensors. The model's shape follows from
    it; give `model` fields only to change what may change (seq_len, dropout)."""
    neftune: float = 0.0
    """NEFTune: noise on the input embeddings while training, this over √(tokens × hidden); 5 is usual, 0 is off."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: the weights themselves stay as they are, and checkpoints hold the adapters only."""

    rank: int = 0
    """Width of the adapters; 0 trains all weights instead."""
    alpha: float = 16.0
    """Adapters are scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on what goes into the adapters."""
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    """Projections that get an adapter: any of q, k, v, o, gate, up, down."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights follow gradients."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, decoupled; or muon for the blocks' matrices with adamw for all else."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled: each step shrinks a decayed weight by lr × this."""
    decay_norms: bool = False
    """Decay norm weights and biases as well."""
    decay_embeddings: bool = True
    """Decay embedding tables as well."""
    clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices under muon."""
    muon_momentum: float = 0.95
    """Momentum of muon (Nesterov)."""


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves over the run."""

    name: Literal["cosine", "linear", "two_stage", "wsd", "constant"] = "cosine"
    """Shape after warmup. two_stage goes linearly to `stage_lr` at `stage_at`, then linearly to the end; wsd stays at
    the peak, then decays."""
    warmup: Duration = Duration(100, "ba")
    """Linear rise from zero. In steps, tokens, samples or epochs."""
    final: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    stage_at: float = 0.5
    """two_stage: where the second stage starts, as a share of the run."""
    stage_lr: float = 0.5
    """two_stage: learning rate at that point, as a share of the peak."""
    decay_share: float = 0.1
    """wsd: share of the run spent decaying at the end."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model spreads over processes. The degrees multiply to the number of processes."""

    replicate: int = 1
    """Copies of the sharded group (hybrid sharding): usually one a node. -1 takes what is left."""
    shard: int = -1
    """Processes that share one copy of weights, gradients and optimizer (FSDP); -1 takes what is left."""
    tensor: int = 1
    """Processes that split each matrix, and each row between matrices (sequence parallel)."""
    pipeline: int = 1
    """Processes that each hold some of the blocks and hand activations on."""
    context: int = 1
    """Processes that split each row of tokens; attention goes round them in a ring."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of micro batches in the pipeline. interleaved gives each process several stages; zero_bubble fills waits
    with weight gradients."""
    stages: int = 0
    """Stages for each process of the pipeline; 0 means 2 with `interleaved` and 1 with the others."""
    keep_gathered: bool = False
    """Keep weights gathered between forward and backward (shard-grad-op): less traffic, more memory. A pipeline always
    does."""
    async_tensor: bool = False
    """Overlap tensor-parallel traffic with products through symmetric memory; compiled blocks on GPUs with NVLink."""
    offload: bool = False
    """Keep weights, gradients and optimizer in host memory and update there: slow, but fits far more on a GPU."""

    @property
    def stages_per_process(self) -> int:
        """`stages` with its default resolved."""
        return self.stages or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class ComputeConfig:
    """How one step is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    compile: bool = False
    """torch.compile each block."""
    recompute: Literal["none", "selective", "full", "auto"] = "none"
    """Activation checkpointing. selective keeps products of matrices and attention; full keeps block inputs only; auto
    chooses for each block, so that as little is computed twice as the GPU's memory allows."""
    attention: Literal["auto", "math", "flash", "cudnn"] = "auto"
    """Kernel behind scaled dot-product attention. auto lets torch choose, but for causal attention with heads of 64 on
    Hopper GPUs, which is differentiated by kernels of our own. With auto and flash, the flash kernel is told where
    packed documents start and how far a sliding window reaches, and computes no pair of tokens outside. math and cudnn
    compute and mask them, and so does auto where flash cannot: no GPU, fp32, ALiBi, a pipeline, context above 1, a head
    size that is no multiple of 8 or above 256. There flash itself is an error."""
    joined_products: bool = True
    """Compute residual sums inside the products of matrices before them, on GPUs, and SwiGLU, GELU and rotary turns
    inside those around them, on GPUs that have the kernels (Hopper); false computes all of it apart."""
    loss_chunks: int = 0
    """Compute head and cross-entropy in this many pieces so that all logits never exist at once; 0 chooses by size."""
    threads: int = 0
    """CPU threads for each process; 0 shares the cores evenly."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Validation loss during the run."""

    interval: Duration = Duration(500, "ba")
    """How often; `0ba` only at the end."""
    batches: int = 16
    """Global batches of validation data each time."""
    at_end: bool = True
    """Evaluate after the last step."""
    keep_best: bool = False
    """Keep the weights with the lowest validation loss as `best` in the run's folder."""
    patience: int = 0
    """Stop after this many evaluations in a row without a lower validation loss; 0 never does."""
    prompts: tuple[str, ...] = ()
    """Texts that the model goes on from at each evaluation, to be read on the run's page and in TensorBoard. Not with
    tensor, context or pipeline parallelism, nor in fp8: there `keepstep chat` asks the run's checkpoints."""
    prompt_tokens: int = 48
    """Tokens it writes after each prompt, the likeliest each time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept, where, and how a run goes on."""

    interval: Duration = Duration(1000, "ba")
    """How often; `0ba` only at the end."""
    folder: str = ""
    """Where steps are kept; empty means `checkpoints` inside the run's folder."""
    keep: int = 3
    """Newest committed checkpoints kept; older ones go after the next commit. 0 keeps all."""
    at_end: bool = True
    """Save after the last step."""
    autoresume: bool = True
    """Start the same command again and it goes on from the newest whole checkpoint. Off, each command begins anew; what
    is restarted because a process broke goes on all the same."""
    resume_from: str = ""
    """Begin from this step folder (another run's, for example). Started again, the run goes on from its own steps since
    then; with `autoresume: false` it begins here each time."""
    skip_optimizer: bool = False
    """With resume_from: take the weights only, and start optimizer, schedule and data afresh."""
    asynchronous: bool = True
    """Write behind training: a step waits only for a copy in memory that it has not overtaken. Off waits for disk."""
    format: Literal["sharded", "full", "local"] = "sharded"
    """sharded: each process writes its own share at the same time. full: one file with whole tensors, gathered first.
    local: shares on each node's own disk, with a copy on the next node. All load at any number of processes."""
    parity: Literal[0, 1] = 0
    """1 adds a parity file for every eight data files: one lost or damaged file among them is rebuilt by itself."""
    keep_every: int = 0
    """Steps divisible by this are kept for good, beside the newest; 0 switches it off."""
    keep_best: int = 0
    """This many steps with the lowest loss are kept, beside the newest; 0 switches it off."""


@dataclass(frozen=True)
class GuardConfig:
    """What happens when numbers go wrong: NaN, loss spikes, gradients far out, bits that flip."""

    nan: Literal["retry", "skip", "rollback", "stop"] = "retry"
    """A loss or gradient norm that is not finite. retry: do the step once more from the last state in memory, so that a
    passing fault leaves no trace, and skip it where it comes again. skip: this step changes neither weights nor
    optimizer. rollback: go back to the last good state, and never use these samples. stop: end the run."""
    spike: Literal["ignore", "rollback"] = "ignore"
    """A loss far above those before it, by `spike_factor`."""
    spike_factor: float = 10.0
    """A loss is a spike when it is this many median deviations above the median of the last `window` losses."""
    outlier_factor: float = 10.0
    """A gradient norm this many times the median of the last `window` is logged with its samples; 0 logs none."""
    window: int = 100
    """Steps that medians are taken over, and over which `limit` counts."""
    limit: int = 5
    """More skips and rollbacks than this within `window` steps end the run: something is wrong for good."""
    keep_interval: int = 10
    """Steps between two states kept in host memory to roll back to, where one of the policies is rollback."""
    recheck_interval: int = 0
    """Steps between two looks for silent corruption: all processes compute one micro batch and compare the bits of its
    loss; 0 looks never."""

    @property
    def rolls_back(self) -> bool:
        """Whether any policy needs earlier states."""
        return "rollback" in (self.nan, self.spike)


@dataclass(frozen=True)
class ObserveConfig:
    """What the run tells while it runs."""

    log_interval: int = 1
    """Steps between log lines and metric flushes. The losses of all steps are recorded whatever this is."""
    tensorboard: bool = True
    """Write TensorBoard scalars into the run's folder."""
    rank_interval: int = 20
    """Steps between two looks at all ranks (step time, wait for data, memory of each); 0 takes none."""
    metrics_port: int = 0
    """Serve Prometheus metrics on this port of each node's first process; 0 serves none. 9464 is a usual choice."""
    metrics_host: str = "127.0.0.1"
    """Address of that port. Any but loopback needs the environment variable KEEPSTEP_METRICS_TOKEN, which Prometheus
    then sends as its credentials."""
    wandb_project: str = ""
    """Log into this Weights & Biases project as well (needs the package wandb); empty does not."""
    mlflow_experiment: str = ""
    """Log into this MLflow experiment as well (needs the package mlflow and MLFLOW_TRACKING_URI); empty does not."""


@dataclass(frozen=True)
class ResilienceConfig:
    """What happens when something breaks."""

    max_restarts: int = 8
    """Restarts in a row that bring the run no step further before it is given up; 0 restarts nothing."""
    hang_s: float = 10.0
    """A step that takes longer than this, and than three times the slowest in a hundred, counts as hanging."""
    start_timeout_s: float = 1800.0
    """The same limit for everything that is not a step: building, compiling, evaluating, saving."""
    snapshot_interval: int = -1
    """Steps between copies of the state into memory that survives the processes, so that a crash costs only the steps
    since. -1 chooses: each step where that is cheap, about twice a minute on GPUs; 0 keeps none."""
    grace_s: float = 0.0
    """Seconds between a stop request and the kill, where they are known (KillWait of Slurm, Kubernetes' grace period):
    a save that would not fit is left out, and the last checkpoint stands. 0 means there is time enough."""


@dataclass(frozen=True)
class ProfileConfig:
    """A torch profiler schedule, and a memory snapshot when memory runs out."""

    active: int = 0
    """Steps recorded in each cycle; 0 switches the profiler off."""
    skip_first: int = 10
    """Steps to let pass before anything."""
    wait: int = 1
    """Idle steps at the start of each cycle."""
    warmup: int = 1
    """Steps run under the profiler but thrown away."""
    repeat: int = 1
    """Cycles; 0 goes on to the end."""
    memory_snapshot: bool = True
    """Record allocations and write a snapshot when a GPU runs out of memory."""


@dataclass(frozen=True)
class RunConfig:
    """One run, whole."""

    name: str = "run"
    """The run's name and its folder below `runs_dir`."""
    runs_dir: str = "runs"
    """Where run folders live."""
    seed: int = 17
    """Weights, data order and dropout follow from it."""
    max_duration: Duration = Duration(1000, "ba")
    """When the run ends. Wall-clock time needs `schedule.name: constant`."""
    global_batch: int = 256
    """Rows in one optimizer step over all processes. Accumulation follows from it."""
    microbatch: int = 8
    """Rows in one forward pass of one process."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """auto is bf16 on a GPU that has it and fp32 elsewhere. fp8 is bf16 with the blocks' matrix products in fp8. Master
    weights and optimizer stay fp32 in all."""
    reproducible: Literal["resume", "elastic"] = "resume"
    """When two runs have bitwise equal losses. resume: at the same number of processes, stops and restarts included.
    elastic: at any number, also one that changes on the way; data parallel only, whole weights on every process."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Free values that `${variables.name}` refers to."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
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


SHORT_FORMS: Mapping[str, str] = {"model": "preset", "data": "path", "optimizer": "name", "schedule": "name"}
"""`model: llama-1b` means `model.preset: llama-1b`: the field a plain value given to a section sets."""
