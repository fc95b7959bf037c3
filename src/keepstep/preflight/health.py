"""The verdict on every node: measured numbers in; pass, warn or fail and the nodes to drain out. Pure functions."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Literal

from keepstep.models.size import peak_flops

Status = Literal["pass", "warn", "fail"]
_STATUSES: tuple[Status, ...] = ("pass", "warn", "fail")
Report = Mapping[str, Any]
"""What one process measured: see keepstep.preflight.node_probe."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table."""

    name: str
    status: Status
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Limits:
    """A number below `warn` or `fail` is too low. Shares are of what the other nodes reach."""

    warn: float
    fail: float

    def judge(self, value: float) -> Status:
        """pass, warn or fail."""
        return "fail" if value < self.fail else "warn" if value < self.warn else "pass"


# Bus bandwidth of an all-reduce over the whole job, GB/s: 8 × 400 Gb/s InfiniBand a node and NVLink inside it.
BUS_GB_S: Mapping[str, Limits] = {"H200": Limits(400, 300), "H100": Limits(400, 300)}
GEMM_OF_PEAK = Limits(0.6, 0.45)
GPU_OF_MEDIAN = Limits(0.9, 0.75)
# Processes on CPUs share cores with other programs, so only a large difference counts.
CPU_OF_MEDIAN = Limits(0.5, 0.25)
LINK_OF_MEDIAN = Limits(0.6, 0.3)
STORAGE_OF_MEDIAN = Limits(0.4, 0.15)
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0


@dataclass(frozen=True)
class NodeHealth:
    """What was found on one node."""

    node: str
    checks: tuple[Check, ...]

    @property
    def status(self) -> Status:
        """The worst of its checks."""
        return worst(self.checks)


@dataclass(frozen=True)
class ClusterHealth:
    """Every node, and what concerns all of them."""

    nodes: tuple[NodeHealth, ...]
    shared: tuple[Check, ...]
    absent: tuple[str, ...] = ()

    @property
    def drain(self) -> list[str]:
        """Nodes that should take no jobs until they are repaired."""
        return [*(node.node for node in self.nodes if node.status == "fail"), *self.absent]

    @property
    def sound(self) -> bool:
        """Whether nothing failed."""
        return not self.drain and worst(self.shared) != "fail"


def worst(checks: Iterable[Check]) -> Status:
    """The worst status of all checks."""
    return max((check.status for check in checks), key=_STATUSES.index, default="pass")


def judge_cluster(reports: Sequence[Report], expected: Sequence[str] = ()) -> ClusterHealth:
    """Compare every node with the thresholds of its GPU and with the other nodes."""
    by_node: dict[str, list[Report]] = {}
    for report in reports:
        by_node.setdefault(report["node"], []).append(report)
    slow_links = _slow_links(reports)
    checks = {node: tuple(_node_checks(node, by_node[node], reports, slow_links)) for node in sorted(by_node)}
    absent = tuple(name for name in expected if name not in by_node)
    return ClusterHealth(tuple(starmap(NodeHealth, checks.items())), tuple(_shared_checks(reports)), absent)


def _shared_checks(reports: Sequence[Report]) -> Iterable[Check]:
    speeds = [report["allreduce_gb_s"] for report in reports if report.get("allreduce_gb_s")]
    if not speeds:
        return
    value, device = min(speeds), str(reports[0].get("device", ""))
    limits = next((limits for name, limits in BUS_GB_S.items() if name in device), None)
    status = limits.judge(value) if limits else "pass"
    rule = f" (warn under {limits.warn:.0f}, fail under {limits.fail:.0f})" if limits else ""
    hint = "run again on halves of the nodes to find the slow one; check links and NCCL's topology file"
    yield Check("all-reduce", status, f"{value:.3g} GB/s bus bandwidth{rule}", hint if status != "pass" else "")


def _node_checks(
    node: str, mine: Sequence[Report], everyone: Sequence[Report], slow_links: Mapping[str, str]
) -> Iterable[Check]:
    yield _gemm(mine, everyone)
    if node in slow_links:
        yield Check("network", "fail", slow_links[node], "check the cable, the switch port and the network settings")
    elif any("link_gb_s" in report for report in mine):
        speeds = [report["link_gb_s"] for report in mine if "link_gb_s" in report]
        yield Check("network", "pass", f"{min(speeds):.3g} GB/s from its neighbour")
    yield from _storage(mine, everyone)
    yield from _clock(mine)
    down = sorted({link for report in mine for link in report.get("inactive_links", ())})
    if down:
        hint = "ibstat shows the port; reseat or replace the cable"
        yield Check("links", "fail", f"{', '.join(down)} not active", hint)


