"""On an object store a step is committed by a conditional put, and everything else is as on a disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import example_state, same_tensors, write_step, zeroed

from keepstep.checkpoint import commit, parity
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.store import open_store
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, ConfigError
from keepstep.train.start import whole_model

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
    assert parity.mend(store, step)[1] == [victim]
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
    sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
    from tiny_runs import run_here

    run_here(tmp_path, f"checkpoint.folder={bucket}")
    _, _, step = whole_model(tmp_path / "run")
    assert step == 6
