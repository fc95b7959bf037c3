"""What watching costs: all sinks of a run together against a step of the benchmark."""

import time
from pathlib import Path

from keepstep.config.schema import ObserveConfig
from keepstep.core.ranks import Ranks
from keepstep.observe.sinks.metric_sinks import build_sinks
from tests.observe.make_runs import Writer
from tests.observe.sinks.test_prometheus import fetch, free_port
from tests.patience import PATIENCE_S

BENCHMARK_STEP_S = 0.526
"""A step of the Llama 1b benchmark (4,096 tokens × 8 rows on one H200)."""
SHARE = 0.005
STEPS = 400


def test_sinks_cost_at_most_half_a_percent_of_a_step(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", now=time.time())
    port = free_port()
    sinks = build_sinks(writer.folder, ObserveConfig(metrics_port=port), Ranks())
    assert sinks is not None
    sinks.event("start")
    while not writer.folder.events.exists():
        time.sleep(0.01)
    lines = []
    for writer.step in range(1, STEPS + 1):
        lines.append(writer.line())
    began, spent = time.process_time(), 0.0
    for line in lines:
        called = time.thread_time()
        sinks.metrics(line)
        spent += time.thread_time() - called
        if line["step"] % 30 == 0:
            # A scrape every 15 s of steps of half a second, and a look at all ranks at its usual interval.
            fetch(f"http://127.0.0.1:{port}/metrics")
            sinks.ranks({"step": line["step"], "step_s": [0.5] * 8, "memory_gib": [60.0] * 8})
    assert sinks.close(PATIENCE_S)
    every_thread = time.process_time() - began
    print(f"{1e6 * spent / STEPS:.0f} µs of the training thread, {1e6 * every_thread / STEPS:.0f} µs of all, a step")
    assert spent / STEPS < SHARE * BENCHMARK_STEP_S / 10
    assert every_thread / STEPS < SHARE * BENCHMARK_STEP_S
