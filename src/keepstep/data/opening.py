"""From a path to rows: what kind of data lies there, near or far, and how it is cut into rows."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.core.files import write_atomic
from keepstep.core.threads import in_threads
from keepstep.data.build.plan import DATASET, STATE, TOKENIZER, is_unfinished, unfinished_error
from keepstep.data.corpus import locked
from keepstep.data.formats import mds
from keepstep.data.formats.mapped import map_file
from keepstep.data.formats.mds import TokenShard
from keepstep.data.formats.megatron import MegatronReader, RemoteStream, find_prefixes, is_prefix
from keepstep.data.gpt_order import GptRows
from keepstep.data.node_cache import NodeCache
from keepstep.data.packing import BestFitRows, DocumentStore, OverflowRows, StreamRows, TruncRows
from keepstep.data.remote import RemoteFile, Retry, filesystem, is_network, is_remote, read_remote, with_retry
from keepstep.data.rows import PackedRows, RowSource
from keepstep.data.sources import kind_of
from keepstep.data.stores import MdsDocuments, MdsRecordRows, MdsStore, MegatronDocuments
from keepstep.data.unpack import unpack

_CACHED_OPEN_SHARDS = 8
"""Shards mapped at once: a mapped file keeps its disk space even after it left the cache."""
_MOST_MAPPED = 1 << 14
"""Shards of a larger set mapped at once: a process of Linux has some 65,000 mappings, for everything."""


@dataclass(frozen=True)
class Cut:
    """How documents become rows."""

    config: DataConfig
    seq_len: int
    vocab: int
    seed: int


class DataSet(Protocol):
    """Opened data: documents in files, and rows over ranges of them."""

    @property
    def kind(self) -> str:
        """Name of the format."""

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json stored with the data."""

    @property
    def counts(self) -> list[int]:
        """Documents of each file."""

    @property
    def facts(self) -> dict[str, Any]:
        """What is known without reading everything."""

    def rows(self, ranges: Sequence[range], cut: Cut) -> RowSource:
        """Rows over these documents."""


def open_data(path: str, config: DataConfig, cache_dir: Path, field_name: str = "data.path") -> DataSet:
    """Open a folder, a prefix, an address or raw text files; errors name the field that the path is from."""
    if path.startswith("hf://") or any(kind_of(one) for one in path.split(",")):
        return _open_raw(path, config, cache_dir, field_name)
    if is_remote(path):
        return _open_remote(path, config, _node_cache(config, cache_dir))
    local = Path(path)
    if is_unfinished(local):
        # A part of the data would do for training, and be another data set once the build goes on.
        raise unfinished_error(path)
    if (local / mds.INDEX).is_file():
        return _open_mds(local, config, cache_dir)
    prefixes = [local] if is_prefix(local) else find_prefixes(local) if local.is_dir() else []
    if local.suffix in (".bin", ".idx") and is_prefix(local.with_suffix("")):
        prefixes = [local.with_suffix("")]
    if prefixes:
        return MegatronSet([MegatronReader(prefix) for prefix in prefixes], _beside(local))
    raise DataError(
        f"{field_name} is {path!r}, but no data is there",
        "give a folder or prefix that keepstep data build wrote, or demo, or synthetic",
    )


def holds_tokens(folder: Path) -> bool:
    """Whether a folder here is one that was built, to its end or not, or holds what others built."""
    return is_unfinished(folder) or (folder / mds.INDEX).is_file() or bool(find_prefixes(folder))


def _node_cache(config: DataConfig, cache_dir: Path) -> NodeCache:
    folder = Path(config.cache_dir) if config.cache_dir else cache_dir / "remote"
    return NodeCache(folder, config.cache_limit.bytes)


def _beside(path: Path) -> Path | None:
    """The tokenizer.json stored in the data's folder, where there is one."""
    for folder in (path, path.parent):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None


