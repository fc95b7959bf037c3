"""NCCL sums of replicas that outlive each other, as far as one GPU goes: groups of one are aborted and made again."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from keepstep.resilience.survivors.device_exchange import DeviceExchange, Group, nccl_group
from keepstep.resilience.survivors.exchange import Exchange, PeerLostError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VALUES = [1, 2**62, -(2**40), 7]


@pytest.fixture
def inner_group() -> Iterator[None]:
    """The process group of a replica, which must not notice what happens between replicas."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def summed(group: Group) -> list[int]:
    numbers = torch.tensor(VALUES, device="cuda")
    work = group.allreduce([numbers])
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    return numbers.tolist()


def inner_sum() -> float:
    number = torch.full((), 3.0, device="cuda")
    dist.all_reduce(number)
    return float(number)


def test_aborted_group_is_replaced_and_the_inner_group_stays(inner_group: None) -> None:
    assert inner_sum() == 3.0
    for epoch in range(3):
        group = nccl_group(dist.PrefixStore(f"epoch-{epoch}", dist.HashStore()), 0, 1)
        assert summed(group) == VALUES
        group.abort()
        assert inner_sum() == 3.0
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_peer_lost_while_the_collective_waits_aborts_it(inner_group: None) -> None:
    coordinator, control = socket.socketpair()
    ours, theirs = socket.socketpair()

    def make_group(store: dist.Store, _rank: int, _size: int) -> Group:
        # The collective itself is of this process alone: one GPU has no second rank.
        group = nccl_group(store, 0, 1)
        # The first sum connects, which may take seconds.
        summed(group)
        # Work that the next one has to wait for, about two seconds of it.
        torch.cuda._sleep(4 * 10**9)
        return group

    numbers = torch.tensor(VALUES, device="cuda")
    exchange = DeviceExchange(control, 0, {1: ours}, make_group)
    theirs.recv(1000)
    peer = Exchange(control, 1, {0: theirs})

    def leave() -> None:
        peer._wait_for_all()
        time.sleep(0.2)
        peer.close()

    thread = threading.Thread(target=leave)
    thread.start()
    started = time.perf_counter()
    with pytest.raises(PeerLostError):
        exchange.sum_(numbers)
    print(f"noticed after {time.perf_counter() - started:.2f} s")
    thread.join()
    exchange.close()
    torch.cuda.synchronize()
    assert inner_sum() == 3.0
    assert summed(nccl_group(dist.HashStore(), 0, 1)) == VALUES
    for each in (coordinator, control):
        each.close()


def test_large_tensor_is_summed_in_place(inner_group: None) -> None:
    group = nccl_group(dist.HashStore(), 0, 1)
    numbers = torch.ones(10**8, dtype=torch.int64, device="cuda")
    summed(group)
    started = time.perf_counter()
    work = group.allreduce([numbers])
    while not work.is_completed():
        time.sleep(0.0001)
    seconds = time.perf_counter() - started
    print(f"800 MB in {seconds * 1000:.1f} ms")
    assert bool((numbers == 1).all())
    group.abort()
