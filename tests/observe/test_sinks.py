import threading
import time
from pathlib import Path

import pytest

from keepstep.observe.folder import JsonLines, Record, RunFolder
from keepstep.observe.sinks import JsonlSink, Sinks, open_sinks
from keepstep.observe.tensorboard import scalars


class Blocked:
    name = "blocked"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, stream: str, record: Record) -> None:
        self.release.wait()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Failing(Blocked):
    name = "failing"

    def write(self, stream: str, record: Record) -> None:
        raise ConnectionRefusedError("nobody listens")


def test_every_stream_lands_in_its_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run").create()
    sinks = open_sinks(folder, tensorboard=False)
    sinks.metrics({"step": 1, "loss": 2.0, "time": 5.0})
    sinks.event("checkpoint_committed", step=1, seconds=0.5)
    sinks.ranks({"step": 1, "step_s": [0.1, 0.2]})
    sinks.sample(1, "Once", " upon")
    assert sinks.close()
    assert JsonLines(folder.metrics).read() == [{"time": 5.0, "step": 1, "loss": 2.0}]
    (event,) = JsonLines(folder.events).read()
    assert (event["kind"], event["step"], event["rank"], event["seconds"]) == ("checkpoint_committed", 1, 0, 0.5)
    assert JsonLines(folder.ranks).read()[0]["step_s"] == [0.1, 0.2]
    assert JsonLines(folder.samples).read()[0]["text"] == " upon"


def test_a_sink_that_blocks_neither_slows_training_nor_holds_the_others_back(tmp_path: Path) -> None:
    folder, blocked, told = RunFolder(tmp_path), Blocked(), list[str]()
    sinks = Sinks([blocked, JsonlSink(folder)], notice=told.append, capacity=8)
    started = time.monotonic()
    for step in range(100):
        sinks.metrics({"step": step})
        time.sleep(0.001)
    assert time.monotonic() - started < 2
    assert not sinks.close(timeout_s=0.2)
    blocked.release.set()
    assert len(JsonLines(folder.metrics).read()) == 100
    assert sinks.dropped["blocked"] >= 91
    assert sinks.dropped["run folder"] == 0
    assert any("dropped" in text for text in told)
    assert any("left behind" in text for text in told)


def test_a_sink_that_fails_is_told_of_once_and_training_goes_on(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path), list[str]()
    sinks = Sinks([Failing(), JsonlSink(folder)], notice=told.append)
    for step in range(5):
        sinks.metrics({"step": step})
    assert sinks.flush()
    assert sinks.close()
    assert sinks.failed == {"failing": 5, "run folder": 0}
    assert len(told) == 1
    assert "nobody listens" in told[0]
    assert len(JsonLines(folder.metrics).read()) == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_metrics_but_not_the_run(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path), list[str]()
    folder.metrics.symlink_to("/dev/full")
    sinks = Sinks([JsonlSink(folder)], notice=told.append)
    sinks.metrics({"step": 1})
    sinks.event("start")
    assert sinks.close()
    assert sinks.failed == {"run folder": 1}
    assert "No space left" in told[0]
    assert len(JsonLines(folder.events).read()) == 1


def test_tensorboard_reads_the_scalars_and_texts_under_the_names_people_know(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "run").create()
    sinks = open_sinks(folder)
    for step in (1, 2):
        sinks.metrics({"step": step, "loss": 3.0 - step, "lr": 1e-3, "grad_norm": 0.5, "step_s": 0.25, "ranks": 2})
    sinks.metrics({"step": 2, "valid_loss": 1.5, "valid_ppl": 4.5})
    sinks.event("fault", step=2, what="rank 1 died")
    sinks.sample(2, "a", "b")
    assert sinks.close()
    read = EventAccumulator(str(folder.tensorboard))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    assert {"loss/train/total", "lm loss", "learning-rate", "grad-norm", "iteration-time", "lm loss validation"} <= tags
    assert [(event.step, event.value) for event in read.Scalars("lm loss")] == [(1, 2.0), (2, 1.0)]
    assert read.Scalars("throughput/batches_per_sec")[0].value == 4.0
    assert b"rank 1 died" in read.Tensors("events")[0].tensor_proto.string_val[0]


def test_tensorboard_draws_steps_that_are_done_again_once(tmp_path: Path) -> None:
    """After a resume, and after the guard went back within one attempt."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "run").create()
    for attempt, steps in enumerate([range(1, 11), [*range(6, 13), *range(9, 15)]]):
        sinks = open_sinks(folder)
        if attempt:
            sinks.metrics({"step": 5, "valid_loss": 1.5})
        for step in steps:
            sinks.metrics({"step": step, "loss": float(attempt)})
        assert sinks.close()
    read = EventAccumulator(str(folder.tensorboard))
    read.Reload()
    assert [event.step for event in read.Scalars("lm loss")] == [*range(1, 15)]
    assert [event.value for event in read.Scalars("lm loss")] == [0.0] * 5 + [1.0] * 9
    assert len(read.Scalars("lm loss validation")) == 1


def test_a_metric_without_a_known_name_is_kept_under_our_own() -> None:
    tagged = scalars({"step": 3, "time": 1.0, "data_s": 0.5, "tokens_per_s": 100.0, "ranks": 4, "note": "text"})
    assert tagged["keepstep/data_s"] == 0.5
    assert tagged["throughput/device/tokens_per_sec"] == 25.0
    assert "keepstep/note" not in tagged
    assert not any(tag.endswith(("step", "/time")) for tag in tagged)