def _open_raw(path: str, config: DataConfig, cache_dir: Path, field_name: str) -> DataSet:
    """Text files: tokenised at first use, into the cache, and the same for everyone who asks."""
    import os

    from keepstep.data.build.plan import BuildOptions, make_plan, sha256_file
    from keepstep.data.build.run import build
    from keepstep.data.records import RecordOptions

    missing = [one for one in path.split(",") if kind_of(one) and not is_remote(one) and not Path(one).exists()]
    if missing and "*" not in missing[0]:
        raise DataError(f"{field_name} names {missing[0]}, which is not there", "check the path")
    if not config.tokenizer:
        raise ConfigError(
            f"{field_name} is raw text ({path}), so data.tokenizer must name a tokenizer.json",
            "data.tokenizer=PATH; --tokenizer PATH for keepstep data inspect",
        )
    if not Path(config.tokenizer).is_file():
        raise DataError(f"data.tokenizer is {config.tokenizer!r}, which is missing", "give a tokenizer.json")
    options = BuildOptions(
        inputs=tuple(path.split(",")),
        tokenizer_sha256=sha256_file(Path(config.tokenizer)),
        records=RecordOptions(config.text_field),
        eos=config.eos,
    )
    plan = make_plan(options)
    # Beside what the plan says, when a file was changed: here a build too many costs less than old data.
    changed = [one.stat().st_mtime_ns for one in map(Path, plan.versions) if not is_remote(str(one)) and one.is_file()]
    folder = cache_dir / f"text-{hashlib.sha256(f'{plan.to_json()} {changed}'.encode()).hexdigest()[:12]}"
    # One process of a node builds with all its cores while the others wait; on another node one writes the same bytes.
    cache_dir.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir / f".{folder.name}.lock"):
        if not (folder / DATASET).is_file():
            build(folder, plan, Path(config.tokenizer), workers=len(os.sched_getaffinity(0)))
    return MegatronSet([MegatronReader(prefix) for prefix in find_prefixes(folder)], folder / "tokenizer.json")


@dataclass(frozen=True)
class MegatronSet:
    """One or more .bin/.idx pairs."""

    readers: Sequence[MegatronReader]
    tokenizer: Path | None
    kind: str = "megatron"

    @property
    def counts(self) -> list[int]:
        """Documents of each pair."""
        return [reader.documents for reader in self.readers]

    @property
    def facts(self) -> dict[str, Any]:
        """Documents and tokens."""
        return {"documents": sum(self.counts), "tokens": sum(reader.token_count for reader in self.readers)}

    def rows(self, ranges: Sequence[range], cut: Cut) -> RowSource:
        """Rows over these documents."""
        if cut.config.order == "gpt":
            if len(self.readers) != 1:
                raise ConfigError(
                    f"data.order is gpt, but the data is {len(self.readers)} files", "keepstep data merge joins them"
                )
            return GptRows(
                self.readers[0],
                ranges[0],
                cut.seq_len,
                cut.config.gpt_samples,
                cut.seed,
                cut.vocab,
                bounds=cut.config.separate_documents,
            )
        if cut.config.strategy == "pack":
            return PackedRows(self.readers, ranges, cut.seq_len, cut.vocab, bounds=cut.config.separate_documents)
        return segment_rows(MegatronDocuments(self.readers, ranges), cut)


def segment_rows(store: DocumentStore, cut: Cut) -> RowSource:
    """Rows by the strategies that look at single documents."""
    match cut.config.strategy:
        case "trunc":
            return TruncRows(store, cut.seq_len, cut.vocab)
        case "overflow":
            return OverflowRows(store, cut.seq_len, cut.vocab, cut.config.stride or cut.seq_len)
        case "best_fit":
            return BestFitRows(store, cut.seq_len, cut.vocab)
        case "pack":
            return StreamRows(store, cut.seq_len, cut.vocab, bounds=cut.config.separate_documents)


