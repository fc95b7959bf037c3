"""The state of a replica, as far as the protocol knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from keepstep.resilience.survivors.shared_numbers import Numbers
from keepstep.resilience.survivors.state_copy import Bytes


class ReplicaState(Protocol):
    """What replicas hold in common, as a member gives it away and one that joins takes it over."""

    def part(self, part: int, parts: int) -> Bytes:
        """A copy of one of `parts` equal parts of all tensors."""

    def values(self) -> dict[str, Any]:
        """Plain values, after every step in flight has been read. Called on all members; one of them sends it."""

    def buffers(self) -> list[memoryview]:
        """Memory for all tensors."""

    def install(self) -> None:
        """Take over the tensors, which are complete."""

    def replay(self, facts: Mapping[str, Any], sums: Numbers) -> None:
        """Apply a step that the members have committed; `facts` and `sums` are those that they gave to `relay`."""
