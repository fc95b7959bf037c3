"""Requests of a run to an object store: reads, writes and lists for data and checkpoints, and their price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.errors import UsageError
from keepstep.core.messages import nearest
from keepstep.core.units import format_bytes
from keepstep.plan.cluster import GIB, Profiles, RequestPrices
from keepstep.plan.plan import Plan

MIB = 2**20
BLOCKS_MIB = (4, 8, 16, 32, 64)
"""Block sizes to compare; infra/blobfuse has 16 for data and 32 for checkpoints."""
_PER = 10_000
_STORES = {
    "az": "azure-blob-hot", "abfs": "azure-blob-hot", "adl": "azure-blob-hot",
    "s3": "s3-standard", "s3a": "s3-standard", "gs": "gcs-standard", "gcs": "gcs-standard",
}  # fmt: skip


@dataclass(frozen=True)
class Requests:
    """Requests by class, and bytes in each direction."""

    reads: int = 0
    writes: int = 0
    lists: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def cost(self, prices: RequestPrices) -> float:
        """Dollars for the requests and for retrieval, without egress."""
        requests = self.reads * prices.read + self.writes * prices.write + self.lists * prices.list
        return requests / _PER + self.read_bytes / GIB * prices.retrieval


def save_requests(size_bytes: int, files: int, block_bytes: int, upload_requests: int) -> Requests:
    """One checkpoint: each process writes a data file in blocks and a small part file, and the first one commits.

    The commit lists the step, reads all part files, and writes manifest, marker and `latest`. Deletes are free.
    """
    blocks = -(-size_bytes // files // block_bytes) if size_bytes >= files else 1
    writes = files * (blocks + upload_requests) + files + 3
    return Requests(reads=files, writes=writes, lists=1, written_bytes=size_bytes)


def copied_data(size_bytes: int, nodes: int, block_bytes: int) -> Requests:
    """Every node copies all data to its own disk once, block by block."""
    return Requests(reads=nodes * -(-size_bytes // block_bytes), lists=nodes, read_bytes=nodes * size_bytes)


def shuffled_data(rows: int, row_bytes: int, block_bytes: int) -> Requests:
    """Rows in random order through a mount without such a copy: every row fetches whole blocks."""
    blocks = -(-row_bytes // block_bytes)
    return Requests(reads=rows * blocks, lists=1, read_bytes=rows * blocks * block_bytes)


def find_prices(name: str | None, profiles: Profiles, config: RunConfig | None = None) -> RequestPrices | None:
    """Prices by name; without one those of the store that holds the run's checkpoints or data, if it is one."""
    if name is None:
        places = [config.checkpoint.folder, config.data.path] if config else []
        found = (_STORES.get(str(place or "").partition(":/")[0]) for place in places)
        return profiles.requests.get(next((each for each in found if each), ""))
    if name not in profiles.requests:
        near = nearest(name, list(profiles.requests))
        known = f"known: {', '.join(profiles.requests)}"
        raise UsageError(f"--price is {name!r}, which is not known", f"did you mean {near}?" if near else known)
    return profiles.requests[name]


def saves_of(plan: Plan) -> int | None:
    """How many checkpoints the run writes; None where epochs decide."""
    interval_s = plan.goodput.interval_s
    if plan.busy_s is None or not interval_s:
        return None
    return max(1, round(plan.busy_s / interval_s))


def request_values(plan: Plan, prices: RequestPrices) -> dict[str, Any]:
    """Requests and dollars of the whole run for each block size, as JSON."""
    size, work, saves = plan.storage.dataset_bytes, plan.work, saves_of(plan)
    rows: list[dict[str, Any]] = []
    for block in (mib * MIB for mib in BLOCKS_MIB):
        kinds: dict[str, Requests] = {}
        if size is not None:
            count = work.global_batch * (plan.steps or 0)
            kinds["data_copied"] = copied_data(size, plan.cluster.nodes, block)
            kinds["data_shuffled"] = shuffled_data(count, size // max(1, count), block)
        kinds["save"] = save_requests(plan.storage.checkpoint_bytes, plan.cluster.gpus, block, prices.upload_requests)
        costs = {kind: {**asdict(each), "cost": each.cost(prices)} for kind, each in kinds.items()}
        rows.append({"block_mib": block // MIB, **costs})
    return {"prices": asdict(prices), "saves": saves, "by_block": rows}


def request_lines(values: dict[str, Any], prices: RequestPrices) -> Iterator[str]:
    """The section of a plan."""
    yield f"requests  of the whole run on {priced_with(prices)}"
    saves = values["saves"]
    yield f"  {'block':>6}  {'data, copied to each node':<38}{'data, shuffled through a mount':<44}one save"
    for row in values["by_block"]:
        data = [
            f"{each['reads']:,} reads, {format_bytes(each['read_bytes'])}, ${each['cost']:,.2f}" if each else "unknown"
            for each in (row.get("data_copied"), row.get("data_shuffled"))
        ]
        save = f"{row['save']['writes']:,} writes, ${row['save']['cost']:,.2f}"
        yield f"  {row['block_mib']:>2} MiB  {data[0]:<38}{data[1]:<44}{save}"
    if saves is not None:
        yield f"  the run saves {saves:,} times; deletes are free, and so is egress to machines in the same region"
    copied = values["by_block"][0].get("data_copied")
    if prices.egress and copied:
        cost = copied["read_bytes"] / GIB * prices.egress
        yield f"  egress of the copied data to another region or the internet: ${cost:,.0f}"
    yield from metrics_lines(prices)


def priced_with(prices: RequestPrices) -> str:
    """The name of a price table with its source, since a sum is only as good as that."""
    note = f"{prices.note}, " if prices.note else ""
    return f"{prices.name} (prices: {note}{prices.source or 'yours'}{f', {prices.as_of}' if prices.as_of else ''})"


def metrics_lines(prices: RequestPrices) -> Iterator[str]:
    """The provider's own count, to compare with."""
    if prices.metrics:
        yield "  the provider's own count:"
        yield from (f"    {command}" for command in prices.metrics)


def save_table(prices: RequestPrices, sizes: dict[str, int], writers: int) -> list[dict[str, Any]]:
    """Requests of one save by size and block size, and of reading it back."""
    return [
        {
            "checkpoint": name,
            "block_mib": mib,
            "writes": (save := save_requests(size, writers, mib * MIB, prices.upload_requests)).writes,
            "reads": (restore := copied_data(size, 1, mib * MIB)).reads,
            "save_cost": save.cost(prices),
            "restore_cost": restore.cost(prices),
        }
        for name, size in sizes.items()
        for mib in BLOCKS_MIB
    ]