@dataclass(frozen=True)
class MdsSet:
    """MDS shards under one index."""

    store: MdsStore
    tokenizer: Path | None
    kind: str = "mds"

    @property
    def counts(self) -> list[int]:
        """All samples, as if in one file: an index numbers them through."""
        return [self.store.samples]

    @property
    def facts(self) -> dict[str, Any]:
        """Samples and shards."""
        return {"documents": self.store.samples, "shards": len(self.store.entries)}

    def rows(self, ranges: Sequence[range], cut: Cut) -> RowSource:
        """Rows over these samples; samples that are rows already stay what they are."""
        if cut.config.order == "gpt":
            raise ConfigError("data.order gpt needs .bin/.idx data, this is MDS")
        if cut.config.strategy == "pack" and self.store.width() in (cut.seq_len, cut.seq_len + 1):
            if cut.config.separate_documents:
                raise ConfigError(
                    "data.separate_documents needs to know where documents end, which joined MDS samples do not tell",
                    "build .bin/.idx, or MDS without --concat",
                )
            return MdsRecordRows(self.store, ranges[0], cut.seq_len, cut.vocab)
        return segment_rows(MdsDocuments(self.store, ranges[0]), cut)


def _open_mds(folder: Path, config: DataConfig, cache_dir: Path) -> MdsSet:
    entries = mds.parse_index((folder / mds.INDEX).read_bytes(), str(folder / mds.INDEX))

    def is_packed(entry: mds.ShardEntry) -> bool:
        return bool(entry.compression) and not (folder / entry.basename).is_file()

    # What is unpacked lies in the cache, which gets no smaller while all of it is open.
    cache = _node_cache(config, cache_dir) if any(map(is_packed, entries)) else None

    def open_shard(entry: mds.ShardEntry) -> TokenShard:
        if cache and is_packed(entry):
            return _open_packed(folder / entry.zip_basename, entry, config.column, cache)
        return TokenShard(folder / entry.basename, entry, config.column)

    most = _CACHED_OPEN_SHARDS if cache else _MOST_MAPPED if len(entries) > _MOST_MAPPED else 0
    store = MdsStore(str(folder), entries, open_shard, open_limit=most)
    return MdsSet(store, _beside(folder))


def _open_packed(zipped: RemoteFile | Path, entry: mds.ShardEntry, column: str, cache: NodeCache) -> TokenShard:
    where = zipped.address if isinstance(zipped, RemoteFile) else str(zipped)
    return cache.open_unpacked(
        zipped,
        entry.bytes,
        lambda source, target: unpack(source, where, entry, target),
        lambda path: TokenShard(path, entry, column),
    )


def _open_remote(address: str, config: DataConfig, cache: NodeCache) -> DataSet:
    address, names = with_retry(address, lambda: _find_remote(address.rstrip("/")), Retry())
    if STATE in names and DATASET not in names:
        raise unfinished_error(address)
    tokenizer = _keep_tokenizer(f"{address}/{TOKENIZER}", cache.folder) if TOKENIZER in names else None
    if mds.INDEX in names:
        raw = read_remote(f"{address}/{mds.INDEX}")
        entries = mds.parse_index(raw, f"{address}/{mds.INDEX}")
        open_shard = functools.partial(_open_far_shard, address, config.column, cache)
        return MdsSet(MdsStore(address, entries, open_shard, _CACHED_OPEN_SHARDS, is_far=True), tokenizer)
    stems = sorted(name[:-4] for name in names if name.endswith(".idx") and f"{name[:-4]}.bin" in names)
    if not stems:
        raise DataError(f"{address} holds neither an MDS index nor .bin/.idx files", "check the address")
    hashes = (
        {name: {"sha256": digest} for name, (_, digest) in _built_files(address).items()} if DATASET in names else {}
    )
    maps = _Maps(cache)

    def file(name: str) -> RemoteFile:
        return RemoteFile(f"{address}/{name}", names[name], hashes.get(name, {}))

    def open_one(stem: str) -> MegatronReader:
        stream = file(f"{stem}.bin")
        remote = RemoteStream(stream.size_bytes, functools.partial(maps.get, stream))
        return cache.open(file(f"{stem}.idx"), lambda index: MegatronReader(Path(stem), index=index, remote=remote))

    return MegatronSet(in_threads(open_one, stems, 8), tokenizer)


