"""The verb answers fast and without torch, says in one line whether a run fits, and every run can store its plan."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.hf_config import hf_config_of
from keepstep.config.load import load_config
from keepstep.plan.cluster import Machine
from keepstep.plan.report import plan_for_run

WITHOUT_TORCH = """
import sys, time
started = time.perf_counter()
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from keepstep.cli.main import main
code = main(sys.argv[1:])
print(time.process_time(), file=sys.stderr)
raise SystemExit(code)
"""


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "plan", *words], capture_output=True, text=True)


def test_plan_runs_without_torch_in_a_second() -> None:
    answer = without_torch(
        "model=mpt-30b", "global_batch=2048", "compute.recompute=full", "--cluster", "azure-nd-h100-v5:4"
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-2].startswith("verdict: fits")
    assert float(answer.stderr) < 1.0


def test_dry_run_without_torch_names_it() -> None:
    answer = without_torch("model=mpt-125m", "--cluster", "h100:1", "--dry-run")
    assert answer.returncode == 2
    assert "--dry-run needs torch" in answer.stderr or "--dry-run needs numpy" in answer.stderr


def test_plan_json_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama-8b", "microbatch=1", "--cluster", "h100:8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) >= {"memory", "speed", "storage", "goodput", "run", "layout", "verdict"}
    assert answer["memory"]["fits"] is True
    assert sum(answer["memory"]["parts_gib"].values()) == pytest.approx(answer["memory"]["allocated_gib"])
    spent = ("matmul_s", "attention_s", "memory_s", "update_s", "bubble_s", "fixed_s")
    speed = answer["speed"]
    assert sum(speed[name] for name in spent) + sum(speed["exposed_s"].values()) == pytest.approx(speed["step_s"])


def test_fp8_without_a_rate_for_it_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=mpt-tiny", "precision=fp8", "microbatch=1"]
    assert main([*words, "--cluster", "a100-80:1"]) == 0
    report = capsys.readouterr().out
    assert "a100-80 has no rate for fp8" in report
    # Training would be refused there.
    assert report.endswith("next: keepstep plan model=mpt-tiny precision=bf16 microbatch=1 --cluster a100-80:1\n")
    for others in (["--cluster", "h100:1"], ["lora.rank=4", "--cluster", "a100-80:1"]):
        assert main([*words, *others]) == 0
        assert "has no rate for fp8" not in capsys.readouterr().out


def test_plan_of_a_finetune_is_for_the_model_it_starts_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "llama"
    source.mkdir()
    shape = load_config(None, ["model=llama-1b"]).config.model
    (source / "config.json").write_text(json.dumps(dict(hf_config_of(shape, "bfloat16"))))
    words = ["lora.rank=16", "lora.base=nf4", "--cluster", "h200:1", "--json"]
    given = ["model.seq_len=2048", "microbatch=1", "global_batch=1"]
    answers = []
    for model in ("model=llama-1b", f"finetune.start_from={source}"):
        assert main(["plan", model, *given, *words]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[1]["memory"] == answers[0]["memory"]
    assert answers[1]["speed"]["step_s"] == answers[0]["speed"]["step_s"]


def test_plan_of_weights_elsewhere_needs_their_shape(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "finetune.start_from=OWNER/NAME", "global_batch=8", "microbatch=1", "--cluster", "h200:1"]
    assert main(words) == 2
    assert "its model's shape is unknown" in capsys.readouterr().err
    assert main([*words, "model=smollm-135m"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("run       smollm-135m")
    assert "the plan is for the given model (smollm-135m)" in printed.err


# Everything that would be chosen otherwise.
_GIVEN = [
    "microbatch=8",
    "compute.recompute=none",
    *(f"parallel.{axis}=1" for axis in ("tensor", "pipeline", "context")),
]


def test_plan_that_does_not_fit_exits_3_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama-8b", *_GIVEN, "--cluster", "h100:8"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  would fit") for line in lines) == 3
    assert lines[-2].startswith("verdict: does not fit")
    assert lines[-1].startswith("next: keepstep plan model=llama-8b ")
    assert main(lines[-1].split()[2:]) == 0


def test_plan_counts_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["model=llama-70b", "parallel.offload=true", "microbatch=1", "global_batch=16", "compute.recompute=full"]
    assert main(["plan", *run, "--cluster", "nebius-h100:1", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    host, parameters = answer["host"], answer["parameters"]
    # fp32 weights, gradients and two moments, the first two pinned, which takes powers of two: a block's matrices have
    # 40, 32, 224 and 112 MiB on each of 8 processes, embedding and head 501 MiB. A save: fp32 weights and moments.
    block, ends = 64 + 32 + 256 + 128, 2 * 512
    pinned = 8 * 2 * (80 * block + ends) / 1024
    assert host["offloaded_gib"] == pytest.approx(pinned + 8 * parameters / 2**30, rel=0.01)
    assert host["copy_gib"] == pytest.approx(12 * parameters / 2**30, rel=0.01)
    assert (answer["memory"]["fits"], host["fits"], host["available_gib"]) == (True, False, 1600)
    assert "GiB per machine" in answer["verdict"]

    assert main(["plan", *run, "--cluster", "nebius-h100:1"]) == 3
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: keepstep ").partition(",")[0]
    assert main(shlex.split(command)) == 0
    capsys.readouterr()
    assert main(["plan", *run[:1], *run[2:], "--cluster", "nebius-h200:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"]["offloaded_gib"] == 0


def test_plan_next_command_names_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "my machines.yaml"
    mine.write_text("clusters: {cellar: {gpu: h100, gpus_per_node: 8}}")
    assert main(["plan", "model=llama-8b", *_GIVEN, "--profiles", str(mine), "--cluster", "cellar:1"]) == 3
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: keepstep ")
    assert main(shlex.split(command)) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=llama-8b", "--cluster", "h100:0"], "must be NAME:COUNT"),
        (["model=llama-8b", "--cluster", "h100:8", "--stall", "soon"], "--stall is 'soon'"),
        (["model=llama-8b", "--cluster", "h100:8", "--recovery", "nobody"], "--recovery is 'nobody'"),
        (["model=llama-8b", "--cluster", "h100:8", "--measured", "nowhere.json"], "there is no file nowhere.json"),
        (["model=llama-8b", "--cluster", "h100:8", "--png", "layouts.png"], "--png layouts.png"),
        (
            ["model=llama-8b", "--cluster", "h100:8", "--search", "--top", "-1"],
            "argument --top: must be a whole number",
        ),
    ],
)
def test_plan_names_command_line_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) in (2, 4)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_search_ranks_layouts_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pareto.png"
    words = ["model=llama-8b", "microbatch=1", "global_batch=16", "--cluster", "azure-nd-h100-v5:1"]
    assert main(["plan", *words, "--search", "--top", "3", "--png", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert len(found["best"]) == 3
    assert found["fitting"] <= found["layouts"]
    assert {word for each in found["pareto"] for word in each["words"]} >= {"precision=fp8"}
    assert picture.stat().st_size > 10_000


def test_plan_goodput_uses_the_runs_own_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=llama-8b", "data=synthetic", "microbatch=1", "global_batch=2048", "max_duration=100000ba"]
    plans = {}
    for interval in ("0ba", "100000ba", "200000ba", "100ba"):
        assert (
            main(["plan", *words, f"checkpoint.interval={interval}", "--cluster", "azure-nd-h100-v5:256", "--json"])
            == 0
        )
        plans[interval] = json.loads(capsys.readouterr().out)
    never, often = plans["0ba"], plans["100ba"]
    assert never["goodput"]["interval_s"] == never["run"]["busy_s"]
    assert never["goodput"]["share"] < 0.9 < often["goodput"]["share"]
    assert never["run"]["cost"] > 1.1 * often["run"]["cost"]
    assert never["goodput"] == plans["100000ba"]["goodput"] == plans["200000ba"]["goodput"]
    assert f"{never['goodput']['share']:.1%} of the time effective" in never["verdict"]


def test_plan_for_run_is_json_with_speed_and_memory() -> None:
    config = load_config(None, ["model=llama-1b", "global_batch=8", "microbatch=8"]).config
    machine = Machine("NVIDIA H200", int(139.8 * 2**30), 989.5e12, "bf16", processes=1, processes_per_node=1)
    plan = json.loads(json.dumps(plan_for_run(config, machine)))
    assert plan["speed"]["tokens_per_s"] * plan["speed"]["step_s"] == pytest.approx(8 * config.model.seq_len)
    assert plan["memory"]["fits"]


def test_a_run_on_a_cpu_has_a_plan_too() -> None:
    config = load_config(None, ["model=mpt-tiny", "global_batch=8", "microbatch=4"]).config
    plan = plan_for_run(config, Machine("CPU", 24 * 2**30, 1e11, "fp32", processes=2, processes_per_node=2))
    assert plan["speed"]["step_s"] > 0
    assert plan["speed"]["mfu"] is None, "the peak of a CPU is not known"
    assert plan["layout"]["shard"] == 2


def test_planning_takes_milliseconds() -> None:
    config = load_config(None, ["model=llama-8b", "microbatch=1"]).config
    machine = Machine("NVIDIA H200", int(139.8 * 2**30), 989.5e12, "bf16", processes=8, processes_per_node=8)
    plan_for_run(config, machine)
    started = time.process_time()
    plan_for_run(config, machine)
    assert time.process_time() - started < 0.2


def test_plan_without_a_cluster_is_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=mpt-tiny", "model.vocab=512", "model.seq_len=64", "compute.device=cpu"]
    assert main(["plan", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["cluster"]["name"], answer["cluster"]["gpus"], answer["precision"]) == ("CPU", 1, "fp32")
    assert answer["speed"]["tokens_per_s"] > 0
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"next: keepstep train {' '.join(words)}"
    # There is no GPU, so nothing is counted per GPU. Llama 3's published run had some.
    assert [line for line in lines if "GPU" in line and "Llama 3" not in line] == []
    assert any(line.startswith("memory    GiB of host memory for the fullest process at the peak") for line in lines)


def test_plan_for_a_cluster_counts_by_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=mpt-125m", "--cluster", "h100:8"]) == 0
    text = capsys.readouterr().out
    assert "GiB on the fullest GPU at the peak" in text
    assert "GiB per GPU" in text


def test_plan_for_this_machine_needs_torch() -> None:
    answer = without_torch("model=mpt-125m")
    assert answer.returncode == 2
    assert "a plan for this machine needs torch" in answer.stderr
    assert "--cluster h100:8" in answer.stderr
