"""From a path to a data set: find out what kind of data is there and open it; raw text is tokenised first."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from keepstep.config.schema import DataConfig
from keepstep.core.errors import ConfigError, DataError
from keepstep.core.proc import available_cores
from keepstep.core.verbosity import debug
from keepstep.data.cache_folder import file_lock
from keepstep.data.datasets import DataSet, MdsSet, MegatronSet
from keepstep.data.formats import mds_reader
from keepstep.data.formats.build_folder import DATASET, build_facts, is_unfinished, stored_tokenizer, unfinished_error
from keepstep.data.formats.mds_reader import ShardEntry, TokenShard
from keepstep.data.formats.megatron import MegatronReader, find_prefixes, is_prefix
from keepstep.data.prepare.sources import kind_of
from keepstep.data.remote.dataset import OPEN_SHARDS, open_compressed_shard, open_pairs, open_remote
from keepstep.data.remote.files import RemoteFile, is_remote
from keepstep.data.remote.node_cache import NodeCache
from keepstep.data.stores import MdsStore
from keepstep.data.tokenization import named_tokenizer

_NO_TEXT = re.compile(r"^\.|\.(json|md|rst|py)(\.gz|\.zst)?$", re.IGNORECASE)
_MOST_MAPPED = 1 << 14
"""Shards of a larger set that are mapped at a time: Linux allows a process about 65,000 mappings in all."""


def open_data(path: str, config: DataConfig, cache_dir: Path, field_name: str = "data.path") -> DataSet:
    """Open a folder, a prefix, an address or raw text files; errors name the field that holds the path."""
    debug(f"opening {field_name} {path}")
    if path.startswith("hf://") or any(kind_of(one) for one in path.split(",")):
        return _open_raw(path, config, cache_dir, field_name)
    if is_remote(path):
        return open_remote(path, config, _node_cache(config, cache_dir))
    local = Path(path)
    if is_unfinished(local):
        # Its finished files are a different data set than the complete build will be.
        raise unfinished_error(path)
    if (local / mds_reader.INDEX).is_file():
        return _open_mds(local, config, cache_dir)
    prefixes = [local] if is_prefix(local) else find_prefixes(local) if local.is_dir() else []
    if local.suffix in (".bin", ".idx") and is_prefix(local.with_suffix("")):
        prefixes = [local.with_suffix("")]
    if prefixes:
        # With a cache folder of its own, a mounted store is read once per node, and not at random places.
        cache = _node_cache(config, cache_dir) if config.cache_dir else None
        readers = open_pairs(prefixes, cache, _mounted) if cache else [MegatronReader(prefix) for prefix in prefixes]
        # The facts of a folder are those of all its pairs, and not of one prefix.
        return MegatronSet(readers, stored_tokenizer(local), build_facts(local))
    if raw := _raw_files(local):
        return _open_raw(",".join(raw), config, cache_dir, field_name)
    raise DataError(
        f"{field_name} is {path!r}, but no data is there",
        "give a folder or prefix that keepstep data build wrote, text as .jsonl, .parquet, .csv or .txt files (or a "
        "folder of them), demo, or synthetic",
    )


def _raw_files(folder: Path) -> list[str]:
    """The text files of a folder. A .json, .md or .py next to data is rarely text to train on, so they do not count."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [str(file) for file in files if kind_of(file.name) and not _NO_TEXT.search(file.name)]


def holds_tokens(folder: Path) -> bool:
    """Whether a local folder holds token files, of a build (finished or not) or of another tool."""
    return is_unfinished(folder) or (folder / mds_reader.INDEX).is_file() or bool(find_prefixes(folder))


def _node_cache(config: DataConfig, cache_dir: Path) -> NodeCache:
    folder = Path(config.cache_dir) if config.cache_dir else cache_dir / "remote"
    return NodeCache(folder, config.cache_limit.bytes)


def _mounted(path: Path) -> RemoteFile:
    """A file of a mounted store, to be copied into the cache; written again, it is another file."""
    status = path.stat()
    return RemoteFile(f"file://{path.absolute()}", status.st_size, version=str(status.st_mtime_ns))


def _open_raw(path: str, config: DataConfig, cache_dir: Path, field_name: str) -> DataSet:
    """Text files, tokenised into the cache at first use; every process of a run finds the same build."""
    from keepstep.data.prepare.build import build
    from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
    from keepstep.data.prepare.records import RecordOptions

    missing = [one for one in path.split(",") if kind_of(one) and not is_remote(one) and not Path(one).exists()]
    if missing and "*" not in missing[0]:
        raise DataError(f"{field_name} names {missing[0]}, which does not exist", "check the path")
    tokenizer = named_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise ConfigError(
            f"{field_name} is raw text ({path}), so data.tokenizer must name a tokenizer.json",
            "data.tokenizer=PATH; --tokenizer PATH for keepstep data inspect",
        )
    options = BuildOptions(
        inputs=tuple(path.split(",")),
        tokenizer_sha256=sha256_file(tokenizer),
        records=RecordOptions(config.text_field),
        eos=config.eos,
    )
    plan = make_plan(options)
    # The key has the modification times too: an unnecessary build costs less than training on outdated data.
    changed = [one.stat().st_mtime_ns for one in map(Path, plan.versions) if not is_remote(str(one)) and one.is_file()]
    folder = cache_dir / f"text-{hashlib.sha256(f'{plan.to_json()} {changed}'.encode()).hexdigest()[:12]}"
    # One process of a node builds with all cores while the others wait; other nodes write the same bytes.
    cache_dir.mkdir(parents=True, exist_ok=True)
    with file_lock(cache_dir / f".{folder.name}.lock"):
        if not (folder / DATASET).is_file():
            build(folder, plan, tokenizer, workers=available_cores())
    readers = [MegatronReader(prefix) for prefix in find_prefixes(folder)]
    return MegatronSet(readers, stored_tokenizer(folder), build_facts(folder))


def _open_mds(folder: Path, config: DataConfig, cache_dir: Path) -> MdsSet:
    index = folder / mds_reader.INDEX
    entries = mds_reader.parse_index(index.read_bytes(), str(index))

    def is_compressed(entry: ShardEntry) -> bool:
        return bool(entry.compression) and not (folder / entry.basename).is_file()

    # Copied and decompressed shards take disk space in the cache for as long as they are open.
    cache = _node_cache(config, cache_dir) if config.cache_dir or any(map(is_compressed, entries)) else None
    # One version for all shards: once the set is open, a cached shard needs no answer from the store.
    version = _mounted(index).version

    def open_shard(entry: ShardEntry) -> TokenShard:
        if cache and is_compressed(entry):
            return open_compressed_shard(folder / entry.zip_basename, entry, config.column, cache)
        if cache and config.cache_dir:
            file = RemoteFile(f"file://{(folder / entry.basename).absolute()}", entry.bytes, entry.hashes, version)
            return cache.open(file, lambda path: TokenShard(path, entry, config.column))
        return TokenShard(folder / entry.basename, entry, config.column)

    limit = OPEN_SHARDS if cache else _MOST_MAPPED if len(entries) > _MOST_MAPPED else 0
    store = MdsStore(str(folder), entries, open_shard, open_limit=limit, is_remote=bool(config.cache_dir))
    return MdsSet(store, stored_tokenizer(folder), build_facts(folder))
