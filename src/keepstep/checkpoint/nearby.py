"""Loading node-local checkpoints: what one node has lost, another one has a copy of and sends it over."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint import commit, parity
from keepstep.checkpoint.background import WriterProcess
from keepstep.checkpoint.manifest import MARKER, Manifest, StepFolder, parse_folder_name
from keepstep.checkpoint.peers import Peers, own_address
from keepstep.checkpoint.restore import bytes_of, files_needed
from keepstep.checkpoint.store import Store
from keepstep.checkpoint.together import Together
from keepstep.core.errors import CheckpointError

CHUNK_BYTES = 16 * 1024 * 1024


class Nearby:
    """What the processes of one job know of each other's disks. All methods are collective."""

    def __init__(self, store: Store, together: Together) -> None:
        self._store = store
        self._group = together.group
        self._gather = together.gather
        self._rank, self._world_size = together.rank, together.world_size
        self._nodes: list[str] = together.gather(f"{socket.gethostname()}:{store.locate()}")
        self._peers: Peers | None = None

    @property
    def node_count(self) -> int:
        """Different disks among the processes."""
        return len(set(self._nodes))

    @property
    def leads(self) -> bool:
        """Whether this is the first process of its node, the one that writes for all of them."""
        return self._nodes.index(self._nodes[self._rank]) == self._rank

    def forget(self) -> None:
        """The writers' addresses are no longer right: one was started anew."""
        self._peers = None

    def peers(self, place: str, writer: WriterProcess) -> Peers:
        """Start to serve copies and learn where everybody else does."""
        known = self._gather(self._peers is not None)
        if all(known) and self._peers is not None:
            return self._peers
        secret = str(self._gather(secrets.token_hex(16))[0])
        port = writer.serve(place, secret)
        addresses = self._gather((own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")), port))
        order = list(dict.fromkeys(self._nodes))
        mine = self._nodes[self._rank]
        members = {node: [rank for rank, at in enumerate(self._nodes) if at == node] for node in order}
        replica = None
        if len(order) > 1:
            following = members[order[(order.index(mine) + 1) % len(order)]]
            replica = addresses[following[members[mine].index(self._rank) % len(following)]]
        committer = addresses[0] if mine != self._nodes[0] else None
        others = tuple(addresses[members[node][0]] for node in order if node != mine)
        self._peers = Peers(secret, replica, committer, others)
        return self._peers

    def steps(self) -> list[StepFolder]:
        """Committed steps of all nodes together, the newest commit first."""
        found: dict[str, StepFolder] = {}
        for steps in self._gather(commit.committed_steps(self._store)):
            for step in steps:
                found.setdefault(step.name, step)
        return sorted(
            found.values(), key=lambda step: (step.marker.sequence, parse_folder_name(step.name)), reverse=True
        )

    def bring(self, where: StepFolder, into: Mapping[str, Any]) -> None:
        """Have on this node every file that its processes need from a step."""
        self._bring_description(where)
        manifest, failure = None, None
        try:
            manifest = commit.read_manifest(self._store, where)
        except CheckpointError as error:
            failure = error.message
        failures = [text for text in self._gather(failure) if text]
        if failures or manifest is None:
            raise CheckpointError(failures[0])
        present = self._gather(self._present(where, manifest))
        missing = self._gather(sorted(files_needed(manifest, into, self._rank, self._world_size) - present[self._rank]))
        for index in sorted({index for wanted in missing for index in wanted}):
            sources = [rank for rank, files in enumerate(present) if index in files]
            if not sources:
                name = manifest.files[index].name
                raise CheckpointError(f"{where.name}/{name} is on no node: its own is lost, and so is its replica's")
            nodes = {self._nodes[rank] for rank, wanted in enumerate(missing) if index in wanted}
            receives = self._nodes[self._rank] in nodes and self.leads
            self._copy(where, manifest, index, sources[0], receives)

    def share_descriptions(self) -> None:
        """Have the markers of all nodes on each: a node without one would take the step for never committed."""
        for step in self.steps():
            self._bring_description(step)

    def drop_damaged(self, where: StepFolder) -> list[str]:
        """Delete copies on this node that do not match their hashes, so that the next `bring` fetches good ones."""
        dropped: list[str] = []
        if self.leads:
            try:
                manifest = commit.read_manifest(self._store, where)
                for index in self._present(where, manifest):
                    if parity.file_problem(self._store, where.name, manifest, index):
                        dropped.append(manifest.files[index].name)
            except CheckpointError:
                # The manifest itself: `bring` copies it from a node that has it.
                dropped.append(where.marker.manifest)
            for name in dropped:
                self._store.remove(f"{where.name}/{name}")
        return [name for names in self._gather(dropped) for name in names]

    def _present(self, where: StepFolder, manifest: Manifest) -> set[int]:
        names = set(self._store.names(where.name))
        return {
            index
            for index, file in enumerate(manifest.files)
            if file.name in names and self._store.size(f"{where.name}/{file.name}") == file.size_bytes
        }

    def _bring_description(self, where: StepFolder) -> None:
        """Manifest and marker, from the first process that has them."""
        names = self._store.names(where.name)
        own: dict[str, bytes] = {}
        for name in (where.marker.manifest, MARKER):
            if name in names:
                own[name] = self._store.read(f"{where.name}/{name}")
        everyone = self._gather(own)
        for name in (where.marker.manifest, MARKER):
            content = next((files[name] for files in everyone if name in files), None)
            if content is not None and name not in names and self.leads:
                # Whoever needs it and finds none says so, to all processes at once.
                with suppress(OSError):
                    self._store.create(f"{where.name}/{name}", content)
        self._gather(None)

    def _copy(self, where: StepFolder, manifest: Manifest, index: int, source: int, receives: bool) -> None:
        """One file, from one process to all; those that need it write it, and loading checks it."""
        file = manifest.files[index]
        name = f"{where.name}/{file.name}"
        failure: str | None = None

        def chunks() -> Iterator[memoryview]:
            for start in range(0, file.size_bytes, CHUNK_BYTES):
                chunk = torch.zeros(min(CHUNK_BYTES, file.size_bytes - start), dtype=torch.uint8)
                if self._rank == source:
                    self._store.read_into(name, start, bytes_of(chunk))
                dist.broadcast(chunk, src=source, group=self._group)
                yield bytes_of(chunk)

        stream = chunks()
        if receives:
            try:
                self._store.remove(name)
                self._store.write(name, stream)
            except OSError as error:
                failure = f"{self._store.locate(name)} could not be written: {error}"
        # Whoever does not write, or could not, still takes part in every broadcast.
        for _ in stream:
            pass
        failures = [text for text in self._gather(failure) if text]
        if failures:
            raise CheckpointError(failures[0])
