"""Machines as data: GPUs, clusters and storage from the package's YAML and the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

from keepstep.config.parse import load_own_yaml, load_yaml
from keepstep.core.errors import ConfigError, UsageError
from keepstep.core.messages import invalid_value, nearest
from keepstep.plan.workload import Precision

GIB = 2**30

CPU = "CPU"
"""The name of a device that is no GPU."""
LLAMA3_FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions of Llama 3's training, as its authors report them."""


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator."""

    name: str
    memory_gib: float
    """Memory that a process can use."""
    tflops: Mapping[str, float]
    """Dense TFLOP/s by precision, from the data sheet."""
    memory_gb_s: float
    matmul_share: float = 0.76
    """Share of the dense rate that a decoder's matmuls reach."""
    attention_share: float = 0.40
    """Share of the dense rate that fused causal attention reaches, counting only unmasked work."""
    memory_share: float = 0.85
    """Share of the memory rate that element-wise kernels reach."""
    link_gb_s: float = 450.0
    """Between bare GPUs in one machine; the profile of a cluster has its own."""
    host_gb_s: float = 25.0
    """Between the GPU and host memory, one direction."""
    note: str = ""
    """A sentence for whoever plans with it."""

    @property
    def is_hopper(self) -> bool:
        """Whether our own matmul kernels run on it, with fused activations and rope."""
        return self.name.partition("-")[0].lower() in ("h100", "h200")

    def is_named(self, device: str) -> bool:
        """Whether a device's name (`NVIDIA H200`) is this GPU (`h200`, `a100-80`, `rtx-4090`)."""
        if self.name.lower().startswith("rtx-"):
            return device.lower().endswith(self.name.lower().replace("-", " "))
        name, _, memory = self.name.partition("-")
        return name.lower() in device.lower() and (not memory or f"{memory}gb" in device.lower().replace(" ", ""))

    def flops(self, precision: str) -> float:
        """Dense FLOP/s at a precision; fp8 falls back to bf16 where the device has none."""
        rate = self.tflops.get(precision) or self.tflops.get("bf16")
        if rate is None:
            raise ConfigError(f"GPU {self.name} has no rate for {precision}", "add it to tflops in its profile")
        return rate * 1e12


@dataclass(frozen=True)
class Storage:
    """A shared file system or object store, priced by size."""

    name: str
    sku: str = ""
    mb_s_per_tib: float = 0.0
    gb_s: float = 0.0
    """A rate that does not depend on size."""
    step_tib: float = 1.0
    """Smallest size and increment."""
    price_per_tib_month: float = 0.0

    def write_gb_s(self, size_tib: float) -> float:
        """Write rate of all machines together, in GB/s."""
        return self.gb_s or self.mb_s_per_tib * size_tib / 1000


@dataclass(frozen=True)
class RequestPrices:
    """What an object store charges: dollars per 10,000 requests of a class, and per GiB."""

    name: str
    write: float
    read: float
    list: float
    other: float = 0.0
    """Reading an object's properties (HEAD)."""
    retrieval: float = 0.0
    """Per GiB read, in cool tiers."""
    egress: float = 0.0
    """Per GiB to another region or the internet; free within a region."""
    upload_requests: int = 1
    """Writes of an upload apart from its blocks."""
    as_of: str = ""
    source: str = ""
    note: str = ""
    metrics: tuple[str, ...] = ()
    """Commands that print the provider's own count."""


@dataclass(frozen=True)
class Cluster:
    """Equal machines in one network."""

    name: str
    gpu: Gpu
    gpus_per_node: int = 8
    nodes: int = 1
    sku: str = ""
    link_gb_s: float = 450.0
    """Between GPUs of a machine: one direction, per GPU."""
    network_gb_s: float = 50.0
    """Between machines: one direction, per GPU."""
    host_memory_gib: float = 0.0
    nvme_gb_s: float = 0.0
    """Write rate of one machine's own disks."""
    price_per_node_hour: float = 0.0
    failures_per_gpu_hour: float = LLAMA3_FAILURES_PER_GPU_HOUR
    storage: tuple[Storage, ...] = ()

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.gpus_per_node * self.nodes

    @property
    def unit(self) -> str:
        """What one of `gpus` is: on a CPU every process has its share of the machine."""
        return "process" if self.gpu.name == CPU else "GPU"


@dataclass(frozen=True)
class Machine:
    """The machines that a run has started on, as plain numbers."""

    device: str
    """The driver's name for it, such as `NVIDIA H200`, or `CPU`."""
    memory_bytes: int
    """Of each device."""
    peak_flops: float
    """Of each device, in the run's precision."""
    precision: Precision
    processes: int
    processes_per_node: int


@dataclass(frozen=True)
class Profiles:
    """All GPUs, clusters, storage and prices of requests by name."""

    gpus: Mapping[str, Gpu]
    clusters: Mapping[str, Cluster]
    storage: Mapping[str, Storage]
    requests: Mapping[str, RequestPrices]


def read_profiles(extra: Path | None = None) -> Profiles:
    """The package's profiles; the user's are added and replace those of the same name."""
    ours = _shipped()
    return ours if extra is None else _overlaid(ours, _read_yaml(extra), str(extra))