def _gemm(mine: Sequence[Report], everyone: Sequence[Report]) -> Check:
    value = min(report["gemm_tflops"] for report in mine)
    middle = statistics.median(report["gemm_tflops"] for report in everyone)
    device = str(mine[0].get("device", ""))
    on_gpu = device not in ("", "cpu")
    status = (GPU_OF_MEDIAN if on_gpu else CPU_OF_MEDIAN).judge(value / middle)
    text = f"{value:.3g} TFLOP/s, {value / middle:.0%} of the median"
    peak = peak_flops(device, "bf16") if on_gpu else None
    if peak:
        share = value * 1e12 / peak
        status = max(status, GEMM_OF_PEAK.judge(share), key=_STATUSES.index)
        text += f", {share:.0%} of {device}'s peak"
    hint = "check clocks, power and temperature (nvidia-smi -q)" if status != "pass" else ""
    return Check("matrix", status, text, hint)


def _slow_links(reports: Sequence[Report]) -> dict[str, str]:
    """The nodes at fault for slow links: of a link's two ends, the one with more slow links."""
    links = [(report["link_from"], report["node"], report["link_gb_s"]) for report in reports if "link_gb_s" in report]
    if len(links) < 2:
        return {}
    best = max(speed for _, _, speed in links)
    slow = [link for link in links if link[2] / best < LINK_OF_MEDIAN.fail]
    blamed: dict[str, str] = {}
    while slow:
        ends = [end for link in slow for end in link[:2]]
        node = max(sorted(set(ends)), key=ends.count)
        speeds = [speed for first, second, speed in slow if node in (first, second)]
        blamed[node] = f"{min(speeds):.3g} GB/s, others reach {best:.3g}"
        slow = [link for link in slow if node not in link[:2]]
    return blamed


def _storage(mine: Sequence[Report], everyone: Sequence[Report]) -> Iterable[Check]:
    for kind in ("storage", "data"):
        error = next((report[f"{kind}_error"] for report in mine if report.get(f"{kind}_error")), None)
        if error:
            yield Check(kind, "fail", error, "check the mount, its options and the permissions on this node")
    for kind in ("write_gb_s", "read_gb_s"):
        speeds = [report[kind] for report in mine if report.get(kind)]
        if not speeds:
            continue
        middle = statistics.median(report[kind] for report in everyone if report.get(kind))
        status = STORAGE_OF_MEDIAN.judge(min(speeds) / middle)
        hint = "compare with keepstep bench storage" if status != "pass" else ""
        yield Check(f"storage {kind.split('_')[0]}", status, f"{min(speeds):.3g} GB/s", hint)


def _clock(mine: Sequence[Report]) -> Iterable[Check]:
    skews = [report["clock_skew_s"] for report in mine if "clock_skew_s" in report]
    if not skews:
        return
    value = max(skews, key=abs)
    status: Status = "fail" if abs(value) > CLOCK_FAIL_S else "warn" if abs(value) > CLOCK_WARN_S else "pass"
    hint = "start chrony or ntpd here" if status != "pass" else ""
    yield Check("clock", status, f"{value:+.3f} s from the median", hint)


def table(checks: Iterable[Check], prefix: str = "") -> list[str]:
    """Lines for people: status, name, value, and the remedy where one is needed."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:<5} {prefix}{check.name:<15} {check.value}")
        if check.hint and check.status != "pass":
            lines.append(f"      {' ' * len(prefix)}{'':<15} hint: {check.hint}")
    return lines


def cluster_lines(health: ClusterHealth, system: str) -> Iterator[str]:
    """The whole answer for people: all checks, the nodes to drain, and the command that drains them."""
    yield from table(health.shared)
    width = max(len(node.node) for node in health.nodes)
    for node in health.nodes:
        yield from table(node.checks, f"{node.node:<{width}}  ")
    for name in health.absent:
        yield f"fail  {name}  did not take part"
    if not health.drain:
        yield "next: all nodes may train" if health.sound else "next: fix what failed; no single node is at fault"
        return
    yield f"drain: {','.join(health.drain)}"
    if system == "slurm":
        reason = shlex.quote("keepstep doctor")
        yield f"next: scontrol update nodename={','.join(health.drain)} state=drain reason={reason}"
    elif system == "k8s":
        yield f"next: kubectl cordon {' '.join(health.drain)}"
