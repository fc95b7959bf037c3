import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from keepstep.config.schema import ObserveConfig
from keepstep.core.errors import UsageError
from keepstep.core.ranks import Ranks
from keepstep.observe.history import History
from keepstep.observe.sinks.metric_sinks import build_sinks
from keepstep.observe.sinks.prometheus import METRICS, Exporter, Histogram, sample
from tests.observe.make_runs import Writer
from tests.patience import PATIENCE_S

DASHBOARDS = resources.files("keepstep.observe") / "dashboards"
NAMES = ("job", "nodes", "gpus", "storage")
needs_prometheus = pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus package")


def queries(name: str) -> list[str]:
    dashboard = json.loads((DASHBOARDS / f"{name}.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_prometheus_exports_run_state_and_local_ranks(tmp_path: Path) -> None:
    writer = Writer(tmp_path / 'a "quoted" run', now=time.time() - 130)
    writer.start()
    writer.take(230)
    exporter = Exporter(writer.folder, job=True, node="n1", local_ranks=range(2, 4))
    exporter.take("metrics", {"step": 1, "step_s": 0.5})
    exporter.take("event", {"kind": "checkpoint_committed", "seconds": 4.8})
    exporter.take("ranks", {"step_s": [1.0, 2.0, 3.0, 4.0], "memory_gib": [1, 2, 3, 4]})
    text = exporter.render(writer.now)
    labels = 'run="a \\"quoted\\" run",node="n1"'
    assert f"keepstep_step{{{labels}}} 230.0" in text
    assert f'keepstep_state{{{labels},state="healthy"}} 1.0' in text
    assert f'keepstep_step_seconds_bucket{{{labels},le="0.3"}} 0' in text
    assert f'keepstep_step_seconds_bucket{{{labels},le="0.5"}} 1' in text
    assert f"keepstep_checkpoint_seconds_sum{{{labels}}} 4.8" in text
    assert f"keepstep_expert_load_max_ratio{{{labels}}} 1.5" in text
    assert f"keepstep_expert_load_entropy_ratio{{{labels}}} 0.9" in text
    assert f"keepstep_expert_bias_max{{{labels}}} 0.01" in text
    assert f'keepstep_rank_step_seconds{{{labels},rank="2"}} 3.0' in text
    assert 'rank="0"' not in text
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == set(METRICS)


def test_prometheus_counters_never_fall(tmp_path: Path) -> None:
    """A rate over a counter that falls counts all of it once more: millions of tokens a second that nobody trained."""
    writer = Writer(tmp_path / "run")
    writer.start()
    exporter = Exporter(writer.folder, job=True, node="n1", local_ranks=range(1))

    def counted(name: str, by: Exporter = exporter) -> float:
        return float(re.findall(rf"^{name}{{.*}} (\S+)$", by.render(writer.now), re.MULTILINE)[0])

    writer.take(100)
    assert counted("keepstep_tokens_total") == 100 * 32768
    writer.fault()
    writer.recover(lost=40)
    assert counted("keepstep_tokens_total") == 100 * 32768
    for done in range(1, 50):
        writer.take(1)
        assert counted("keepstep_tokens_total") == (100 + done) * 32768
        assert counted("keepstep_samples_total") == (100 + done) * 256
    assert counted("keepstep_step") == 109
    History(writer.folder).store_columns()
    restarted = Exporter(writer.folder, job=True, node="n1", local_ranks=range(1))
    assert counted("keepstep_tokens_total", restarted) == 149 * 32768, "the next process goes on from there"


def test_prometheus_of_another_node_exports_its_ranks_only(tmp_path: Path) -> None:
    exporter = Exporter(Writer(tmp_path / "run").folder, job=False, node="n2", local_ranks=range(1, 2))
    exporter.take("ranks", {"step_s": [1.0, 2.0]})
    text = exporter.render(0.0)
    assert "keepstep_rank_step_seconds" in text
    assert "keepstep_loss" not in text


def test_prometheus_histograms_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0, math.nan):
        histogram.observe(value)
    lines = [*histogram.lines("x", {})]
    assert lines == [
        'x_bucket{le="1"} 2',
        'x_bucket{le="2"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum{} 102.0",
        "x_count{} 4",
    ]
    assert sample("x", {}, math.nan) == "x{} NaN"


def test_prometheus_port_is_guarded_beyond_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_METRICS_TOKEN", raising=False)
    folder = Writer(tmp_path / "run").folder
    quiet = ObserveConfig(tensorboard=False)
    assert build_sinks(folder, quiet, Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2)) is None
    port = free_port()
    with pytest.raises(UsageError, match="no token") as caught:
        build_sinks(folder, ObserveConfig(tensorboard=False, metrics_port=port, metrics_host="0.0.0.0"), Ranks())
    assert "KEEPSTEP_METRICS_TOKEN" in str(caught.value.hint)
    monkeypatch.setenv("KEEPSTEP_METRICS_TOKEN", "a-long-enough-token")
    sinks = build_sinks(folder, ObserveConfig(tensorboard=False, metrics_port=port, metrics_host="0.0.0.0"), Ranks())
    assert sinks is not None
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(f"http://127.0.0.1:{port}/metrics")
    assert "keepstep_step" in fetch(f"http://127.0.0.1:{port}/metrics", Authorization="Bearer a-long-enough-token")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(f"http://127.0.0.1:{port}/", Authorization="Bearer a-long-enough-token")
    assert sinks.close(PATIENCE_S)