def find_cluster(text: str, profiles: Profiles) -> Cluster:
    """`azure-nd-h100-v5:16` is sixteen machines; `h200:4` is four bare GPUs in one machine."""
    name, _, count_text = text.partition(":")
    count = int(count_text) if count_text.isdecimal() else (1 if not count_text else 0)
    if count < 1:
        raise UsageError(invalid_value("--cluster", text, "must be NAME:COUNT"), "for example h100:64")
    if name in profiles.clusters:
        return replace(profiles.clusters[name], nodes=count)
    if name in profiles.gpus:
        return Cluster(name, profiles.gpus[name], gpus_per_node=count, link_gb_s=profiles.gpus[name].link_gb_s)
    known = [*profiles.clusters, *profiles.gpus]
    raise UsageError(f"no cluster or GPU is called {name!r}", _meant(name, known))


def cluster_from(machine: Machine) -> Cluster:
    """The cluster that a run has started on: a known GPU of that name, else one with the machine's own numbers."""
    known = [gpu for gpu in read_profiles().gpus.values() if gpu.is_named(machine.device)]
    memory_gib = machine.memory_bytes / GIB
    if known:
        gpu = min(known, key=lambda each: abs(each.memory_gib - memory_gib))
        gpu = replace(gpu, memory_gib=memory_gib)
    else:
        rate = machine.peak_flops / 1e12
        # A CPU's memory delivers about an eighth of a byte per operation.
        gpu = Gpu(machine.device, memory_gib, dict.fromkeys(("fp32", "bf16", "fp16"), rate), rate * 1e12 / 8 / 1e9)
    nodes = -(-machine.processes // machine.processes_per_node)
    return Cluster(machine.device, gpu, gpus_per_node=-(-machine.processes // nodes), nodes=nodes)


@cache
def _shipped() -> Profiles:
    profiles = Profiles({}, {}, {}, {})
    for name in ("clusters.yaml", "requests.yaml"):
        path = resources.files("keepstep.plan") / "data" / name
        profiles = _overlaid(profiles, load_own_yaml(path.read_text(encoding="utf-8")), name)
    return profiles


def _read_yaml(path: Path) -> Any:
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}", "--profiles takes a YAML file of gpus, clusters, storage, requests"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _overlaid(base: Profiles, raw: Any, where: str) -> Profiles:
    sections = _mapping(raw, where)
    _known(sections, ("gpus", "clusters", "storage", "requests"), where)
    gpus, clusters, storage, requests = dict(base.gpus), dict(base.clusters), dict(base.storage), dict(base.requests)
    for name, entry, spot in _entries(sections, "gpus", where):
        gpus[name] = _built(Gpu, name, entry, spot)
    for name, entry, spot in _entries(sections, "storage", where):
        storage[name] = _built(Storage, name, entry, spot)
    for name, entry, spot in _entries(sections, "clusters", where):
        gpu = _lookup(gpus, entry.get("gpu"), f"{spot}.gpu")
        tiers = tuple(_lookup(storage, tier, f"{spot}.storage") for tier in entry.get("storage", []))
        clusters[name] = _built(Cluster, name, {**entry, "gpu": gpu, "storage": tiers}, spot)
    for name, entry, spot in _entries(sections, "requests", where):
        made = _built(RequestPrices, name, entry, spot)
        requests[name] = replace(made, metrics=tuple(made.metrics))
    return Profiles(gpus, clusters, storage, requests)


Kind = TypeVar("Kind", Gpu, Storage, Cluster, RequestPrices)


def _built(kind: type[Kind], name: str, entry: Mapping[str, Any], where: str) -> Kind:
    allowed = [each.name for each in fields(kind) if each.name != "name"]
    _known(entry, allowed, where)
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.name != "name"]
    missing = [each for each in needed if each not in entry]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}", f"its keys are {', '.join(allowed)}")
    for key, value in entry.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
            raise ConfigError(invalid_value(f"{where}.{key}", value, "must be 0 or more"), "null where it is unknown")
        if isinstance(value, str) and key not in ("sku", "gpu", "as_of", "source", "note"):
            raise ConfigError(invalid_value(f"{where}.{key}", value, "must be a number"), "null where it is unknown")
    # A null is a value that is not known: the default stands for it.
    return kind(name=name, **{key: value for key, value in entry.items() if value is not None})


def _known(entry: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise ConfigError(f"{where} has an unknown key {key}", _meant(str(key), allowed))


def _meant(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"known: {', '.join(known)}"


def _entries(sections: Mapping[str, Any], section: str, where: str) -> list[tuple[str, Mapping[str, Any], str]]:
    entries = _mapping(sections.get(section) or {}, f"{where}: {section}")
    places = {name: f"{where}: {section}.{name}" for name in entries}
    return [(name, _mapping(entry, places[name]), places[name]) for name, entry in entries.items()]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold keys and values, not {value!r}", "see docs/planning.md for an example")
    return value


def _lookup(known: Mapping[str, Kind], name: Any, where: str) -> Kind:
    if name not in known:
        raise ConfigError(f"{where} is {name!r}, which is not defined", f"known: {', '.join(known)}")
    return known[name]
