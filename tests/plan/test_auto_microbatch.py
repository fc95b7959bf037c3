"""`microbatch: auto`: how many rows the plan chooses, and which rules they obey. No GPU is needed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keepstep.cli.main import main
from keepstep.config.dump import dump_config
from keepstep.config.layout import check_layout, microbatch_choices
from keepstep.config.load import load_config
from keepstep.config.reference import json_schema
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError
from keepstep.launch.foundry import translate
from keepstep.plan.capacity import ENOUGH_SPEED, ENOUGH_TOKENS, FEW_ROWS, microbatch_on
from keepstep.plan.cluster import Machine
from keepstep.plan.memory import plan_memory
from keepstep.plan.search import MARGIN

GIB = 2**30
H100 = Machine("NVIDIA H100 80GB HBM3", int(79.1 * GIB), 989.5e12, "bf16", processes=1, processes_per_node=1)
CPU_MACHINE = Machine("CPU", 64 * GIB, 1e11, "fp32", processes=1, processes_per_node=1)
LLAMA_1B = "model=llama-1b model.seq_len=4096 global_batch=64 microbatch=auto"
LLAMA_8B = "model=llama-8b model.seq_len=4096 global_batch=64 microbatch=auto compute.recompute=auto lora.rank=16"


def configured(words: str) -> RunConfig:
    return load_config(None, words.split()).config


def rows_on(words: str, machine: Machine = H100, host_bytes: int = 0) -> int:
    return microbatch_on(configured(words), machine, host_bytes)[0].microbatch


def test_auto_is_as_fast_as_any_that_fit() -> None:
    config = configured(LLAMA_8B)
    planned = {rows: microbatch_on(replace(config, microbatch=rows), H100) for rows in (1, 2, 4, 8, 16, 32, 64)}
    limit = (1 - MARGIN) * H100.memory_bytes
    step_s = {rows: seconds for rows, (work, seconds) in planned.items() if plan_memory(work).needed <= limit}
    # Two rows need no recomputation. More do, and one has few tokens.
    assert step_s[2] == min(step_s.values()) < ENOUGH_SPEED * step_s[4]
    assert rows_on(LLAMA_8B) == 2


def test_auto_takes_no_more_rows_than_make_enough_tokens() -> None:
    assert rows_on(LLAMA_1B) * 4096 == ENOUGH_TOKENS
    assert rows_on(LLAMA_1B.replace("4096", "256")) * 256 == ENOUGH_TOKENS


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_auto_of_a_small_model_keeps_the_gpu_busy(compiled: str) -> None:
    words = f"model=smollm-135m global_batch=64 microbatch=auto compute.compile={compiled}"
    work, _ = microbatch_on(configured(words), H100)
    # Eight rows have enough tokens, but the host starts their kernels more slowly than a GPU computes them.
    assert work.tokens_per_microbatch > 2 * ENOUGH_TOKENS


def test_auto_uses_what_memory_there_is() -> None:
    sizes = [rows_on(LLAMA_1B, replace(H100, memory_bytes=size * GIB)) for size in (24, 40, 140)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_auto_is_the_fewest_rows_where_nothing_fits() -> None:
    assert rows_on(LLAMA_1B, replace(H100, memory_bytes=4 * GIB)) == 1


def test_auto_respects_host_memory_of_offloaded_activations() -> None:
    words = f"{LLAMA_1B} compute.offload_activations=true compute.recompute=none"
    much, little = (rows_on(words, host_bytes=size * GIB) for size in (2000, 24))
    assert little < much


def test_auto_on_a_cpu_has_at_most_eight_rows_that_fit() -> None:
    tiny = "model=mpt-tiny microbatch=auto global_batch=24"
    assert rows_on(tiny, CPU_MACHINE) == FEW_ROWS
    assert rows_on(LLAMA_1B, replace(CPU_MACHINE, memory_bytes=32 * GIB)) < FEW_ROWS


@pytest.mark.parametrize("mode", ["reproducible=elastic", "resilience.survive=true"])
@pytest.mark.parametrize("machine", [H100, CPU_MACHINE])
def test_auto_leaves_no_process_without_rows(mode: str, machine: Machine) -> None:
    words = f"model=mpt-tiny microbatch=auto global_batch=8 {mode}"
    assert rows_on(words, replace(machine, processes=4, processes_per_node=4)) == 2


@pytest.mark.parametrize(
    ("words", "processes", "choices"),
    [
        ("global_batch=24", 1, [1, 2, 3, 4, 6, 8, 12, 24]),
        ("global_batch=24", 4, [1, 2, 3, 6]),
        ("global_batch=24 reproducible=elastic", 5, [1, 2, 3, 4, 6, 8, 12, 24]),
        ("global_batch=24 parallel.pipeline=2", 4, [1, 2, 3, 4, 6]),
        ("global_batch=24 parallel.pipeline=4 parallel.schedule=zero_bubble", 4, [1, 2, 3, 6]),
        ("global_batch=48 rl.method=grpo rl.num_generations=8 data=toolcalls", 2, [8, 24]),
    ],
)
def test_choices_obey_the_rules(words: str, processes: int, choices: list[int]) -> None:
    config = configured(f"model=llama-1b model.layers=4 microbatch=auto {words}")
    assert microbatch_choices(config, processes) == choices
    assert check_layout(config, processes).world_size == processes


def test_batch_that_no_number_divides_is_an_error_with_values() -> None:
    with pytest.raises(ConfigError, match="global_batch is 10, but it must be a multiple") as found:
        check_layout(configured("model=mpt-tiny global_batch=10 microbatch=auto"), 4)
    assert "global_batch=8 or 12" in str(found.value.hint)


def test_groups_that_the_batch_does_not_hold_are_an_error() -> None:
    words = "global_batch=12 microbatch=auto rl.method=grpo rl.num_generations=8 data=toolcalls"
    with pytest.raises(ConfigError, match="microbatch is 'auto', but it must be a multiple") as found:
        configured(words)
    assert any(problem.hint == "global_batch=8 or 16" for problem in found.value.problems)


def test_auto_is_read_shown_and_translated() -> None:
    config = configured("microbatch=auto")
    assert not config.microbatch
    assert "\nmicrobatch: auto\n" in dump_config(config)
    assert translate(["device_train_microbatch_size=auto"]) == ["microbatch=auto"]
    integer, word = json_schema()["properties"]["microbatch"]["anyOf"][0]["anyOf"]
    assert (integer["exclusiveMinimum"], word) == (0, {"const": "auto"})
    with pytest.raises(ConfigError, match="microbatch is 'fast', but it must be a whole number, or auto"):
        configured("microbatch=fast")
    with pytest.raises(ConfigError, match="'atuo', but it must be true or false, or auto") as found:
        configured("compute.compile=atuo")
    assert found.value.problems[0].hint == "did you mean auto?"


def test_plan_shows_what_the_run_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LLAMA_1B.split(), "--cluster", "h100:1"]
    assert main(["plan", *words]) == 0
    rows = rows_on(LLAMA_1B)
    assert f"{64 // rows} micro batches of {rows} (auto) per process" in capsys.readouterr().out
    assert main(["plan", *words, "--json", "--search"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["microbatch"] == rows


@pytest.mark.slow
def test_plan_chooses_a_layout_around_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama-70b", "microbatch=auto", "--cluster", "azure-nd-h100-v5:8", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert any(word.startswith("microbatch=") for word in chosen) == bool(chosen)
