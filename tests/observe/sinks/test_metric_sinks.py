import threading
import time
from pathlib import Path

import pytest

from keepstep.observe.run_folder import JsonLines, Record, RunFolder
from keepstep.observe.sinks.metric_sinks import JsonlSink, MetricSinks, open_sinks
from keepstep.observe.sinks.trackers import scalars
from tests.patience import PATIENCE_S


class Blocked:
    name = "blocked"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, stream: str, record: Record) -> None:
        self.release.wait()

    def close(self) -> None:
        pass


class Failing(Blocked):
    name = "failing"

    def write(self, stream: str, record: Record) -> None:
        raise ConnectionRefusedError("nobody listens")


def test_jsonl_sink_writes_each_stream_to_its_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    sinks = open_sinks(folder, tensorboard=False)
    sinks.metrics({"step": 1, "loss": 2.0, "time": 5.0})
    sinks.event("checkpoint_committed", step=1, seconds=0.5)
    sinks.ranks({"step": 1, "step_s": [0.1, 0.2]})
    sinks.sample(1, "Once", " upon")
    assert sinks.close(PATIENCE_S)
    assert JsonLines(folder.metrics).read() == [{"time": 5.0, "step": 1, "loss": 2.0}]
    (event,) = JsonLines(folder.events).read()
    assert (event["kind"], event["step"], event["rank"], event["seconds"]) == ("checkpoint_committed", 1, 0, 0.5)
    assert JsonLines(folder.ranks).read()[0]["step_s"] == [0.1, 0.2]
    assert JsonLines(folder.samples).read()[0]["text"] == " upon"


def test_sinks_are_not_slowed_by_one_that_blocks(tmp_path: Path) -> None:
    folder, blocked, told = RunFolder(tmp_path), Blocked(), list[str]()
    sinks = MetricSinks([blocked, JsonlSink(folder)], notice=told.append, capacity=8)
    spent_s = 0.0
    for step in range(100):
        started_s = time.thread_time()
        sinks.metrics({"step": step})
        spent_s += time.thread_time() - started_s
        # On a busy machine, too, the other sink gets the time to write.
        while len(JsonLines(folder.metrics).read()) <= step:
            time.sleep(0.001)
    assert spent_s < 1
    assert not sinks.close(timeout_s=0.2)
    blocked.release.set()
    assert len(JsonLines(folder.metrics).read()) == 100
    assert sinks.dropped["blocked"] >= 91
    assert sinks.dropped["run folder"] == 0
    assert any("dropped" in text for text in told)
    assert any("did not finish" in text for text in told)


def test_sinks_warn_once_about_one_that_fails(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path), list[str]()
    sinks = MetricSinks([Failing(), JsonlSink(folder)], notice=told.append)
    for step in range(5):
        sinks.metrics({"step": step})
    assert sinks.close(PATIENCE_S)
    assert sinks.failed == {"failing": 5, "run folder": 0}
    assert len(told) == 1
    assert "nobody listens" in told[0]
    assert len(JsonLines(folder.metrics).read()) == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_sinks_survive_a_full_disk(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path), list[str]()
    folder.metrics.symlink_to("/dev/full")
    sinks = MetricSinks([JsonlSink(folder)], notice=told.append)
    sinks.metrics({"step": 1})
    sinks.event("start")
    assert sinks.close(PATIENCE_S)
    assert sinks.failed == {"run folder": 2}, "the write, and the last attempt at the end"
    assert "No space left" in told[0]
    assert len(JsonLines(folder.events).read()) == 1


def test_tensorboard_reads_scalars_and_texts_by_known_tags(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "run").create()
    sinks = open_sinks(folder)
    for step in (1, 2):
        sinks.metrics({"step": step, "loss": 3.0 - step, "lr": 1e-3, "grad_norm": 0.5, "step_s": 0.25, "ranks": 2})
    sinks.metrics({"step": 2, "valid_loss": 1.5, "valid_ppl": 4.5})
    sinks.event("fault", step=2, what="rank 1 died")
    sinks.sample(2, "a", "b")
    assert sinks.close(PATIENCE_S)
    read = EventAccumulator(str(folder.tensorboard))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    assert {"loss/train/total", "lm loss", "learning-rate", "grad-norm", "iteration-time", "lm loss validation"} <= tags
    assert [(event.step, event.value) for event in read.Scalars("lm loss")] == [(1, 2.0), (2, 1.0)]
    assert read.Scalars("throughput/batches_per_sec")[0].value == 4.0
    assert b"rank 1 died" in read.Tensors("events")[0].tensor_proto.string_val[0]


def test_tensorboard_draws_repeated_steps_once(tmp_path: Path) -> None:
    """After a resume, and after the guard went back within one attempt."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "run").create()
    for attempt, steps in enumerate([range(1, 11), [*range(6, 13), *range(9, 15)]]):
        sinks = open_sinks(folder)
        if attempt:
            sinks.metrics({"step": 5, "valid_loss": 1.5})
        for step in steps:
            sinks.metrics({"step": step, "loss": float(attempt)})
        assert sinks.close(PATIENCE_S)
    read = EventAccumulator(str(folder.tensorboard))
    read.Reload()
    assert [event.step for event in read.Scalars("lm loss")] == [*range(1, 15)]
    assert [event.value for event in read.Scalars("lm loss")] == [0.0] * 5 + [1.0] * 9
    assert len(read.Scalars("lm loss validation")) == 1


def test_tensorboard_tags_unknown_metrics_with_our_prefix() -> None:
    tagged = scalars({"step": 3, "time": 1.0, "data_s": 0.5, "tokens_per_s": 100.0, "ranks": 4, "note": "text"})
    assert tagged["keepstep/data_s"] == 0.5
    assert tagged["throughput/device/tokens_per_sec"] == 25.0
    assert "keepstep/note" not in tagged
    assert not any(tag.endswith(("step", "/time")) for tag in tagged)
