"""Load node-local checkpoints: files that one node has lost are fetched from the node that has a copy."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from keepstep.checkpoint.async_save.writer import WriterProcess
from keepstep.checkpoint.node_local.replicas import Peers
from keepstep.checkpoint.process_group import ProcessGroupInfo
from keepstep.checkpoint.protocol import commit, parity
from keepstep.checkpoint.protocol.manifest import CommittedCheckpoint, Manifest
from keepstep.checkpoint.protocol.restore import bytes_of, files_needed
from keepstep.checkpoint.storage.store import Store
from keepstep.core.errors import CheckpointError
from keepstep.core.ranks import own_address
from keepstep.core.step_folders import MARKER

CHUNK_BYTES = 16 * 1024 * 1024


class NodeLocalLoader:
    """What the processes of one job know about each other's disks. All methods are collective."""

    def __init__(self, store: Store, processes: ProcessGroupInfo) -> None:
        self._store = store
        self._group = processes.group
        self._gather = processes.gather
        self._rank, self._world_size = processes.rank, processes.world_size
        self._nodes: list[str] = processes.gather(f"{socket.gethostname()}:{store.locate()}")
        self._peers: Peers | None = None

    @property
    def node_count(self) -> int:
        """The number of different disks among the processes."""
        return len(set(self._nodes))

    @property
    def is_node_leader(self) -> bool:
        """Whether this is the first process of its node, which writes for all processes of the node."""
        return self._nodes.index(self._nodes[self._rank]) == self._rank

    def reset_peers(self) -> None:
        """Discard the writers' addresses, because a writer was restarted."""
        self._peers = None

    def peers(self, place: str, writer: WriterProcess) -> Peers:
        """Let the writer receive copies, and exchange the addresses of all writers."""
        known = self._gather(self._peers is not None)
        if all(known) and self._peers is not None:
            return self._peers
        secret = str(self._gather(secrets.token_hex(16))[0])
        port = writer.serve(place, secret)
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        addresses = self._gather((own_address(master) or "127.0.0.1", port))
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

    def steps(self) -> list[CommittedCheckpoint]:
        """The committed steps of all nodes, newest commit first."""
        found: dict[str, CommittedCheckpoint] = {}
        for steps in self._gather(commit.committed_steps(self._store)):
            for step in steps:
                found.setdefault(step.name, step)
        return commit.newest_first(found.values())

    def fetch(self, where: CommittedCheckpoint, into: Mapping[str, Any]) -> None:
        """Fetch every file of a step that the processes of this node need and do not have."""
        self._fetch_manifest(where)
        manifest, failure = None, None
        try:
            manifest = commit.read_manifest(self._store, where)
        except CheckpointError as error:
            failure = error.message
        self._raise_any(failure)
        assert manifest is not None
        present = self._gather(self._present(where, manifest))
        missing = self._gather(sorted(files_needed(manifest, into, self._rank, self._world_size) - present[self._rank]))
        for index in sorted({index for wanted in missing for index in wanted}):
            sources = [rank for rank, files in enumerate(present) if index in files]
            if not sources:
                name = manifest.files[index].name
                raise CheckpointError(f"{where.name}/{name} is on no node: both the file and its replica are lost")
            nodes = {self._nodes[rank] for rank, wanted in enumerate(missing) if index in wanted}
            receives = self._nodes[self._rank] in nodes and self.is_node_leader
            self._copy(where, manifest, index, sources[0], receives)

    def share_manifests(self) -> None:
        """Copy markers and manifests to every node: a node without a marker would treat the step as uncommitted."""
        for step in self.steps():
            self._fetch_manifest(step)

    def drop_damaged(self, where: CommittedCheckpoint) -> list[str]:
        """Delete files on this node that do not match their hashes, so that the next `fetch` replaces them."""
        dropped: list[str] = []
        if self.is_node_leader:
            try:
                manifest = commit.read_manifest(self._store, where)
                for index in self._present(where, manifest):
                    if parity.file_problem(self._store, where.name, manifest, index):
                        dropped.append(manifest.files[index].name)
            except CheckpointError:
                # The manifest itself is damaged: `fetch` copies it from another node.
                dropped.append(where.marker.manifest)
            for name in dropped:
                self._store.remove(f"{where.name}/{name}")
        return [name for names in self._gather(dropped) for name in names]

    def _present(self, where: CommittedCheckpoint, manifest: Manifest) -> set[int]:
        names = set(self._store.names(where.name))
        return {
            index
            for index, file in enumerate(manifest.files)
            if file.name in names and self._store.size(f"{where.name}/{file.name}") == file.size_bytes
        }

    def _fetch_manifest(self, where: CommittedCheckpoint) -> None:
        """Get the manifest and the marker from the first process that has them."""
        names, wanted = self._store.names(where.name), (where.marker.manifest, MARKER)
        own = {name: self._store.read(f"{where.name}/{name}") for name in wanted if name in names}
        everyone = self._gather(own)
        for name in wanted:
            content = next((files[name] for files in everyone if name in files), None)
            if content is not None and name not in own and self.is_node_leader:
                # A node that needs the file and does not find it reports that later, to all processes.
                with suppress(OSError):
                    self._store.create(f"{where.name}/{name}", content)
        self._gather(None)

    def _copy(self, where: CommittedCheckpoint, manifest: Manifest, index: int, source: int, receives: bool) -> None:
        """Broadcast one file; the nodes that need it write it. Loading checks its hashes."""
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
        # A process that does not write, or failed to, still takes part in every broadcast.
        for _ in stream:
            pass
        self._raise_any(failure)

    def _raise_any(self, failure: str | None) -> None:
        """Raise on every process if any has failed."""
        failures = [text for text in self._gather(failure) if text]
        if failures:
            raise CheckpointError(failures[0])
