"""On an object store a step is committed by a conditional put, and everything else is as on a disk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.protocol import commit, parity
from keepstep.checkpoint.storage import object_store
from keepstep.checkpoint.storage.store import open_store
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, ConfigError
from keepstep.core.requests import take_requests
from keepstep.data.remote.files import copy
from keepstep.interop.full_model import load_full_model
from tests.checkpoint.support import example_state, same_tensors, write_step, zeroed

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

# The stand-in for S3 and its client warn about themselves; that is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket{abs(hash(request.node.name))}"
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}/run/checkpoints"


def test_save_retire_and_load_through_the_writer_process(bucket: str) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    checkpointer = Checkpointer(bucket, CheckpointConfig(keep=2), lambda *event: events.append(event))
    for step in (1, 2, 3):
        checkpointer.save_async(step, example_state(step), {})
        checkpointer.before_update()
    checkpointer.wait()
    assert [facts["step"] for kind, facts in events if kind == "checkpoint_committed"] == [1, 2, 3]
    counted = [facts for kind, facts in events if kind == "storage_requests"]
    assert [facts["step"] for facts in counted] == [1, 2, 3]
    # Data file, part file, manifest, marker and `latest`, at least, by the writer process.
    assert all(facts["PUT"] >= 5 and facts["LIST"] >= 1 and facts["written_bytes"] > 0 for facts in counted)
    assert [step.step for step in commit.committed_steps(open_store(bucket))] == [3, 2]
    into = zeroed(example_state(3))
    loaded = checkpointer.load_newest(into)
    checkpointer.close()
    assert loaded is not None
    assert loaded.step == 3
    assert same_tensors(example_state(3), into)
    assert open_store(bucket).read("latest") == b"step_00000003\n"


def test_the_first_marker_wins_and_the_second_writer_is_told(bucket: str) -> None:
    store = open_store(bucket)
    write_step(store, 1, example_state(1))
    with pytest.raises(FileExistsError):
        store.create("step_00000001/_SUCCESS", b"another")
    assert [step.step for step in commit.committed_steps(store)] == [1]


def test_a_damaged_object_is_rebuilt_from_parity(bucket: str) -> None:
    store = open_store(bucket)
    step = write_step(store, 1, example_state(1), with_parity=True)
    victim = commit.read_manifest(store, step).files[1].name
    content = store.read(f"{step.name}/{victim}")
    store.replace(f"{step.name}/{victim}", content[:-3] + b"bad")
    assert parity.repair(store, step)[1] == [victim]
    assert store.read(f"{step.name}/{victim}") == content


def test_a_store_without_put_if_absent_is_refused() -> None:
    with pytest.raises(CheckpointError, match="ftp://"):
        open_store("ftp://host/folder")


def test_a_bucket_that_does_not_exist_is_refused_before_training(bucket: str) -> None:
    Checkpointer(bucket, CheckpointConfig()).check_place()
    assert open_store(bucket).names() == []
    with pytest.raises(ConfigError, match="cannot be written"):
        Checkpointer("s3://nowhere-to-be-found/run", CheckpointConfig()).check_place()


def test_a_run_whose_steps_lie_in_a_bucket_opens_for_evaluation_and_export(bucket: str, tmp_path: Path) -> None:
    from tests.train.tiny_runs import run_here

    run_here(tmp_path, f"checkpoint.folder={bucket}")
    _, _, step = load_full_model(tmp_path / "run")
    assert step == 6


def test_counted_requests_are_those_of_the_server(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    part, target = 5 * 2**20, tmp_path / "copy"
    monkeypatch.setattr(object_store, "PART_BYTES", part)
    store = open_store(bucket)
    target.touch()
    take_requests()
    with caplog.at_level("INFO", logger="werkzeug"):
        caplog.clear()
        store.write("large", [memoryview(bytes(2 * part + 7))])
        store.write("small", [memoryview(b"abc")])
        store.create("marker", b"x")
        assert store.read("small") == b"abc"
        assert store.read_into("large", 3, memoryview(bytearray(10))) == 10
        copy(store.locate("large"), target)
        served = Counter(re.findall(r"(GET|PUT|POST|HEAD) /bucket", caplog.text))
    assert target.stat().st_size == 2 * part + 7
    found = take_requests()
    assert (found["GET"], found["HEAD"]) == (served["GET"], served["HEAD"])
    # Create, three parts and complete; then two small objects.
    assert found["PUT"] == served["PUT"] + served["POST"] == (1 + 3 + 1) + 1 + 1
    assert found["written_bytes"] == 2 * part + 7 + 3 + 1
