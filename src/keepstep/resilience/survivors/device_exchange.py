"""Sums over the members of one epoch by a collective library, without a way through host memory: NCCL on GPUs.

NCCL itself notices neither a lost process nor a new membership: it waits. So the direct connections stay, and say who
is there: every member reports that its numbers are ready, all of them start the collective, and they watch their
connections until it ends. If one of these breaks, or the coordinator has something to say, the process aborts the
collective. The next epoch has new groups, with a store of its own; groups inside a replica know nothing of this.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from keepstep.core.failpoints import reach
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.exchange import Exchange, InterruptedSumError, PeerLostError
from keepstep.resilience.survivors.shared_numbers import Numbers

POLL_MS = 1
"""Between two looks at a collective that has not ended."""
STORE_TIMEOUT_S = 30
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Group(Protocol):
    """What is needed of torch's backends."""

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Start to add up in place; returns torch's `Work`."""

    def abort(self) -> None:
        """End what is under way. The group is of no use any more."""


MakeGroup = Callable[[Store, int, int], Group]
"""Makes a group of this store, this rank and this many processes."""


def nccl_group(store: Store, rank: int, size: int) -> Group:
    """A group of NCCL that waits for nobody but in `allreduce`."""
    options = dist.ProcessGroupNCCL.Options()
    # Else nobody could abort a communicator while it is formed.
    options.config.blocking = 0
    options._timeout = timedelta(seconds=STORE_TIMEOUT_S)
    before = os.environ.get(_ERROR_HANDLING)
    # Else the group's watchdog would end the process for a collective that was aborted.
    os.environ[_ERROR_HANDLING] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value] # its stub lacks it
    finally:
        del os.environ[_ERROR_HANDLING]
        if before is not None:
            os.environ[_ERROR_HANDLING] = before


class DeviceExchange(Exchange):
    """An exchange whose large sums are those of `group`: of tensors, on their device."""

    def __init__(
        self, control: socket.socket, rank: int, peers: Mapping[int, socket.socket], make_group: MakeGroup
    ) -> None:
        """Form the group. OSError where a member is gone."""
        self._store = _common_store(rank, peers) if peers else None
        self._group = make_group(self._store, rank, len(peers) + 1) if self._store is not None else None
        super().__init__(control, rank, peers)

    def close(self) -> None:
        """Leave: the others notice."""
        self._abort()
        super().close()

    def sum_(self, numbers: Numbers | Tensor) -> None:
        """Replace `numbers` by their sum over all members."""
        if isinstance(numbers, np.ndarray):
            super().sum_(numbers)
            return
        self.changed_numbers = False
        if self._group is None:
            return
        # Who is lost before this has not changed anything yet.
        self._wait_for_all()
        self.changed_numbers = True
        try:
            work = self._group.allreduce([numbers])
            reach("sum_half")
            self._watch(work)
            work.wait()
        except (PeerLostError, InterruptedSumError):
            self._abort()
            raise
        except RuntimeError as error:
            # A collective fails because somebody is gone: the coordinator says who.
            self._abort()
            raise InterruptedSumError from error

    def _watch(self, work: Any) -> None:
        """Return when the collective has ended."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        by_fd = {connection.fileno(): peer for peer, connection in self._peers.items()}
        for fd in by_fd:
            # Nobody sends anything before the step is committed: what is to read is the end of the connection.
            poll.register(fd, select.POLLIN)
        while not work.is_completed():
            for fd, _ in poll.poll(POLL_MS):
                if fd in by_fd:
                    raise PeerLostError(by_fd[fd])
                raise InterruptedSumError

    def _abort(self) -> None:
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()
            self._group = None


def _common_store(rank: int, peers: Mapping[int, socket.socket]) -> Store:
    """A store that the first member hosts for this epoch."""
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    if rank == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        for connection in peers.values():
            wire.send(connection, {"kind": "store", "port": store.port})
        return store
    peers[0].settimeout(STORE_TIMEOUT_S)
    port = wire.receive(peers[0])["port"]
    host = peers[0].getpeername()[0] if peers[0].family != socket.AF_UNIX else "localhost"
    try:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise ConnectionError(f"no store at {host}:{port}: {error}") from error
