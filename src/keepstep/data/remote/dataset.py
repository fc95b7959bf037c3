"""Data sets at an address: their files are listed, and fetched into the node's cache when they are first read."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError, malformed_as
from keepstep.core.files import write_atomic
from keepstep.core.requests import count_request
from keepstep.core.threads import in_threads
from keepstep.data.datasets import DataSet, MdsSet, MegatronSet
from keepstep.data.formats.build_folder import DATASET, STATE, TOKENIZER, unfinished_error
from keepstep.data.formats.mapped import map_file
from keepstep.data.formats.mds_reader import INDEX, ShardEntry, TokenShard, parse_index
from keepstep.data.formats.megatron import MegatronReader, RemoteStream, bin_path, idx_path
from keepstep.data.remote.files import RemoteFile, digest_file, filesystem, is_full, is_network, read_remote, with_retry
from keepstep.data.remote.node_cache import NodeCache
from keepstep.data.stores import MdsStore

OPEN_SHARDS = 8
"""Cached files mapped at a time: a mapped file keeps its disk space even after it was removed from the cache."""


def open_remote(address: str, config: DataConfig, cache: NodeCache) -> DataSet:
    """Open the data set at an address; tokens are fetched later."""
    address, names = with_retry(address, lambda: _find_files(address.rstrip("/")))
    if STATE in names and DATASET not in names:
        raise unfinished_error(address)
    tokenizer = _copy_tokenizer(f"{address}/{TOKENIZER}", cache.folder) if TOKENIZER in names else None
    facts = _build_facts(address) if DATASET in names else {}
    if INDEX in names:
        raw = read_remote(f"{address}/{INDEX}")
        entries = parse_index(raw, f"{address}/{INDEX}")
        open_shard = functools.partial(_open_shard, address, config.column, cache)
        return MdsSet(MdsStore(address, entries, open_shard, OPEN_SHARDS, is_remote=True), tokenizer, facts)
    # By the name with its suffix, as in a local folder: part-2.idx comes before part.idx.
    stems = [name[:-4] for name in sorted(names) if name.endswith(".idx") and f"{name[:-4]}.bin" in names]
    if not stems:
        raise DataError(f"{address} holds neither an MDS index nor .bin/.idx files", "check the address")
    hashes = {name: {"sha256": digest} for name, (_, digest) in facts.get("files", {}).items()}

    def file(path: Path) -> RemoteFile:
        return RemoteFile(f"{address}/{path.name}", names[path.name], hashes.get(path.name, {}))

    return MegatronSet(open_pairs(list(map(Path, stems)), cache, file), tokenizer, facts)


def open_pairs(prefixes: Sequence[Path], cache: NodeCache, file: Callable[[Path], RemoteFile]) -> list[MegatronReader]:
    """Open .bin/.idx pairs through the cache; `file` tells where a path of a pair is fetched from."""
    mapped = _mapped_files(cache)

    def open_pair(prefix: Path) -> MegatronReader:
        tokens = file(bin_path(prefix))
        remote = RemoteStream(tokens.size_bytes, functools.partial(mapped, tokens))
        return cache.open(file(idx_path(prefix)), lambda index: MegatronReader(prefix, index=index, remote=remote))

    return in_threads(open_pair, prefixes, 8)


def open_compressed_shard(zipped: RemoteFile | Path, entry: ShardEntry, column: str, cache: NodeCache) -> TokenShard:
    """Open a compressed shard, local or remote, through a decompressed copy in the cache."""
    where = zipped.address if isinstance(zipped, RemoteFile) else str(zipped)
    return cache.open_unpacked(
        zipped,
        entry.bytes,
        lambda source, target: _unpack(source, where, entry, target),
        lambda path: TokenShard(path, entry, column),
    )


def _unpack(source: BinaryIO, where: str, entry: ShardEntry, target: Path) -> None:
    """Decompress a shard to exactly the size that its index gives, and check it."""
    import zstandard

    match entry.compression.split(":")[0]:
        case "gz":
            reader: Any = gzip.GzipFile(fileobj=source)
        case "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(source, read_across_frames=True)
        case _:
            raise DataError(
                f"{where} is compressed with {entry.compression}", "gz and zstd are read; write the data again with one"
            )
    written = 0
    try:
        with reader as unpacked, target.open("r+b") as file:
            while block := unpacked.read(1 << 20):
                written += len(block)
                if written > entry.bytes:
                    break
                file.write(block)
    except (EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError) as error:
        if is_full(error):
            raise
        raise DataError(f"{where} cannot be unpacked: {error}", "the shard is damaged: copy it again") from error
    if written != entry.bytes:
        more = "more than " if written > entry.bytes else f"{written:,} instead of "
        raise DataError(f"{where} unpacks to {more}{entry.bytes:,} bytes", "the shard is damaged: copy it again")
    for name, expected in entry.hashes.items():
        if digest_file(target, name) not in (None, expected):
            raise DataError(f"{where} unpacks to another {name} than its index has", "copy the shard again")


def _copy_tokenizer(address: str, folder: Path) -> Path:
    """A copy that the cache never evicts: a run needs its tokenizer again long after the data was fetched."""
    raw = read_remote(address)
    path = folder / "tokenizers" / hashlib.sha256(raw).hexdigest()[:32] / TOKENIZER
    write_atomic(path, raw)
    return path


def _open_shard(address: str, column: str, cache: NodeCache, entry: ShardEntry) -> TokenShard:
    if entry.compression:
        zipped = RemoteFile(f"{address}/{entry.zip_basename}", entry.zip_bytes, entry.zip_hashes)
        return open_compressed_shard(zipped, entry, column, cache)
    file = RemoteFile(f"{address}/{entry.basename}", entry.bytes, entry.hashes)
    return cache.open(file, lambda path: TokenShard(path, entry, column))


def _find_files(address: str) -> tuple[str, dict[str, int]]:
    """The folder of an address, with names and sizes of its files; for a prefix, only the files of its pair."""
    system, _ = filesystem(address)
    system.invalidate_cache()
    try:
        if not address.endswith((".bin", ".idx")):
            return address, _list_files(address)
    except FileNotFoundError as error:
        # A bucket has no parent folder in which a pair could be.
        if is_network(error) or "/" not in address.split("://", 1)[1]:
            raise
    folder, _, stem = address.removesuffix(".bin").removesuffix(".idx").rpartition("/")
    pair = f"{stem}.bin", f"{stem}.idx"
    names = _list_files(folder, pair)
    if not all(name in names for name in pair):
        raise FileNotFoundError(f"there is neither such a folder nor {pair[0]} and {pair[1]}")
    return folder, {name: size for name, size in names.items() if name in (*pair, TOKENIZER, DATASET)}


def _list_files(address: str, pair: Sequence[str] = ()) -> dict[str, int]:
    """Names and sizes directly below an address.

    Plain HTTP has no listing, so the files of a data set and of `pair` are requested by name.
    """
    system, path = filesystem(address)
    if not address.startswith(("http://", "https://")):
        count_request("LIST")
        found = system.ls(path, detail=True)
        return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in found}
    sizes = {name: _http_size(system, f"{path}/{name}") for name in (INDEX, DATASET, TOKENIZER, *pair)}
    names = {name: size for name, size in sizes.items() if size is not None}
    if DATASET in names and INDEX not in names:
        names.update((name, size) for name, (size, _) in _build_facts(address)["files"].items())
    if not names:
        raise FileNotFoundError(f"there is neither {INDEX} nor {DATASET} below it, and web servers list nothing")
    return names


def _http_size(system: Any, url: str) -> int | None:
    """Length of a file, -1 where its server does not report it; None where there is no such file."""
    count_request("HEAD")
    try:
        size_bytes = system.info(url)["size"]
    except FileNotFoundError as error:
        # fsspec reports every failed request as a missing file. A server error is retried like a lost connection.
        if is_network(error) or getattr(error.__cause__, "status", 0) >= 500:
            raise ConnectionError(str(error.__cause__ or error)) from error
        return None
    return -1 if size_bytes is None else int(size_bytes)


def _build_facts(address: str) -> dict[str, Any]:
    """The dataset.json of a build, with its files as {name: (size, sha256)}."""
    where = f"{address}/{DATASET}"
    with malformed_as(DataError, f"{where} is damaged", "copy it again from where the data was built"):
        facts: dict[str, Any] = json.loads(read_remote(where))
        files = {str(file["name"]): (int(file["bytes"]), str(file["sha256"])) for file in facts.get("files", [])}
    return {**facts, "files": files}


def _mapped_files(cache: NodeCache) -> Callable[[RemoteFile], NDArray[np.uint8]]:
    """Maps remote files into memory and keeps the most recently used few, for the threads that read ahead."""
    return functools.lru_cache(OPEN_SHARDS)(lambda file: cache.open(file, map_file))