def test_prometheus_taken_port_costs_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ObserveConfig(tensorboard=False, metrics_port=taken.getsockname()[1])
        sinks = build_sinks(Writer(tmp_path / "run").folder, options, Ranks())
    assert sinks is not None
    assert sinks.close(PATIENCE_S)
    assert "warning: Prometheus is off" in capsys.readouterr().err


def test_dashboards_use_only_existing_metrics() -> None:
    known = set(METRICS) | {
        f"{name}_{part}"
        for name, (kind, _) in METRICS.items()
        if kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    used = "\n".join(query for name in NAMES for query in queries(name)) + (DASHBOARDS / "rules.yaml").read_text()
    assert set(re.findall(r"\bkeepstep_[a-z_]+\b", used)) <= known


@needs_prometheus
def test_rules_pass_promtool(tmp_path: Path) -> None:
    for source in (DASHBOARDS / "rules.yaml", Path(__file__).parent / "rules_test.yaml"):
        (tmp_path / source.name).write_text(source.read_text())
    for words in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


DCGM = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="node-0"} 98
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",Hostname="node-0"} 0.61
DCGM_FI_DEV_FB_USED{gpu="0",Hostname="node-0"} 71234
DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="node-0"} 652.1
DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="node-0"} 61
DCGM_FI_DEV_SM_CLOCK{gpu="0",Hostname="node-0"} 1755
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{gpu="0",Hostname="node-0"} 120345
DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="node-0"} 0
"""


class DcgmText(BaseHTTPRequestHandler):
    """What NVIDIA's exporter says on a machine with a GPU; this one has none."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(DCGM.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def process(*words: str, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, **variables})
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def until(what: str, check: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if found := check():
                return found
        except OSError:
            pass
        time.sleep(0.3)
    pytest.fail(f"{what} did not come within {PATIENCE_S:g} s")


def ask_prometheus(port: int, query: str) -> list[Any]:
    for variable, value in {"$__rate_interval": "30s", "$run": ".*", "$node": ".*", "$host": ".*"}.items():
        query = query.replace(variable, value)
    answer = json.loads(fetch(f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"))
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


@pytest.mark.slow
@needs_prometheus
@pytest.mark.skipif(not shutil.which("prometheus-node-exporter"), reason="needs Debian's prometheus-node-exporter")
def test_prometheus_scrapes_a_run_for_every_dashboard_query(tmp_path: Path) -> None:
    metrics_port, node_port, web_port = free_port(), free_port(), free_port()
    dcgm = ThreadingHTTPServer(("127.0.0.1", 0), DcgmText)
    Thread(target=dcgm.serve_forever, daemon=True).start()
    (tmp_path / "rules.yaml").write_text((DASHBOARDS / "rules.yaml").read_text())
    targets = {"keepstep": metrics_port, "node": node_port, "dcgm": dcgm.server_address[1]}
    jobs = [{"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{at}"]}]} for name, at in targets.items()]
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yaml"]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({**config, "scrape_configs": jobs}))
    train = [
        "model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=128", "model.seq_len=16", "data=synthetic",
        "global_batch=8", "microbatch=2", "max_duration=1000000ba", "checkpoint.interval=30ba", "checkpoint.keep=1",
        "evaluate.interval=40ba", "evaluate.batches=1", "observe.rank_interval=5", "observe.tensorboard=false",
        "compute.device=cpu", "schedule.warmup=2ba", f"observe.metrics_port={metrics_port}", f"runs_dir={tmp_path}",
        "--procs", "2",
    ]  # fmt: skip
    prometheus = [
        f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{web_port}",
    ]  # fmt: skip
    with (
        process("prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{node_port}", log=tmp_path / "node.log"),
        process("prometheus", *prometheus, log=tmp_path / "prometheus.log"),
        process(sys.executable, "-m", "keepstep", "train", *train, log=tmp_path / "train.log", OMP_NUM_THREADS="1"),
    ):
        until("the first steps", lambda: ask_prometheus(web_port, "keepstep_checkpoints_total > 1"))
        until("both ranks", lambda: len(ask_prometheus(web_port, "keepstep_rank_step_seconds")) == 2)
        empty = [query for name in NAMES for query in queries(name)]

        def all_have_data() -> bool:
            empty[:] = [query for query in empty if not ask_prometheus(web_port, query)]
            return not empty

        end = time.monotonic() + PATIENCE_S
        while not all_have_data() and time.monotonic() < end:
            time.sleep(1)
        assert empty == [], "dashboard queries without data"
        until("the first recorded rule", lambda: ask_prometheus(web_port, "keepstep:step_seconds:p50_5m"))
        health = json.loads(fetch(f"http://127.0.0.1:{web_port}/api/v1/rules"))
        broken = [rule for group in health["data"]["groups"] for rule in group["rules"] if rule["health"] == "err"]
        assert broken == []
    dcgm.shutdown()
    dcgm.server_close()