def _keep_tokenizer(address: str, folder: Path) -> Path:
    """A copy that stays: a run comes back to its tokenizer long after files have pushed each other out of the cache."""
    raw = read_remote(address)
    path = folder / "tokenizers" / hashlib.sha256(raw).hexdigest()[:32] / "tokenizer.json"
    write_atomic(path, raw)
    return path


def _open_far_shard(address: str, column: str, cache: NodeCache, entry: mds.ShardEntry) -> TokenShard:
    if entry.compression:
        zipped = RemoteFile(f"{address}/{entry.zip_basename}", entry.zip_bytes, entry.zip_hashes)
        return _open_packed(zipped, entry, column, cache)
    file = RemoteFile(f"{address}/{entry.basename}", entry.bytes, entry.hashes)
    return cache.open(file, lambda path: TokenShard(path, entry, column))


def _find_remote(address: str) -> tuple[str, dict[str, int]]:
    """The folder behind an address and what is in it, names and sizes; of a prefix, the pair and what belongs to it."""
    system, _ = filesystem(address)
    system.invalidate_cache()
    try:
        if not address.endswith((".bin", ".idx")):
            return address, _list_remote(address)
    except FileNotFoundError as error:
        # A bucket that is not there lies in no folder, either.
        if is_network(error) or "/" not in address.split("://", 1)[1]:
            raise
    folder, _, stem = address.removesuffix(".bin").removesuffix(".idx").rpartition("/")
    pair = f"{stem}.bin", f"{stem}.idx"
    names = _list_remote(folder, pair)
    if not all(name in names for name in pair):
        raise FileNotFoundError(f"there is neither such a folder nor {pair[0]} and {pair[1]}")
    return folder, {name: size for name, size in names.items() if name in (*pair, TOKENIZER, DATASET)}


def _list_remote(address: str, pair: Sequence[str] = ()) -> dict[str, int]:
    """Names and sizes directly below an address. Plain HTTP has no listing: a data set's own files and `pair` are
    asked for by name."""
    system, path = filesystem(address)
    if not address.startswith(("http://", "https://")):
        found = system.ls(path, detail=True)
        return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in found}
    sizes = {name: _web_size(system, f"{path}/{name}") for name in (mds.INDEX, DATASET, TOKENIZER, *pair)}
    names = {name: size for name, size in sizes.items() if size is not None}
    if DATASET in names and mds.INDEX not in names:
        names.update((name, size) for name, (size, _) in _built_files(address).items())
    if not names:
        raise FileNotFoundError(f"there is neither {mds.INDEX} nor {DATASET} below it, and web servers list nothing")
    return names


def _web_size(system: Any, url: str) -> int | None:
    """Length of a file, -1 where its server does not tell; None where there is no such file."""
    try:
        size_bytes = system.info(url)["size"]
    except FileNotFoundError as error:
        # fsspec calls every answer but a good one a missing file; a server in trouble is waited for.
        if is_network(error) or getattr(error.__cause__, "status", 0) >= 500:
            raise ConnectionError(str(error.__cause__ or error)) from error
        return None
    return -1 if size_bytes is None else int(size_bytes)


def _built_files(address: str) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file of a build, by name, as its dataset.json says."""
    where = f"{address}/{DATASET}"
    try:
        facts = json.loads(read_remote(where))
        return {str(file["name"]): (int(file["bytes"]), str(file["sha256"])) for file in facts.get("files", [])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is damaged: {error}", "copy it again from where the data was built") from error


@dataclass
class _Maps:
    """Remote files mapped into memory, the latest few."""

    cache: NodeCache
    _open: OrderedDict[str, NDArray[np.uint8]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Training reads ahead in a thread of its own while evaluation reads here."""

    def get(self, file: RemoteFile) -> NDArray[np.uint8]:
        """The bytes of a file, fetched when it is not here."""
        with self._lock:
            found = self._open.get(file.address)
            if found is not None:
                self._open.move_to_end(file.address)
                return found
        found = self.cache.open(file, map_file)
        with self._lock:
            self._open[file.address] = found
            while len(self._open) > _CACHED_OPEN_SHARDS:
                self._open.popitem(last=False)
        return found
