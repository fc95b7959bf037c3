"""Runs on a real Slurm: the losses of a disturbed run are those of an undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.launch.job import JobRecord, load_record
from keepstep.observe.run_folder import read_from, split_kinds
from tests.cluster.slurm_cluster import REPOSITORY, SlurmCluster

pytestmark = pytest.mark.slow

# Sixty-odd steps of a tenth of a second: long enough to disturb, short enough to wait for.
TINY = [
    "model=mpt-tiny", "model.vocab=512", "model.seq_len=32", "data=synthetic", "global_batch=4", "microbatch=2",
    "checkpoint.interval=5ba", "evaluate.at_end=false", "observe.tensorboard=false", "compute.device=cpu",
    "compute.threads=1",
]  # fmt: skip
PROFILE = (
    "gpus_per_node: 0\nprocesses_per_node: 1\nexclusive: false\ntime_limit: '30'\nnodes: 2\nwarn_before_end_s: 60\n"
)


@pytest.fixture(scope="session")
def steps() -> int:
    return 80


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory, steps: int) -> dict[int, float]:
    """Losses of the same run on this machine, undisturbed."""
    folder = tmp_path_factory.mktemp("local")
    words = ["train", "name=local", f"max_duration={steps}ba", *TINY, "--procs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "keepstep", *words], cwd=folder, env=environment, check=True, capture_output=True
    )
    return losses(folder / "runs" / "local")


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in split_kinds(read_from(run / "metrics.jsonl")[0])["train"]}


def kinds(run: Path) -> list[str]:
    return [line["kind"] for line in read_from(run / "events.jsonl")[0]]


def submit(
    cluster: SlurmCluster, folder: Path, name: str, steps: int, profile: str = PROFILE, nodes: int = 2, *more: str
) -> JobRecord:
    path = folder / "profile.yaml"
    path.write_text(profile)
    run = [f"name={name}", f"max_duration={steps}ba", *TINY, *more]
    words = ["train", *run, "--on", f"slurm:{path}", "-N", str(nodes)]
    assert name in cluster.keepstep(*words, cwd=folder)
    return load_record(folder / "runs", name)


def wait_step(cluster: SlurmCluster, run: Path, step: int) -> None:
    cluster.wait(lambda: max(losses(run), default=0) >= step, 120, f"step {step} of {run.name}")


def test_a_node_lost_during_the_run_costs_no_loss_value(
    rested: SlurmCluster, tmp_path: Path, expected: dict[int, float], steps: int
) -> None:
    record = submit(rested, tmp_path, "lost", steps)
    run = tmp_path / "runs" / "lost"
    wait_step(rested, run, 12)
    rested.set_node("n2", "down")
    job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}, 150, Path(record.log))
    assert job["JobState"] == "COMPLETED"
    assert job["Restarts"] == "1"
    assert "n2" not in job["NodeList"]
    assert "resume" in kinds(run)
    assert losses(run) == expected
    assert "finished" in rested.keepstep("jobs", cwd=tmp_path)
    assert "attempt 1" in rested.keepstep("logs", "lost", "--follow", cwd=tmp_path)


@pytest.mark.cluster
def test_replicas_survive_a_node_without_network_and_the_job_is_not_requeued(
    rested: SlurmCluster, tmp_path: Path
) -> None:
    steps, survive = 150, ["reproducible=elastic", "resilience.survive=true"]
    record = submit(rested, tmp_path, "survives", steps, f"{PROFILE}min_nodes: 1\n", 2, *survive)
    run = tmp_path / "runs" / "survives"
    wait_step(rested, run, 12)
    rested.cable("n2", up=False)
    job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}, 150, Path(record.log))
    assert job["JobState"] == "COMPLETED", Path(record.log).read_text()
    assert job["Restarts"] == "0"
    assert "KEEPSTEP_MIN_NODES=1\n" in Path(record.script).read_text()
    assert [kind for kind in kinds(run) if kind in ("left", "restart", "resume")] == ["left"]
    words = ["train", "name=alone", f"max_duration={steps}ba", *TINY, "reproducible=elastic"]
    rested.keepstep(*words, cwd=tmp_path)
    assert losses(run) == losses(tmp_path / "runs" / "alone")


@pytest.mark.cluster
def test_job_without_its_first_node_is_requeued_and_resumes(rested: SlurmCluster, tmp_path: Path) -> None:
    # The batch shell and the coordinator are on the first node. Slurm does not end the job: see --no-kill.
    steps, survive = 60, ["reproducible=elastic", "resilience.survive=true", "resilience.lease_s=5"]
    rested.environment["KEEPSTEP_WATCH_S"] = "1"
    record = submit(rested, tmp_path, "headless", steps, f"{PROFILE}min_nodes: 1\n", 2, *survive)
    run = tmp_path / "runs" / "headless"
    wait_step(rested, run, 12)
    first = rested.job(record.job_id)["BatchHost"]
    rested.lose(first)
    job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}, 150, Path(record.log))
    assert job["JobState"] == "COMPLETED", Path(record.log).read_text()
    assert job["Restarts"] == "1"
    assert f"lost its first node {first}" in Path(record.log).read_text()
    assert "resume" in kinds(run)
    words = ["train", "name=alone", f"max_duration={steps}ba", *TINY, "reproducible=elastic"]
    rested.keepstep(*words, cwd=tmp_path)
    assert losses(run) == losses(tmp_path / "runs" / "alone")


@pytest.mark.cluster
def test_stop_saves_and_resume_continues(
    rested: SlurmCluster, tmp_path: Path, expected: dict[int, float], steps: int
) -> None:
    record = submit(rested, tmp_path, "stopped", steps)
    run = tmp_path / "runs" / "stopped"
    wait_step(rested, run, 7)
    rested.keepstep("stop", "stopped", cwd=tmp_path)
    job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED", "PENDING", "CANCELLED"}, 60, Path(record.log))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "75:0")
    assert "stopped" in rested.keepstep("jobs", cwd=tmp_path)
    assert len(losses(run)) < steps
    rested.keepstep("resume", "stopped", cwd=tmp_path)
    again = load_record(tmp_path / "runs", "stopped")
    assert again.job_id != record.job_id
    assert rested.wait_state(again.job_id, {"COMPLETED", "FAILED"}, 90, Path(record.log))["JobState"] == "COMPLETED"
    assert losses(run) == expected


@pytest.mark.cluster
def test_the_warning_before_the_time_limit_saves_and_requeues(rested: SlurmCluster, tmp_path: Path) -> None:
    # Slurm looks at time limits every 30 s, and warns up to a minute early.
    profile = PROFILE.replace("'30'", "'4'").replace("warn_before_end_s: 60", "warn_before_end_s: 120")
    record = submit(rested, tmp_path, "limit", 100_000, profile)
    run = tmp_path / "runs" / "limit"
    wait_step(rested, run, 5)
    rested.wait(lambda: rested.job(record.job_id).get("Restarts") == "1", 150, "a requeue")
    assert "requeued" in Path(record.log).read_text()
    saved = max(losses(run))
    rested.wait(lambda: kinds(run).count("resume") == 1, 90, "the second attempt")
    resumed = next(line for line in read_from(run / "events.jsonl")[0] if line["kind"] == "resume")
    assert resumed["step"] == saved
    rested.keepstep("stop", "limit", "--now", cwd=tmp_path)
    assert rested.wait_state(record.job_id, {"CANCELLED", "FAILED"}, 60)["JobState"] == "CANCELLED"


@pytest.mark.cluster
def test_scancel_saves_and_is_not_requeued(rested: SlurmCluster, tmp_path: Path) -> None:
    record = submit(rested, tmp_path, "cancelled", 100_000)
    run = tmp_path / "runs" / "cancelled"
    wait_step(rested, run, 7)
    rested.run("scancel", record.job_id)
    assert rested.wait_state(record.job_id, {"CANCELLED", "PENDING", "FAILED"}, 60)["JobState"] == "CANCELLED"
    rested.wait(lambda: not rested.run("squeue", "-h"), 30, "an empty queue")
    assert "stop" in kinds(run)


@pytest.mark.cluster
def test_preempted_run_saves_and_resumes(
    rested: SlurmCluster, tmp_path: Path, expected: dict[int, float], steps: int
) -> None:
    record = submit(rested, tmp_path, "preempted", steps)
    run = tmp_path / "runs" / "preempted"
    wait_step(rested, run, 7)
    rested.run("sbatch", "-p", "urgent", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1", cwd=tmp_path)
    rested.wait(lambda: rested.job(record.job_id).get("Restarts") == "1", 60, "a requeue")
    assert rested.wait_state(record.job_id, {"COMPLETED", "FAILED"}, 120, Path(record.log))["JobState"] == "COMPLETED"
    assert losses(run) == expected


@pytest.mark.cluster
def test_a_pulled_cable_moves_the_run_to_other_nodes(
    rested: SlurmCluster, tmp_path: Path, expected: dict[int, float], steps: int
) -> None:
    record = submit(rested, tmp_path, "cable", steps)
    run = tmp_path / "runs" / "cable"
    wait_step(rested, run, 7)
    rested.cable("n2", up=False)
    job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED"}, 200, Path(record.log))
    assert job["JobState"] == "COMPLETED"
    assert "n2" not in job["NodeList"]
    assert losses(run) == expected


@pytest.mark.cluster
def test_jobs_on_the_same_nodes_use_different_ports(rested: SlurmCluster, tmp_path: Path) -> None:
    first = submit(rested, tmp_path, "one", 10)
    second = submit(rested, tmp_path, "two", 10)
    for record in (first, second):
        assert (
            rested.wait_state(record.job_id, {"COMPLETED", "FAILED"}, 120, Path(record.log))["JobState"] == "COMPLETED"
        )
    ends = [Path(record.log).read_text().split("rendezvous at ")[1].split()[0] for record in (first, second)]
    assert ends[0] != ends[1]


@pytest.mark.cluster
def test_a_node_with_failing_hardware_is_left_out_of_the_retry(rested: SlurmCluster, tmp_path: Path) -> None:
    # A launcher that finds broken hardware on n2 and nowhere else, in the place of keepstep itself.
    fake = tmp_path / "env" / "bin" / "keepstep"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        "#!/bin/sh\nsleep 2\n"
        '[ "$SLURMD_NODENAME" != n2 ] || { echo n2 >> "$KEEPSTEP_JOB_FOLDER/failed-nodes"; exit 5; }\n'
    )
    fake.chmod(0o755)
    record = submit(rested, tmp_path, "broken", 10, PROFILE + f"venv: {tmp_path}/env\n")
    rested.wait_state(record.job_id, {"FAILED"}, 60, Path(record.log))
    rested.wait(lambda: load_record(tmp_path / "runs", "broken").job_id != record.job_id, 30, "a new job")
    job = rested.wait_state(load_record(tmp_path / "runs", "broken").job_id, {"COMPLETED", "FAILED"}, 60)
    assert (job["JobState"], job["ExcNodeList"]) == ("COMPLETED", "n2")
    assert "hardware failed on n2" in Path(record.log).read_text()


@pytest.mark.cluster
def test_min_nodes_run_gets_all_free_nodes(rested: SlurmCluster, tmp_path: Path) -> None:
    profile = PROFILE + "min_nodes: 2\npartition: gpu\n"
    words = ["train", "max_duration=2ba", *TINY, "reproducible=elastic", "--on", f"slurm:{tmp_path}/profile.yaml"]
    (tmp_path / "profile.yaml").write_text(profile)
    try:
        for name, free in (("all", 3), ("fewer", 2)):
            if free == 2:
                rested.run("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
            rested.keepstep(*words, f"name={name}", "-N", "3", cwd=tmp_path)
            record = load_record(tmp_path / "runs", name)
            job = rested.wait_state(record.job_id, {"COMPLETED", "FAILED"}, 120, Path(record.log))
            assert job["JobState"] == "COMPLETED", Path(record.log).read_text()
            assert json.loads((tmp_path / "runs" / name / "facts.json").read_text())["world_size"] == free
    finally:
        rested.run("scontrol", "update", "nodename=n3", "state=resume", check=False)


@pytest.mark.cluster
def test_gpus_and_hostile_paths_pass_through_a_real_sbatch(rested: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / """a 'b' "c" $(touch pwned) %j;#d"""
    folder.mkdir()
    profile = "gpus_per_node: 2\nprocesses_per_node: 1\nnodes: 1\nvariables: {NOTE: \"x $(touch pwned) 'y'\"}\n"
    record = submit(rested, folder, "hostile", 2, profile, nodes=1)
    assert rested.wait_state(record.job_id, {"COMPLETED", "FAILED"}, 60, Path(record.log))["JobState"] == "COMPLETED"
    assert len(losses(folder / "runs" / "hostile")) == 2
    assert not list(tmp_path.rglob("pwned"))


