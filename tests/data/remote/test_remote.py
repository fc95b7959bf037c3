"""Remote data: the same stream as from disk, a bounded cache, one clear error for each fault, and the run goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zstandard

from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError, HardwareError
from keepstep.core.units import ByteSize
from keepstep.data.formats.megatron import find_prefixes
from keepstep.data.loader import Loader, build_loaders
from keepstep.data.prepare.build import build
from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
from keepstep.data.prepare.records import RecordOptions, texts_of
from keepstep.data.prepare.sources import find_files
from keepstep.data.remote import files
from keepstep.data.remote.dataset import _mapped_files
from keepstep.data.remote.files import RemoteFile, Retry
from keepstep.data.remote.node_cache import NodeCache
from keepstep.data.step_feed import StepFeed
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import run_processes

SEQ_LEN = 64
QUICK = Retry(timeout_s=20, first_wait_s=0.02, longest_wait_s=0.2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Path) -> Path:
    """The same corpus as joined MDS and as .bin/.idx, in several files each."""
    folder = tmp_path_factory.mktemp("data")
    for name, changes in (("mds", {"format": "mds", "concat": SEQ_LEN}), ("bin", {})):
        options = BuildOptions(
            inputs=(str(corpus),),
            tokenizer_sha256=sha256_file(tokenizer),
            eos="<|endoftext|>",
            task_bytes=60_000,
            **changes,  # type: ignore[arg-type]
        )
        build(folder / name, make_plan(options), tokenizer, workers=1)
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    counts: dict[str, int] = {}  # noqa: RUF012 - shared by all requests of one server, on purpose
    refusals: list[int] = []  # noqa: RUF012 - and so are the answers to give before the good ones

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        if not self._refused():
            self.counts[self.path] = self.counts.get(self.path, 0) + 1
            super().do_GET()

    def do_HEAD(self) -> None:
        if not self._refused():
            super().do_HEAD()

    def _refused(self) -> bool:
        if self.refusals:
            self.send_error(self.refusals.pop())
            return True
        return False


class Web:
    """A plain web server that can be stopped and started on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        _Quiet.counts, _Quiet.refusals = {}, []
        self.start()

    def start(self) -> None:
        handler = functools.partial(_Quiet, directory=str(self.folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def address(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@pytest.fixture
def web(data: Path) -> Iterator[Web]:
    server = Web(data)
    yield server
    server.stop()


def loader(path: str, cache: Path, limit: int = 1 << 30) -> Loader:
    config = DataConfig(path=path, valid_share=0.0, cache_limit=ByteSize(limit), shuffle_window=200)
    return build_loaders(config, SEQ_LEN, 1000, 5, cache).train


def whole_epoch(one: Loader) -> np.ndarray:
    return np.concatenate([one.rows(first, 50).inputs for first in range(0, one.samples_per_epoch, 50)])


def held_bytes(cache: Path) -> int:
    """What lies in a cache beside the tokenizer.

    Counted under the lock for changes: otherwise a file that goes and one that comes for it meanwhile would both count.
    """
    total = 0
    with contextlib.ExitStack() as stack:
        for room in cache.rglob("locks/room"):
            fcntl.flock(stack.enter_context(room.open()), fcntl.LOCK_EX)
        # Without the tokenizer: it may have another name while a process writes it.
        for folder in cache.rglob("files"):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
    return total


def test_http_gives_the_stream_of_the_disk(data: Path, web: Web, tmp_path: Path) -> None:
    near, far = loader(str(data / "mds"), tmp_path), loader(web.address("mds"), tmp_path)
    assert np.array_equal(whole_epoch(near), whole_epoch(far))
    shards = {path: count for path, count in _Quiet.counts.items() if path.endswith(".mds")}
    assert len(shards) > 4
    assert set(shards.values()) == {1}


def test_http_gives_the_documents_of_a_build_though_it_lists_nothing(data: Path, web: Web, tmp_path: Path) -> None:
    near, far = loader(str(data / "bin"), tmp_path), loader(web.address("bin/"), tmp_path)
    assert np.array_equal(whole_epoch(near), whole_epoch(far))
    config = DataConfig(path=web.address("bin"))
    assert build_loaders(config, SEQ_LEN, 1000, 5, tmp_path).tokenizer is not None


def test_pairs_have_the_order_of_a_local_folder(data: Path, tmp_path: Path) -> None:
    """A comparison of names without their suffix would put part before part-2."""
    for prefix, name in zip(find_prefixes(data / "bin"), ("part", "part-2"), strict=False):
        for suffix in (".bin", ".idx"):
            (tmp_path / "pairs").mkdir(exist_ok=True)
            shutil.copy(f"{prefix}{suffix}", tmp_path / "pairs" / f"{name}{suffix}")
    near, far = (loader(f"{scheme}{tmp_path}/pairs", tmp_path) for scheme in ("", "file://"))
    assert np.array_equal(whole_epoch(near), whole_epoch(far))


def test_an_address_may_be_a_prefix_as_a_path_may(data: Path, web: Web, tmp_path: Path) -> None:
    prefix = find_prefixes(data / "bin")[1]
    near = whole_epoch(loader(str(prefix), tmp_path))
    # A pair alone, as Megatron's own tools leave it, has nothing beside it that names it.
    (data / "alone").mkdir(exist_ok=True)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", data / "alone")
    for address in (
        f"file://{prefix}",
        f"file://{prefix}.idx",
        web.address(f"bin/{prefix.name}"),
        web.address(f"alone/{prefix.name}"),
        web.address(f"alone/{prefix.name}.bin"),
    ):
        assert np.array_equal(whole_epoch(loader(address, tmp_path)), near)
    for address in (f"file://{prefix}-not", web.address("bin/not"), web.address("alone"), "file:///not/there"):
        with pytest.raises(DataError, match="is missing") as caught:
            loader(address, tmp_path)
        assert "address" in caught.value.hint


def test_raw_text_at_an_address_is_tokenised_at_first_use(
    corpus: Path, tokenizer: Path, web: Web, data: Path, tmp_path: Path
) -> None:
    shutil.copy(corpus, data / "raw.jsonl")

    def opened(path: str) -> Loader:
        config = DataConfig(path=path, tokenizer=str(tokenizer), valid_share=0.0)
        return build_loaders(config, SEQ_LEN, 1000, 5, tmp_path).train

    near = whole_epoch(opened(str(data / "raw.jsonl")))
    for address in (web.address("raw.jsonl"), f"file://{data}/raw.jsonl", f"file://{data}/ra*.jsonl"):
        assert np.array_equal(whole_epoch(opened(address)), near)


@pytest.mark.parametrize("name", ["mds", "bin"])
@pytest.mark.slow
def test_a_server_in_trouble_is_waited_for_when_data_is_opened(name: str, data: Path, web: Web, tmp_path: Path) -> None:
    _Quiet.refusals = [503] * 4
    near, far = loader(str(data / name), tmp_path), loader(web.address(name), tmp_path)
    assert np.array_equal(near.rows(0, 20).inputs, far.rows(0, 20).inputs)
    assert not _Quiet.refusals


def test_a_damaged_dataset_json_at_an_address_is_named(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "bin", tmp_path / "bin")
    (tmp_path / "bin" / "dataset.json").write_text('{"files": [{"name": "part"')
    with pytest.raises(DataError, match=r"dataset\.json is damaged"):
        loader(f"file://{tmp_path}/bin", tmp_path)


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back_costs_no_sample(data: Path, web: Web, tmp_path: Path) -> None:
    expected = loader(str(data / "mds"), tmp_path)
    feed = StepFeed(loader(web.address("mds"), tmp_path / "far"), 0, 8, 4, 0, 1, prefetch=2)
    seen = []
    for step in range(60):
        if step == 5:
            web.stop()
            threading.Timer(1.0, web.start).start()
        seen += [batch.inputs for batch in feed.next_step()]
    feed.close()
    assert np.array_equal(np.concatenate(seen), expected.rows(0, 480).inputs)


def test_the_cache_keeps_its_limit(data: Path, web: Web, tmp_path: Path) -> None:
    sizes = [path.stat().st_size for path in (data / "mds").glob("*.mds")]
    cache = NodeCache(tmp_path, 2 * max(sizes) + 100, QUICK)
    for _ in range(2):
        for path in sorted((data / "mds").glob("*.mds")):
            file = RemoteFile(web.address(f"mds/{path.name}"), path.stat().st_size)
            assert cache.open(file, Path.read_bytes) == path.read_bytes()
            assert held_bytes(tmp_path) <= 2 * max(sizes) + 100


@pytest.fixture
def mounted(data: Path, tmp_path: Path) -> Path:
    """A store of our own, with an MDS index without checksums, as other tools write it."""
    shutil.copytree(data, tmp_path / "mounted")
    path = tmp_path / "mounted" / "mds" / "index.json"
    index = json.loads(path.read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {}
    path.write_text(json.dumps(index))
    return tmp_path / "mounted"


def mounted_loader(path: Path, cache: Path, limit: int = 1 << 30) -> Loader:
    config = DataConfig(
        path=str(path), valid_share=0.0, cache_dir=str(cache), cache_limit=ByteSize(limit), shuffle_window=200
    )
    return build_loaders(config, SEQ_LEN, 1000, 5, cache / "unused").train


def overwrite(folder: Path, *, same_time: bool) -> None:
    """Zeros in all tokens of a store; with the old times, nobody can know it without reading the files."""
    for path in folder.iterdir():
        status = path.stat()
        if path.suffix in (".mds", ".bin"):
            path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(0, status.st_mtime_ns + (0 if same_time else 1)))


@pytest.mark.parametrize("name", ["mds", "bin"])
def test_a_mounted_store_is_read_through_the_cache_folder(name: str, mounted: Path, tmp_path: Path) -> None:
    path, cache = mounted / name, tmp_path / "cache"
    expected = whole_epoch(
        build_loaders(
            DataConfig(str(path), valid_share=0.0, shuffle_window=200), SEQ_LEN, 1000, 5, tmp_path / "none"
        ).train
    )
    assert not (tmp_path / "none").exists()
    first = mounted_loader(path, cache)
    assert np.array_equal(whole_epoch(first), expected)
    overwrite(path, same_time=True)
    assert np.array_equal(whole_epoch(first), expected)
    assert np.array_equal(whole_epoch(mounted_loader(path, cache)), expected)
    overwrite(path, same_time=False)
    with contextlib.suppress(DataError):  # shards of zeros are no shards
        assert not np.array_equal(whole_epoch(mounted_loader(path, cache)), expected)


@pytest.mark.parametrize("name", ["mds", "bin"])
def test_the_cache_of_a_mounted_store_keeps_its_limit(name: str, data: Path, tmp_path: Path) -> None:
    limit = 2 * max(path.stat().st_size for path in (data / name).glob("*.[mb]*")) + 100
    assert limit < sum(path.stat().st_size for path in (data / name).glob("*.[mb]*"))
    near, far = loader(str(data / name), tmp_path), mounted_loader(data / name, tmp_path / "cache", limit)
    rows = near.samples_per_epoch
    assert far.samples_per_epoch == rows
    for first in range(0, rows, 50):
        far.rows(first, 50)
        assert held_bytes(tmp_path / "cache") <= limit
    with pytest.raises(DataError, match="the cache limit is") as caught:
        mounted_loader(data / name, tmp_path / "small", 1000).rows(0, 50)
    assert "without data.cache_dir" in str(caught.value.hint)


def test_a_prefix_on_a_mounted_store_is_copied_too(data: Path, tmp_path: Path) -> None:
    prefix = find_prefixes(data / "bin")[1]
    for path in (prefix, prefix.with_suffix(".bin")):
        expected = build_loaders(
            DataConfig(str(path), valid_share=0.0, shuffle_window=200), SEQ_LEN, 1000, 5, tmp_path
        ).train
        assert np.array_equal(whole_epoch(mounted_loader(path, tmp_path / "cache")), whole_epoch(expected))
    assert len(list((tmp_path / "cache" / "files").iterdir())) == 2


def test_a_file_used_lately_stays(web: Web, data: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in (data / "mds").glob("*.mds"))[:4]
    limit = sum((data / "mds" / name).stat().st_size for name in names[:3]) + 100
    cache = NodeCache(tmp_path, limit, QUICK)
    for name in (names[0], names[1], names[2], names[0], names[3], names[0]):
        cache.open(RemoteFile(web.address(f"mds/{name}"), (data / "mds" / name).stat().st_size), Path.read_bytes)
        time.sleep(0.01)
    assert _Quiet.counts[f"/mds/{names[0]}"] == 1


def test_a_shard_that_arrives_damaged_is_named_and_the_run_goes_on_after_it_is_mended(
    data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data / "mds", tmp_path / "www" / "mds")
    victim = sorted((tmp_path / "www" / "mds").glob("*.mds"))[1]
    good = victim.read_bytes()
    bad = bytearray(good)
    bad[-5] ^= 1
    victim.write_bytes(bad)
    server = Web(tmp_path / "www")
    one = loader(server.address("mds"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"came with another sha256 than its index has, 3 times in a row"):
        whole_epoch(one)
    victim.unlink()
    with pytest.raises(DataError, match="is missing"):
        whole_epoch(one)
    victim.write_bytes(good)
    assert np.array_equal(whole_epoch(one), whole_epoch(loader(str(data / "mds"), tmp_path)))
    server.stop()


def test_a_full_disk_is_one_clear_error_and_no_half_file(
    web: Web, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(address: str, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = NodeCache(tmp_path, 1 << 30, QUICK)
    name = next((data / "mds").glob("*.mds")).name
    with monkeypatch.context() as patched:
        patched.setattr(files, "copy", full)
        with pytest.raises(DataError, match="No space left") as caught:
            cache.open(RemoteFile(web.address(f"mds/{name}")), Path.read_bytes)
    assert "free space" in (caught.value.hint or "")
    assert list((tmp_path / "files").iterdir()) == []
    found = cache.open(RemoteFile(web.address(f"mds/{name}")), Path.read_bytes)
    assert found == (data / "mds" / name).read_bytes()


def test_a_store_that_stays_away_is_an_error_of_the_network(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cache = NodeCache(tmp_path, 1 << 30, Retry(timeout_s=0.3, first_wait_s=0.05))
    with pytest.raises(HardwareError, match="could not be read") as caught:
        cache.open(RemoteFile(f"http://127.0.0.1:{port}/x"), Path.read_bytes)
    assert caught.value.exit_code == 5


_FETCH = """
import sys
from pathlib import Path
from keepstep.data.remote.node_cache import NodeCache
from keepstep.data.remote.files import RemoteFile
cache = NodeCache(Path(sys.argv[1]), 1 << 30)
for address in sys.argv[2:]:
    cache.open(RemoteFile(address), Path.read_bytes)
"""


@pytest.mark.slow
def test_processes_of_a_node_fetch_each_file_once_even_when_one_is_killed(web: Web, data: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in (data / "mds").glob("*.mds"))
    command = [sys.executable, "-c", _FETCH, str(tmp_path), *(web.address(f"mds/{name}") for name in names)]
    victim = subprocess.Popen(command)
    while not list(tmp_path.glob("files/*")):
        assert victim.poll() is None
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    _Quiet.counts.clear()
    already = len([path for path in (tmp_path / "files").iterdir() if not path.suffix])
    others = [subprocess.Popen(command) for _ in range(3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert sum(_Quiet.counts.values()) == len(names) - already
    assert len([path for path in (tmp_path / "files").iterdir() if not path.suffix]) == len(names)


_READ = """
import sys
from pathlib import Path
from keepstep.config.schema import DataConfig
from keepstep.core.units import ByteSize
from keepstep.data.loader import build_loaders
address, cache, limit, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
config = DataConfig(path=address, valid_share=0.0, cache_limit=ByteSize(limit), shuffle_window=400)
one = build_loaders(config, 64, 1000, seed, cache).train
rows = [one.rows(first, 50).inputs for _ in range(2) for first in range(0, one.samples_per_epoch, 50)]
print(sum(int(part.sum()) for part in rows))
"""


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_what_they_read(web: Web, data: Path, tmp_path: Path) -> None:
    limit = 2 * max(path.stat().st_size for path in (data / "mds").glob("*.mds")) + 100
    words = [sys.executable, "-c", _READ, web.address("mds"), str(tmp_path / "far"), str(limit)]
    readers = [subprocess.Popen([*words, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(4)]
    most = 0
    while any(reader.poll() is None for reader in readers):
        most = max(most, held_bytes(tmp_path / "far" / "remote"))
        time.sleep(0.002)
    assert [reader.returncode for reader in readers] == [0] * 4
    for seed, reader in enumerate(readers):
        config = DataConfig(path=str(data / "mds"), valid_share=0.0, shuffle_window=400)
        one = build_loaders(config, SEQ_LEN, 1000, seed, tmp_path).train
        assert int(reader.communicate()[0]) == 2 * int(whole_epoch(one).sum())
    assert 0 < most <= limit


def test_no_file_is_renamed_while_another_process_adds_up_the_sizes(
    web: Web, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed between the listing and the stat, it would count under neither name, and the limit would not hold."""
    cache = NodeCache(tmp_path, 1 << 30, QUICK)
    seen_after_wait: list[list[str]] = []
    counting: list[threading.Thread] = []
    copy = files.copy

    def copy_then_count(address: str, path: Path) -> None:
        copy(address, path)
        room = os.open(tmp_path / "locks" / "room", os.O_RDWR)
        fcntl.flock(room, fcntl.LOCK_EX)

        def count() -> None:
            time.sleep(0.3)
            seen_after_wait.append([one.suffix for one in (tmp_path / "files").iterdir()])
            os.close(room)

        counting.append(threading.Thread(target=count))
        counting[0].start()

    monkeypatch.setattr(files, "copy", copy_then_count)
    shard = min((data / "mds").glob("*.mds"))
    size_bytes = shard.stat().st_size
    file = RemoteFile(web.address(f"mds/{shard.name}"), size_bytes)
    assert cache.open(file, lambda path: path.stat().st_size) == size_bytes
    counting[0].join()
    assert seen_after_wait == [[".part"]]


@pytest.fixture(scope="module")
def zipped(data: Path) -> Path:
    """The MDS data again, compressed as mosaicml-streaming writes it."""
    folder = data / "zipped"
    folder.mkdir()
    index = json.loads((data / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        raw = (data / "mds" / shard["raw_data"]["basename"]).read_bytes()
        packed = zstandard.compress(raw)
        name = shard["raw_data"]["basename"] + ".zstd"
        (folder / name).write_bytes(packed)
        hashes = {"sha256": hashlib.sha256(packed).hexdigest()}
        shard.update(compression="zstd", zip_data={"basename": name, "bytes": len(packed), "hashes": hashes})
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("far", [True, False])
def test_what_is_unpacked_counts_against_the_limit(
    far: bool, web: Web, data: Path, zipped: Path, tmp_path: Path
) -> None:
    limit = 3 * max(path.stat().st_size for path in (data / "mds").glob("*.mds"))
    one = loader(web.address("zipped") if far else str(zipped), tmp_path / "cache", limit)
    expected = loader(str(data / "mds"), tmp_path)
    for first in range(0, expected.samples_per_epoch, 50):
        assert np.array_equal(one.rows(first, 50).inputs, expected.rows(first, 50).inputs)
        assert 0 < held_bytes(tmp_path / "cache" / "remote") <= limit


def test_a_damaged_packed_shard_is_named_and_read_once_it_is_mended(zipped: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(zipped, tmp_path / "zipped")
    victim = sorted((tmp_path / "zipped").glob("*.zstd"))[2]
    good = victim.read_bytes()
    one = loader(str(tmp_path / "zipped"), tmp_path / "cache")
    for bad in (good[:-9], good[:40] + bytes(20) + good[60:], b"not compressed at all"):
        victim.write_bytes(bad)
        with pytest.raises(DataError, match=f"{victim.name} (cannot be unpacked|unpacks to)"):
            whole_epoch(one)
        assert not list((tmp_path / "cache").rglob("*.part"))
    victim.write_bytes(good)
    assert np.array_equal(whole_epoch(one), whole_epoch(loader(str(data / "mds"), tmp_path)))


def test_a_damaged_shard_without_checksums_is_fetched_again_once_it_is_mended(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "mds", tmp_path / "www" / "mds")
    index = json.loads((data / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        shard["raw_data"]["hashes"] = {}
    (tmp_path / "www" / "mds" / "index.json").unlink()
    (tmp_path / "www" / "mds" / "index.json").write_text(json.dumps(index))
    victim = sorted((tmp_path / "www" / "mds").glob("*.mds"))[1]
    good = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(bytes(4) + good[4:])
    server = Web(tmp_path / "www")
    one = loader(server.address("mds"), tmp_path / "cache")
    with pytest.raises(DataError, match="does not hold the"):
        whole_epoch(one)
    victim.write_bytes(good)
    assert np.array_equal(whole_epoch(one), whole_epoch(loader(str(data / "mds"), tmp_path)))
    server.stop()


def test_data_built_anew_at_the_same_address_is_not_mixed_with_the_old(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "mds", tmp_path / "www" / "mds")
    server = Web(tmp_path / "www")
    old = whole_epoch(loader(server.address("mds"), tmp_path / "cache"))
    for name in ("index.json", *(path.name for path in (data / "mds").glob("*.mds"))):
        (tmp_path / "www" / "mds" / name).unlink()
    index = json.loads((data / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        raw = bytearray((data / "mds" / shard["raw_data"]["basename"]).read_bytes())
        raw[-SEQ_LEN:] = bytes(SEQ_LEN)
        (tmp_path / "www" / "mds" / shard["raw_data"]["basename"]).write_bytes(raw)
        shard["raw_data"]["hashes"] = {"sha256": hashlib.sha256(raw).hexdigest()}
    (tmp_path / "www" / "mds" / "index.json").write_text(json.dumps(index))
    new = whole_epoch(loader(server.address("mds"), tmp_path / "cache"))
    server.stop()
    assert not np.array_equal(old, new)
    assert np.array_equal(new, whole_epoch(loader(str(tmp_path / "www" / "mds"), tmp_path)))


_S3_SERVER = """
import signal, sys
from pathlib import Path
import boto3
from moto.server import ThreadedMotoServer
# Filled through a door of its own before the real one opens: a server that is back has its files, as a real one would.
side = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
side.start()
client = boto3.client("s3", endpoint_url="http://%s:%d" % side.get_host_and_port())
client.create_bucket(Bucket="bucket")
for path in Path(sys.argv[1]).rglob("*.*"):
    if path.is_file():
        client.upload_file(str(path), "bucket", str(path.relative_to(sys.argv[1])))
ThreadedMotoServer("127.0.0.1", int(sys.argv[2]), verbose=False).start()
print("open", flush=True)
signal.pause()
"""


class S3:
    """A real S3 server on loopback, in a process that can be killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Open, with every file there."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _S3_SERVER, str(self._folder), str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "open\n"

    def kill(self) -> None:
        """As a machine that loses its power."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def s3(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Both data sets in a bucket."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = S3(data)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    server.kill()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["s3://bucket/no/such/folder", "s3://bucket/mds/no-such-pair", "s3://no-bucket/mds"])
@pytest.mark.usefixtures("s3")
def test_run_on_a_missing_s3_path_ends_without_retries(path: str, tmp_path: Path) -> None:
    done = run_processes(tmp_path, 1, f"data.path={path}")
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    assert path in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["mds", "bin"])
@pytest.mark.usefixtures("s3")
def test_s3_gives_the_stream_of_the_disk_within_its_cache(name: str, data: Path, tmp_path: Path) -> None:
    near, far = loader(str(data / name), tmp_path), loader(f"s3://bucket/{name}", tmp_path / "far", limit=1 << 20)
    assert np.array_equal(whole_epoch(near), whole_epoch(far))
    assert 0 < held_bytes(tmp_path / "far" / "remote") <= 1 << 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("s3")
def test_inputs_on_s3_are_listed_with_their_sizes_and_versions(data: Path) -> None:
    expected = [(path.name, path.stat().st_size) for path in sorted((data / "bin").glob("*.json*"))]
    assert expected
    for name in ("s3://bucket/bin", "s3://bucket/bin/*.json*"):
        found = find_files([name])
        assert [(file.path.rpartition("/")[2], file.size_bytes) for file in found] == expected
        assert all(file.version for file in found)
    (one,) = find_files(["s3://bucket/bin/dataset.json"])
    assert one.path == "s3://bucket/bin/dataset.json"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("s3")
def test_a_tokenizer_stays_when_files_push_each_other_out(data: Path, tokenizer: Path, tmp_path: Path) -> None:
    limit = 2 * max(path.stat().st_size for path in (data / "mds").glob("*.mds")) + 100
    config = DataConfig(path="s3://bucket/mds", valid_share=0.0, cache_limit=ByteSize(limit), shuffle_window=200)
    loaders = build_loaders(config, SEQ_LEN, 1000, 5, tmp_path)
    whole_epoch(loaders.train)
    assert loaders.tokenizer is not None
    assert loaders.tokenizer.read_bytes() == tokenizer.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_s3_server_killed_and_started_again_costs_no_sample_and_the_cache_keeps_its_limit(
    s3: S3, data: Path, tmp_path: Path
) -> None:
    near = loader(str(data / "mds"), tmp_path)
    sizes = [path.stat().st_size for path in (data / "mds").glob("*.mds")]
    limit = 2 * max(sizes) + 100
    feed = StepFeed(loader("s3://bucket/mds", tmp_path / "far", limit), 0, 8, 4, 0, 1, prefetch=2)
    steps = near.samples_per_epoch // 8
    seen, back = [], None
    for step in range(steps):
        if step == steps // 3:
            s3.kill()
            back = threading.Timer(0.5, s3.start)
            back.start()
        seen += [batch.inputs for batch in feed.next_step()]
        assert held_bytes(tmp_path / "far" / "remote") <= limit
    feed.close()
    assert back is not None
    back.join()
    assert np.array_equal(np.concatenate(seen), near.rows(0, 8 * steps).inputs)


_FULL_DISK = """
import subprocess, sys
from pathlib import Path
import numpy as np
from keepstep.config.schema import DataConfig
from keepstep.core.errors import DataError
from keepstep.core.units import ByteSize
from keepstep.data.loader import build_loaders
near, far, disk, size = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + size, "tmpfs", disk], check=True)
def loader(path, cache):
    config = DataConfig(path=path, valid_share=0.0, cache_limit=ByteSize(1 << 30), shuffle_window=200)
    return build_loaders(config, 64, 1000, 5, cache).train
def epoch(one):
    return np.concatenate([one.rows(first, 50).inputs for first in range(0, one.samples_per_epoch, 50)])
one = loader(far, disk)
try:
    epoch(one)
except DataError as error:
    print(error.message, "|", error.hint)
assert not list(disk.rglob("*.part")), "half a file was left behind"
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
assert np.array_equal(epoch(one), epoch(loader(near, disk / "near")))
print("the same stream")
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full_is_one_clear_error_and_the_run_goes_on_once_there_is_room(
    web: Web, data: Path, tmp_path: Path
) -> None:
    aside = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    try:
        probe = [*aside, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
        subprocess.run(probe, check=True, capture_output=True, timeout=PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine lets nobody mount a small disk of his own: {error}")
    disk = tmp_path / "disk"
    disk.mkdir()
    total = sum(path.stat().st_size for path in (data / "mds").glob("*.mds"))
    words = [str(data / "mds"), web.address("mds"), str(disk), str(total // 2)]
    done = subprocess.run([*aside, sys.executable, "-c", _FULL_DISK, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    message, same = done.stdout.splitlines()
    assert "No space left on device" in message
    assert "free space on that disk, lower data.cache_limit or set data.cache_dir" in message
    assert same == "the same stream"


def test_training_and_evaluation_read_far_files_at_the_same_time(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 64)
    files = [RemoteFile(f"file://{tmp_path}/{number}.bin", 64) for number in range(12)]
    mapped = _mapped_files(NodeCache(tmp_path / "cache", 1 << 20))

    def read(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(200):
            number = generator.randrange(len(files))
            assert int(mapped(files[number])[0]) == number

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_a_cached_file_that_lost_its_end_is_fetched_again(web: Web, data: Path, tmp_path: Path) -> None:
    whole_epoch(loader(web.address("mds"), tmp_path))
    for path in (tmp_path / "remote" / "files").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    near, far = loader(str(data / "mds"), tmp_path), loader(web.address("mds"), tmp_path)
    assert np.array_equal(whole_epoch(near), whole_epoch(far))


def test_a_cached_file_is_on_the_disk_before_it_has_its_name(
    web: Web, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part has its full length before its bytes come: a power cut would else leave zeros under the file's name."""
    synced: list[Path] = []
    monkeypatch.setattr("keepstep.data.remote.node_cache.sync_file", synced.append)
    really = Path.replace

    def replace(self: Path, target: Path) -> Path:
        assert self in synced
        return really(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    name = next((data / "mds").glob("*.mds")).name
    NodeCache(tmp_path, 1 << 30).open(RemoteFile(web.address(f"mds/{name}")), Path.read_bytes)
    assert synced


def test_samples_of_any_length_are_read_from_afar_whatever_the_first_shard_holds(
    tmp_path: Path, tokenizer: Path, texts: list[str]
) -> None:
    """One sample alone is as long as all of its shard: that says nothing about the others."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    options = BuildOptions(
        inputs=(str(path),), tokenizer_sha256=sha256_file(tokenizer), format="mds", task_bytes=len(texts[0]) + 10
    )
    build(tmp_path / "mds", make_plan(options), tokenizer, workers=1)
    first = json.loads((tmp_path / "mds" / "index.json").read_text())["shards"][0]
    assert first["samples"] == 1
    near, far = (loader(place + str(tmp_path / "mds"), tmp_path) for place in ("", "file://"))
    assert np.array_equal(whole_epoch(near), whole_epoch(far))


class _WithoutLength(BaseHTTPRequestHandler):
    """Sends files in chunks, as servers do that make or pack them on the way; closes early where it is told to."""

    protocol_version = "HTTP/1.1"
    raw = b""
    cut = False

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(b"%x\r\n" % len(self.raw) + self.raw + b"\r\n" + (b"" if self.cut else b"0\r\n\r\n"))
        self.close_connection = True


@pytest.fixture
def chunked(corpus: Path) -> Iterator[str]:
    _WithoutLength.raw, _WithoutLength.cut = corpus.read_bytes(), False
    server = ThreadingHTTPServer(("127.0.0.1", 0), _WithoutLength)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/corpus.jsonl"
    server.shutdown()
    server.server_close()


def test_a_server_that_does_not_tell_a_file_length_gives_all_documents(chunked: str, texts: list[str]) -> None:
    assert [file.size_bytes for file in find_files([chunked])] == [-1]
    assert list(texts_of([chunked], RecordOptions())) == texts


def test_a_transfer_that_breaks_off_is_no_damaged_file(chunked: str) -> None:
    _WithoutLength.cut = True
    with pytest.raises(HardwareError, match="could not be read to its end") as caught:
        list(texts_of([chunked], RecordOptions()))
    assert caught.value.hint is not None
    assert "start the same command again" in caught.value.hint


def test_a_table_whose_transfer_breaks_off_is_not_damaged_either(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with fsspec.open("memory://far/x.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"text": ["a", "b"]}), file)
    assert list(texts_of(["memory://far/x.parquet"], RecordOptions())) == ["a", "b"]

    def break_off(*_: object, **__: object) -> None:
        raise ConnectionResetError("the peer is gone")

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", break_off)
    with pytest.raises(HardwareError, match="could not be read to its end"):
        list(texts_of(["memory://far/x.parquet"], RecordOptions()))


def test_missing_credentials_are_said_at_once() -> None:
    class NoCredentialsError(Exception):
        """As botocore calls it."""

    def act() -> None:
        raise NoCredentialsError("Unable to locate credentials")

    with pytest.raises(DataError, match="Unable to locate credentials"):
        files.with_retry("s3://bucket", act, Retry(sleep=lambda _: pytest.fail("waited")))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match="needs a package") as caught:
        files.filesystem("gs://bucket/x")
    assert caught.value.hint == "pip install 'keepstep[gcs]'"
