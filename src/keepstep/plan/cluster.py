"""Machines as data: GPUs, clusters and storage from the package's YAML and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from keepstep.core.errors import ConfigError, UsageError

LLAMA3_FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions of Llama 3's training, as its authors report them."""


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator."""

    name: str
    memory_gib: float
    """Memory that a process can have."""
    tflops: Mapping[str, float]
    """Dense TFLOP/s by precision, from the maker."""
    memory_gb_s: float
    matmul_share: float = 0.76
    """Of the dense rate, what the products of a decoder reach."""
    attention_share: float = 0.40
    """Of the dense rate, what fused causal attention reaches on the work that is left after masking."""
    memory_share: float = 0.85
    """Of the memory rate, what element-wise kernels reach."""

    @property
    def is_hopper(self) -> bool:
        """Whether products of our own run on it, which take in activations and turns."""
        return self.name.partition("-")[0].lower() in ("h100", "h200")

    def flops(self, precision: str) -> float:
        """Dense FLOP/s at a precision; fp8 falls back to bf16 where the device has none."""
        rate = self.tflops.get(precision) or self.tflops.get("bf16")
        if rate is None:
            raise ConfigError(f"GPU {self.name} has no rate for {precision}", "add it to tflops in its profile")
        return rate * 1e12


@dataclass(frozen=True)
class Storage:
    """A shared file system or object store that is bought by size."""

    name: str
    sku: str = ""
    mb_s_per_tib: float = 0.0
    gb_s: float = 0.0
    """A rate that does not grow with size."""
    step_tib: float = 1.0
    """Smallest size, and what it grows by."""
    price_per_tib_month: float = 0.0

    def write_gb_s(self, size_tib: float) -> float:
        """What all machines together can write, in GB/s."""
        return self.gb_s or self.mb_s_per_tib * size_tib / 1000


@dataclass(frozen=True)
class Cluster:
    """Equal machines joined by one network."""

    name: str
    gpu: Gpu
    gpus_per_node: int = 8
    nodes: int = 1
    sku: str = ""
    link_gb_s: float = 450.0
    """Between GPUs of a machine: one direction, for each GPU."""
    network_gb_s: float = 50.0
    """Between machines: one direction, for each GPU."""
    host_memory_gib: float = 0.0
    nvme_gb_s: float = 0.0
    """What one machine writes to its own disks."""
    price_per_node_hour: float = 0.0
    failures_per_gpu_hour: float = LLAMA3_FAILURES_PER_GPU_HOUR
    storage: tuple[Storage, ...] = field(default=())

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.gpus_per_node * self.nodes


@dataclass(frozen=True)
class Profiles:
    """Everything that can be named."""

    gpus: Mapping[str, Gpu]
    clusters: Mapping[str, Cluster]
    storage: Mapping[str, Storage]


def read_profiles(extra: Path | None = None) -> Profiles:
    """The package's profiles, with the user's laid over them."""
    ours = _shipped()
    return ours if extra is None else _overlaid(ours, _read_yaml(extra), str(extra))


def find_cluster(text: str, profiles: Profiles) -> Cluster:
    """`azure-nd-h100-v5:16` is sixteen machines; `h200:4` is four bare GPUs in one machine."""
    name, _, count_text = text.partition(":")
    count = int(count_text) if count_text.isdecimal() else (1 if not count_text else 0)
    if count < 1:
        raise UsageError(f"--cluster is {text!r}, but after the colon stands a number of machines", f"{name}:2")
    if name in profiles.clusters:
        return replace(profiles.clusters[name], nodes=count)
    if name in profiles.gpus:
        return Cluster(name=name, gpu=profiles.gpus[name], gpus_per_node=count)
    import difflib

    known = [*profiles.clusters, *profiles.gpus]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"no cluster or GPU is called {name!r}", hint)


@cache
def _shipped() -> Profiles:
    path = resources.files("keepstep.plan") / "data" / "clusters.yaml"
    import yaml

    return _overlaid(Profiles({}, {}, {}), yaml.safe_load(path.read_text(encoding="utf-8")), "clusters.yaml")


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}", "--profiles takes a YAML file of gpus, clusters, storage"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _overlaid(base: Profiles, raw: Any, where: str) -> Profiles:
    sections = _mapping(raw, where)
    _known(sections, ("gpus", "clusters", "storage"), where)
    gpus = dict(base.gpus) | {
        name: _built(Gpu, name, entry, f"{where}: gpus.{name}") for name, entry in _entries(sections, "gpus", where)
    }
    storage = dict(base.storage) | {
        name: _built(Storage, name, entry, f"{where}: storage.{name}")
        for name, entry in _entries(sections, "storage", where)
    }
    clusters = dict(base.clusters)
    for name, entry in _entries(sections, "clusters", where):
        spot = f"{where}: clusters.{name}"
        named = dict(entry)
        named["gpu"] = _lookup(gpus, named.get("gpu"), f"{spot}.gpu")
        tiers = named.get("storage", [])
        named["storage"] = tuple(_lookup(storage, tier, f"{spot}.storage") for tier in tiers)
        clusters[name] = _built(Cluster, name, named, spot)
    return Profiles(gpus, clusters, storage)


Kind = TypeVar("Kind", Gpu, Storage, Cluster)


def _built(kind: type[Kind], name: str, entry: Mapping[str, Any], where: str) -> Kind:
    allowed = [each.name for each in fields(kind) if each.name != "name"]
    _known(entry, allowed, where)
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    missing = [each for each in needed if each != "name" and each not in entry]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}", f"its keys are {', '.join(allowed)}")
    for key, value in entry.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
            raise ConfigError(f"{where}.{key} is {value}, but it must be 0 or more")
        if isinstance(value, str) and key not in ("sku", "gpu"):
            raise ConfigError(f"{where}.{key} is {value!r}, but it must be a number")
    return kind(name=name, **entry)


def _known(entry: Mapping[str, Any], allowed: Any, where: str) -> None:
    import difflib

    for key in entry:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            raise ConfigError(
                f"{where} has an unknown key {key}",
                f"did you mean {near[0]}?" if near else f"known: {', '.join(allowed)}",
            )


def _entries(sections: Mapping[str, Any], section: str, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    entries = _mapping(sections.get(section) or {}, f"{where}: {section}")
    return [(name, _mapping(entry, f"{where}: {section}.{name}")) for name, entry in entries.items()]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {value!r}")
    return value


Named = TypeVar("Named", Gpu, Storage)


def _lookup(known: Mapping[str, Named], name: Any, where: str) -> Named:
    if name not in known:
        raise ConfigError(f"{where} is {name!r}, which is not defined", f"known: {', '.join(known)}")
    return known[name]
