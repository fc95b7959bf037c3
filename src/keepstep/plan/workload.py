"""What is planned: a model, how it spreads over processes, and how one step is computed. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal

from keepstep.config.check import check_layout
from keepstep.config.layout import Layout
from keepstep.config.schema import ModelConfig, RunConfig

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Schedule = Literal["1f1b", "interleaved", "zero_bubble"]

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""From the furthest apart to the nearest: ranks of the last axis are neighbours."""


@dataclass(frozen=True)
class Degrees(Layout):
    """A layout that a plan can compare and spell."""

    replicate: int = 1
    shard: int = 1

    def stride(self, axis: str) -> int:
        """Ranks between two neighbours along an axis."""
        return prod(int(getattr(self, nearer)) for nearer in AXES[AXES.index(axis) + 1 :])

    def spelled(self) -> str:
        """For people: the axes that are used."""
        used = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " × ".join(used) or "one process"

    def words(self) -> Iterator[str]:
        """As overrides of a run."""
        for axis in reversed(AXES):
            yield f"parallel.{axis}={getattr(self, axis)}"


@dataclass(frozen=True)
class Workload:
    """One step of one run: everything that memory and time depend on."""

    model: ModelConfig
    degrees: Degrees
    global_batch: int
    microbatch: int
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    keep_gathered: bool = False
    compiled: bool = False
    joined_products: bool = True
    loss_chunks: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Schedule = "1f1b"
    stages_per_process: int = 1
    device_bytes: int = 80 * 2**30
    """Memory of the device: the loss is cut into pieces by it."""
    offload: bool = False
    exact: bool = False
    """`reproducible: elastic`: whole weights on every process, gradients summed as whole numbers."""
    lora_rank: int = 0
    """Width of adapters; above 0 they alone are trained, and the weights are frozen in compute precision."""
    lora_targets: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """The degrees as training takes them."""
        return Layout(**asdict(self.degrees))

    @property
    def microbatches(self) -> int:
        """Micro batches each process runs in one step."""
        # Rounded up: in exact mode some processes may have one more than others.
        return max(1, -(-self.global_batch // (self.microbatch * self.degrees.data_ranks)))

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of one micro batch that one process holds; context ranks share a row."""
        return self.microbatch * self.model.seq_len // self.degrees.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step consumes over all processes."""
        return self.global_batch * self.model.seq_len

    @property
    def layers_per_stage(self) -> int:
        """Blocks of the fullest pipeline stage."""
        return -(-self.model.layers // self.degrees.pipeline)

    @property
    def stays_gathered(self) -> bool:
        """Whether blocks' weights stay gathered from forward to backward and gradients are reduced once a step."""
        return self.keep_gathered or self.degrees.pipeline > 1

    @property
    def whole(self) -> bool:
        """Whether each process holds everything, without FSDP: a process alone in half precision, and exact mode."""
        alone = self.degrees.world_size == 1 and self.precision in ("bf16", "fp8") and not self.offload
        return alone or self.exact

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in products of matrices and activations."""
        return 4 if self.precision == "fp32" else 2


def workload_of(
    config: RunConfig, world_size: int, precision: Precision = "bf16", device_bytes: int = 80 * 2**30
) -> Workload:
    """The step that `config` means on `world_size` processes; `precision` is what `auto` stands for there.

    Where recomputation is left to the device's memory, none is assumed.
    """
    layout = check_layout(config, world_size)
    return Workload(
        model=config.model,
        degrees=Degrees(**asdict(layout)),
        global_batch=config.global_batch,
        microbatch=config.microbatch,
        precision=precision if config.precision == "auto" else config.precision,
        recompute="none" if config.compute.recompute == "auto" else config.compute.recompute,
        keep_gathered=config.parallel.keep_gathered,
        compiled=config.compute.compile,
        joined_products=config.compute.joined_products,
        loss_chunks=config.compute.loss_chunks,
        optimizer=config.optimizer.name,
        schedule=config.parallel.schedule,
        stages_per_process=config.parallel.stages_per_process,
        device_bytes=device_bytes,
        offload=config.parallel.offload,
        exact=config.reproducible == "elastic",
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets if config.lora.rank else (),
    )
