"""Bytes a run keeps on disk, how long saving takes on each kind of storage, and the cheapest that saves in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from keepstep.config.schema import ModelConfig
from keepstep.models.size import parameter_count
from keepstep.plan.cluster import Cluster, Storage
from keepstep.plan.parameters import block_adapters, block_parameters
from keepstep.plan.workload import Degrees, Workload

TIB = 2**40


@dataclass(frozen=True)
class SaveTime:
    """Writing one checkpoint to one storage of one size."""

    tier: str
    sku: str
    size_tib: float
    write_gb_s: float
    seconds: float
    price_per_month: float

    @property
    def minutes(self) -> float:
        """Bytes over bytes a second."""
        return self.seconds / 60

    @property
    def minutes_mixed_units(self) -> float:
        """The same as tables that divide GiB by GB/s have it: 7% too low."""
        return self.minutes * 1e9 / 2**30


def checkpoint_bytes(
    model: ModelConfig, optimizer: str = "adamw", layout: Literal["keepstep", "megatron"] = "keepstep"
) -> int:
    """One checkpoint: fp32 weights and both moments (12 bytes a parameter); Megatron adds bf16 weights (14)."""
    parameters = parameter_count(model)
    if optimizer == "muon":
        matrices = block_parameters(model) * model.layers
        return 8 * matrices + 12 * (parameters - matrices)
    return (14 if layout == "megatron" else 12) * parameters


def adapter_bytes(work: Workload) -> int:
    """One checkpoint of a run that trains adapters: frozen weights come back from where the run began."""
    adapters = block_adapters(replace(work, degrees=Degrees())) * work.model.layers
    return (8 if work.optimizer == "muon" else 12) * adapters


def dataset_bytes(tokens: float, vocab: int) -> int:
    """Tokens on disk: two bytes each where the vocabulary fits, else four."""
    return int(tokens * (2 if vocab <= 2**16 else 4))


def save_time(storage: Storage, size_tib: float, size_bytes: float) -> SaveTime:
    """Writing `size_bytes` to a storage of this size at its full rate."""
    rate = storage.write_gb_s(size_tib)
    price = storage.price_per_tib_month * size_tib
    return SaveTime(storage.name, storage.sku, size_tib, rate, size_bytes / (rate * 1e9), price)


def smallest_size_tib(storage: Storage, capacity_bytes: float, rate_gb_s: float = 0.0) -> float | None:
    """The smallest size that holds `capacity_bytes` and writes at `rate_gb_s`; None where no size does."""
    wanted = capacity_bytes / TIB
    if storage.gb_s:
        if storage.gb_s < rate_gb_s:
            return None
    else:
        wanted = max(wanted, rate_gb_s * 1000 / storage.mb_s_per_tib)
    return max(1, ceil(wanted / storage.step_tib - 1e-9)) * storage.step_tib


def save_times(tiers: Iterable[Storage], size_bytes: float, copies: int) -> list[SaveTime]:
    """One line a tier, each at the smallest size that holds `copies` checkpoints."""
    lines = []
    for tier in tiers:
        size = smallest_size_tib(tier, copies * size_bytes)
        if size is not None:
            lines.append(save_time(tier, size, size_bytes))
    return lines


def cheapest(tiers: Iterable[Storage], size_bytes: float, copies: int, within_s: float) -> SaveTime | None:
    """The tier and size with the lowest price a month that holds the copies and writes one within the time."""
    fitting = []
    for tier in tiers:
        size = smallest_size_tib(tier, copies * size_bytes, size_bytes / within_s / 1e9)
        if size is not None:
            fitting.append(save_time(tier, size, size_bytes))
    return min(fitting, key=lambda each: each.price_per_month, default=None)


def local_save_s(cluster: Cluster, size_bytes: float) -> float | None:
    """Seconds when every machine writes its part to its own disks; None where the profile says nothing of them."""
    return size_bytes / (cluster.nodes * cluster.nvme_gb_s * 1e9) if cluster.nvme_gb_s else None
