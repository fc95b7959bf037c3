"""Silent data corruption: find a process whose bits differ from those of others with the same work."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from keepstep.core.errors import HardwareError
from keepstep.data.batch import Batch
from keepstep.parallel.mesh import ParallelMesh
from keepstep.train.telemetry.recorder import Recorder


def check_corruption(
    evaluate: Callable[[Batch], tuple[Tensor, int]], batch: Batch, mesh: ParallelMesh, recorder: Recorder, step: int
) -> None:
    """Let every process compute the same rows; a HardwareError names those whose bits differ. Collective."""
    with torch.no_grad():
        sums, _ = evaluate(batch)
    odd = odd_ranks(gather_bits(sums[0], same_work(mesh)))
    if not odd:
        return
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node())
    named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in odd)
    found = f"{named} computed other bits than the rest from the same rows"
    odd_hosts = [hosts[rank] for rank in odd]
    recorder.event("fault", step=step, reason="corruption", ranks=odd, hosts=odd_hosts, message=found)
    raise HardwareError(
        found,
        "check that machine with keepstep doctor and replace it; restart from a checkpoint before this step",
    )


def same_work(mesh: ParallelMesh) -> int:
    """A number that is the same for processes which compute the same from the same rows: the data replicas."""
    layout = mesh.layout
    place = (mesh.pipeline_rank * layout.tensor + mesh.device_mesh.get_local_rank("tensor")) * layout.context
    # Experts of a process compute the rows of its neighbours too, each at another place among them.
    expert_rank = mesh.device_mesh.get_local_rank("expert") if layout.expert > 1 else 0
    return (place + mesh.context_rank) * layout.expert + expert_rank


def gather_bits(loss: Tensor, work: int) -> list[tuple[int, int]]:
    """Every process's work and the bits of its loss, by rank. Collective."""
    own = torch.stack([torch.full((), work, dtype=torch.int32, device=loss.device), loss.float().view(torch.int32)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [(int(work), int(bits)) for work, bits in torch.stack(everyone).tolist()]


def odd_ranks(found: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks whose bits differ from most that did the same work; all of them where there is no majority."""
    by_work: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, (work, bits) in enumerate(found):
        by_work[work][rank] = bits
    odd: list[int] = []
    for each in by_work.values():
        bits, votes = Counter(each.values()).most_common(1)[0]
        has_majority = 2 * votes > len(each)
        odd += [rank for rank, own in each.items() if own != bits or not has_majority]
    return sorted(odd)