def test_a_record_is_json_that_people_can_read(tmp_path: Path) -> None:
    record = JobRecord("a", "slurm", "p", "7", 2, 1.0)
    record.save(tmp_path / "a")
    assert json.loads((tmp_path / "a" / "job" / "job.json").read_text())["job_id"] == "7"
    assert load_record(tmp_path, "a") == record


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A few thousand documents, and a tokenizer that knows them."""
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "train.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]
    lines = (json.dumps({"text": " ".join(words[(i * k) % len(words)] for k in range(40))}) for i in range(6000))
    text.write_text("\n".join(lines) + "\n")
    tokenizer = folder / "tokenizer.json"
    command = ["data", "train-tokenizer", str(text), "--out", str(tokenizer), "--vocab", "400"]
    run_here(command, folder)
    return text, tokenizer


def run_here(words: list[str], cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cluster
def test_data_prepared_by_an_array_is_the_same_as_by_one_machine(
    rested: SlurmCluster, tmp_path: Path, environment: Path, corpus: tuple[Path, Path]
) -> None:
    text, tokenizer = corpus
    rested.environment |= {"SOURCE": str(text), "TOKENIZER": str(tokenizer), "SPLITS": "train", "CONCAT_TOKENS": "64"}
    words = ["sbatch", "--parsable", "-p", "gpu", "--array=0-2", str(REPOSITORY / "slurm/prepare_c4.sb")]
    job_id = rested.run(*words, f"venv:{environment}", str(tmp_path), "1", cwd=tmp_path).strip()
    rested.wait(lambda: not rested.run("squeue", "-h", "-j", job_id, check=False), 120, "the array")
    logs = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    alone = ["data", "build", str(text), "--out", str(tmp_path / "alone"), "--format", "mds", "--concat", "64"]
    run_here([*alone, "--tokenizer", str(tokenizer), "--eos", "<|endoftext|>", "--workers", "1"], tmp_path)
    assert content(tmp_path / "my-copy-c4" / "train") == content(tmp_path / "alone"), logs


def content(folder: Path) -> dict[str, bytes]:
    """The data itself: shards and their index."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.mds*") if path.is_file()} | {
        "index.json": (folder / "index.json").read_bytes()
    }


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `venv:` for the scripts in slurm/: bin/keepstep is this keepstep."""
    program = tmp_path_factory.mktemp("env") / "bin" / "keepstep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m keepstep "$@"\n')
    program.chmod(0o755)
    return program.parent.parent


@pytest.mark.cluster
def test_launch_sb_takes_every_flag_and_trains(rested: SlurmCluster, tmp_path: Path, environment: Path) -> None:
    updates = " ".join(
        [*(word for word in TINY if not word.startswith(("model=", "data=", "checkpoint"))), "max_duration=6ba"]
    )
    words = ["sbatch", "--parsable", "-N", "2", "-p", "gpu", "--gpus-per-node=0", str(REPOSITORY / "slurm/launch.sb")]
    words += ["-c", "mpt-tiny", "-i", f"venv:{environment}", "-d", "synthetic", "-m", "/data:/data", "-u", "1", "-S"]
    words += ["-s", "-I", "2", "-N", "5", "-F", str(tmp_path / "checkpoints"), "-y", updates]
    rested.environment |= {"KEEPSTEP_PROCESSES": "1", "KEEPSTEP_ENVIRONMENT": "none"}
    job_id = rested.run(*words, cwd=tmp_path).strip()
    log = tmp_path / f"keepstep_{job_id}.out"
    assert rested.wait_state(job_id, {"COMPLETED", "FAILED"}, 90)["JobState"] == "COMPLETED", log.read_text()
    run = f"keepstep-{job_id}"
    assert len(losses(tmp_path / "runs" / run)) == 6
    assert {path.name for path in (tmp_path / "checkpoints" / run).glob("step_*")} >= {"step_00000002", "step_00000006"}


@pytest.mark.cluster
def test_launch_sb_retry_excludes_failed_node(rested: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "slurm" / "launch.sb").write_text((REPOSITORY / "slurm/launch.sb").read_text())
    (tmp_path / "recipes" / "mine.yaml").write_text("model: mpt-tiny\n")
    program = tmp_path / "env" / "bin" / "keepstep"
    program.parent.mkdir(parents=True)
    # A launcher that writes down what it is to do, and finds broken hardware on n2 and nowhere else.
    program.write_text(
        f'#!/bin/sh\necho "$*" > {tmp_path}/words-$SLURM_JOB_ID-$SLURMD_NODENAME; sleep 1\n'
        '[ "$SLURMD_NODENAME" != n2 ] || { echo n2 >> "$KEEPSTEP_JOB_FOLDER/failed-nodes"; exit 5; }\n'
    )
    program.chmod(0o755)
    words = [
        "sbatch",
        "--parsable",
        "-N",
        "2",
        "-p",
        "urgent",
        "-t",
        "7",
        "-w",
        "n2",
        "--gpus-per-node=1",
        "-J",
        "my job",
    ]
    words += [str(tmp_path / "slurm" / "launch.sb"), "-c", "mine", "-i", f"venv:{tmp_path}/env", "-d", "a b"]
    first = rested.run(*words, cwd=tmp_path).strip()
    log = tmp_path / f"my job_{first}.out"
    rested.wait_state(first, {"FAILED", "COMPLETED"}, 60)
    assert "continues without them" in log.read_text()
    second = log.read_text().split("hardware failed on n2; job ")[1].split()[0]
    assert rested.wait_state(second, {"FAILED", "COMPLETED"}, 60)["JobState"] == "COMPLETED"
    before, after = rested.job(first), rested.job(second)
    kept = ("NumNodes", "Partition", "TimeLimit", "TresPerNode", "JobName")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    told = {path.read_text() for path in tmp_path.glob("words-*")}
    assert len(told) == 1, "every node of both jobs trains the same recipe"


@pytest.mark.cluster
def test_array_task_requeues_itself_only(rested: SlurmCluster, tmp_path: Path) -> None:
    program = tmp_path / "env" / "bin" / "keepstep"
    program.parent.mkdir(parents=True)
    # The task that has the array's own number saves once both run, as before a time limit; the other goes on.
    program.write_text(
        f"#!/bin/sh\nmark={tmp_path}/started-$SLURM_ARRAY_TASK_ID\n"
        "echo $SLURM_RESTART_COUNT. >> $mark\n"
        f"until [ -e {tmp_path}/started-0 ] && [ -e {tmp_path}/started-1 ]; do sleep 0.1; done\n"
        'if [ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ]; then sleep 300; fi\n'
        '[ -n "$SLURM_RESTART_COUNT" ] || touch "$KEEPSTEP_JOB_FOLDER/saved"\n'
    )
    program.chmod(0o755)
    words = ["sbatch", "--parsable", "--array=0-1", "-N", "1", "--gpus-per-node=0", "-o", str(tmp_path / "%a.out")]
    words += [str(REPOSITORY / "slurm/launch.sb"), "-c", "mpt-tiny", "-i", f"venv:{tmp_path}/env", "-d", "synthetic"]
    array = rested.run(*words, cwd=tmp_path).strip()

    def logs() -> list[str]:
        return [path.read_text() for path in sorted(tmp_path.glob("*.out"))]

    # The one that saved has ended well in its second attempt.
    rested.wait(lambda: any("attempt 1 ended with 0" in text for text in logs()), 90, "the second attempt")
    told = logs()
    rested.run("scancel", array, check=False)
    assert sum("saved; requeued" in text for text in told) == 1, told
    assert sorted(len((tmp_path / f"started-{task}").read_text().split()) for task in (0, 1)) == [1, 2], told
