"""What a job's script does when the run ends, with Slurm's commands simulated by small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.errors import HardwareError, UsageError
from keepstep.launch import slurm
from keepstep.launch.job import Job, JobRecord, Target
from keepstep.launch.profile_kinds import SlurmProfile
from keepstep.launch.submit import ReportJob, run_report_job, submit, training_job
from tests.launch.manifests import REPOSITORY
from tests.patience import PATIENCE_S


class SimulatedSlurm:
    """A job folder and a PATH on which Slurm's commands only write down how they were called."""

    def __init__(self, folder: Path, *, excluded: str = "(null)") -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.calls = folder / "calls"
        self.program("squeue", "echo RUNNING")
        self.program("sbatch", "echo 8")
        self.program(
            "scontrol",
            'case "$*" in'
            ' "show hostnames"*) printf "n1\\nn2\\n" ;;'
            f' *"show job"*) echo "JobId=7 ReqNodeList=(null) ExcNodeList={excluded} NodeList=n[1-2]" ;;'
            " esac",
        )
        self.job = Job("run", ("train", "run.yaml"), folder / "runs" / "run", 2, working_dir=folder)

    def program(self, name: str, body: str) -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.calls}\n{body}\n')
        path.chmod(0o755)

    @property
    def job_folder(self) -> Path:
        return self.job.folder / "job"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "KEEPSTEP_ASK_S": "0"}
        return {**os.environ, "PATH": path, **job}

    def run(self, profile: SlurmProfile | None = None) -> int:
        self.job_folder.mkdir(parents=True, exist_ok=True)
        script = self.job_folder / "job.sbatch"
        script.write_text(slurm.render(self.job, profile or SlurmProfile()))
        return subprocess.run(["bash", str(script)], env=self.environment, timeout=PATIENCE_S).returncode

    def submitted(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("sbatch")]


def test_batch_retry_excludes_failed_and_previously_excluded_nodes(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path, excluded="n7,n9")
    simulated.program("srun", f"echo n2 > {simulated.job_folder}/failed-nodes; exit 5")
    assert simulated.run(SlurmProfile(exclude=("n7", "n9"))) == 5
    assert [line.split()[2] for line in simulated.submitted()] == ["--exclude=n2,n7,n9"]


def test_batch_retry_excludes_only_failed_nodes(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f"echo n2 > {simulated.job_folder}/failed-nodes; exit 5")
    assert simulated.run() == 5
    assert [line.split()[2] for line in simulated.submitted()] == ["--exclude=n2"]


@pytest.mark.parametrize(
    ("survives", "mark", "code"),
    [(True, "done", 0), (True, "saved", 75), (True, "other", 1), (False, "done", 1), (False, "saved", 1)],
)
def test_batch_run_that_survived_a_lost_node_is_done(tmp_path: Path, survives: bool, mark: str, code: int) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.job = replace(simulated.job, survives=survives)
    simulated.program("srun", f"touch {simulated.job_folder}/{mark}; exit 1")
    assert simulated.run() == code
    (line,) = [line for line in simulated.calls.read_text().splitlines() if "launch node" in line]
    # The last one counts.
    assert [word for word in line.split() if "kill" in word] == [
        "--kill-on-bad-exit=1", *(["--no-kill", "--kill-on-bad-exit=0"] if survives else [])
    ]  # fmt: skip
    assert ("\n#SBATCH --no-kill\n" in (simulated.job_folder / "job.sbatch").read_text()) is survives


@pytest.mark.parametrize(
    ("left", "marks", "restarts", "called"),
    [
        ("n2", [], "0", "scontrol requeue 7"),
        ("n2", ["stop"], "0", "scancel 7"),
        ("n2", [], "1000", "scancel 7"),
        ("n1 n2", [], "0", ""),
    ],
)
@pytest.mark.slow
def test_batch_other_nodes_requeue_a_job_without_its_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, marks: list[str], restarts: str, called: str
) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.job = replace(simulated.job, survives=True)
    monkeypatch.setenv("KEEPSTEP_WATCH_S", "0.05")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    simulated.program("squeue", 'case "$*" in *%N*) echo RUNNING LEFT ;; *) echo CANCELLED ;; esac')
    simulated.program(
        "scontrol",
        f'case "$*" in "show hostnames LEFT") printf "%s\\n" {left} ;; "show hostnames"*) printf "n1\\nn2\\n" ;; esac',
    )
    simulated.program("scancel", "")
    done = f"grep -qE '^(scontrol requeue|scancel)' {simulated.calls}"
    # The watch runs here and now; training takes until it has acted, or a second.
    training = f"for _ in $(seq 20); do {done} && break; sleep 0.05; done; exit 1"
    simulated.program(
        "srun", f'case "$*" in *--overlap*) while [ "$1" != bash ]; do shift; done; exec "$@" ;; esac; {training}'
    )
    simulated.job_folder.mkdir(parents=True)
    for mark in marks:
        (simulated.job_folder / mark).touch()
    simulated.run()
    calls = simulated.calls.read_text().splitlines()
    assert {call for call in calls if call.startswith(("scontrol requeue", "scancel"))} == (
        {called} if called else set()
    )
    (watcher,) = [call for call in calls if "--overlap" in call]
    assert "--nodelist=n2 " in watcher


@pytest.mark.parametrize(("nodes", "survives"), [(1, False), (2, True)])
def test_job_of_several_nodes_survives_if_its_replicas_do(nodes: int, survives: bool) -> None:
    config = load_config(None, ["data=synthetic", "reproducible=elastic", "resilience.survive=true"]).config
    job = training_job(Target("slurm"), SlurmProfile(), None, [], config, nodes)
    assert job.survives is survives


@pytest.mark.parametrize(("node", "code", "marked"), [("0", 0, True), ("1", 0, False), ("0", 1, False)])
def test_first_node_reports_a_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, code: int, marked: bool
) -> None:
    monkeypatch.setenv("SLURM_NODEID", node)
    assert slurm.record_exit(tmp_path, code) == code
    assert (tmp_path / "done").exists() is marked


def test_batch_stopped_run_is_not_resubmitted_after_hardware_failure(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program(
        "srun", f"touch {simulated.job_folder}/stop; echo n2 > {simulated.job_folder}/failed-nodes; exit 5"
    )
    assert simulated.run() == 5
    assert not simulated.submitted()


def test_batch_stop_before_nodes_start_counts(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    # The step starts after the stop was asked for, so that the signal has nobody to reach.
    node = f"{sys.executable} -m keepstep launch node --nodes 1 -- doctor --probe"
    simulated.program("srun", f"KEEPSTEP_JOB_FOLDER={simulated.job_folder} {node}")
    simulated.job_folder.mkdir(parents=True)
    (simulated.job_folder / "stop").touch()
    assert simulated.run() == 75
    assert "requeue" not in simulated.calls.read_text()


AWAY = 'echo "error: Unable to contact slurm controller (connect failure)" >&2; exit 1'


def fails_twice(simulated: SimulatedSlurm, name: str) -> str:
    """The start of a program that is of no use the first two times."""
    return f'[ "$(grep -c "^{name}" {simulated.calls})" -gt 2 ] || {{ {AWAY}; }}'


def test_batch_requeues_saved_run_when_controller_returns(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f"touch {simulated.job_folder}/saved")
    simulated.program(
        "squeue", f"{fails_twice(simulated, 'squeue')}; echo 'squeue: warning: old configuration' >&2; echo RUNNING"
    )
    simulated.program(
        "scontrol", f'case "$*" in *hostnames*) echo n1 ;; *) {fails_twice(simulated, "scontrol requeue")} ;; esac'
    )
    assert simulated.run() == 75
    asked = [
        line for line in simulated.calls.read_text().splitlines() if line.startswith(("squeue", "scontrol requeue"))
    ]
    assert asked == ["squeue -h -j 7 -o %T"] * 3 + ["scontrol requeue 7"] * 3


def test_batch_forgotten_job_asks_once_and_ends(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f"touch {simulated.job_folder}/saved")
    simulated.program("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert simulated.run() == 75
    assert simulated.calls.read_text().count("squeue") == 1
    assert "requeue" not in simulated.calls.read_text()


def test_batch_says_why_saved_run_is_not_requeued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f"touch {simulated.job_folder}/saved")
    assert simulated.run(SlurmProfile(max_requeues=0)) == 75
    assert "not requeued, because the job has restarted 0 times (max_requeues is 0)" in capfd.readouterr().out


def test_resume_keeps_nodes_excluded_by_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("scontrol", "")
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    record = submit(simulated.job, SlurmProfile(exclude=("n7", "n[9-11]")), Target("slurm", "p"))
    (simulated.job_folder / "stop").touch()
    assert slurm.resume(record, ["n3"]) == "8"
    assert simulated.submitted()[-1].split()[2] == "--exclude=n3,n7,n[9-11]"
    assert not (simulated.job_folder / "stop").exists(), "a job that is submitted again is wanted again"
    slurm.resume(record)
    assert "--exclude" not in simulated.submitted()[-1], "the script itself names them"


def test_state_unreachable_differs_from_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    record = JobRecord("run", "slurm", "p", "7", 2, 1.0, script=str(simulated.job_folder / "job.sbatch"))
    record.save(simulated.job.folder)
    simulated.program("scontrol", 'echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1')
    assert slurm.state(record) == "unreachable"
    with pytest.raises(HardwareError, match="does not answer"):
        slurm.resume(record)
    with pytest.raises(HardwareError, match="does not answer"):
        submit(simulated.job, SlurmProfile(), Target("slurm", "p"))
    assert not [line for line in simulated.calls.read_text().splitlines() if line.startswith("sbatch")]
    simulated.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.state(record) == ""


def test_stop_reports_that_nothing_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    simulated.job_folder.mkdir(parents=True)
    record = JobRecord("run", "slurm", "p", "7", 2, 1.0, script=str(simulated.job_folder / "job.sbatch"))
    simulated.program("scontrol", 'echo "JobId=7 JobState=COMPLETED ExitCode=0:0"')
    with pytest.raises(UsageError, match="is not running: finished"):
        slurm.stop(record, immediately=False)
    assert not (simulated.job_folder / "stop").exists()


def test_staged_image_is_the_jobs_own(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    # Copies as asked to, and shows which image the container would have been made from.
    simulated.program(
        "srun",
        '[ "$2" != bash ] || { shift; exec "$@"; }\n'
        f'for word in "$@"; do case $word in --container-image=*) cat "${{word#*=}}" > {tmp_path}/ran ;; esac; done',
    )
    disk = tmp_path / "a disk"

    def ran(image: Path) -> str:
        assert simulated.run(SlurmProfile(image=str(image), stage_image=str(disk))) == 0
        return (tmp_path / "ran").read_text()

    def write(name: str, text: str, at: int) -> Path:
        path = tmp_path / name / "keep step.sqsh"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (at, at))
        return path

    mine, other = write("mine", "mine", 1_000), write("other", "other", 1_000)
    assert ran(mine) == "mine"
    assert ran(other) == "other", "the same name in another folder"
    assert ran(mine) == "mine"
    write("mine", "built before", 500)
    assert ran(mine) == "built before", "an older image that came back, or a storage whose clock is behind"
    copies = sorted(disk.iterdir())
    assert len(copies) == 2
    kept = copies[0].stat().st_ino, copies[1].stat().st_ino
    (disk / f"{copies[0].name}.part").write_text("cut short")
    assert (ran(mine), ran(other)) == ("built before", "other")
    assert kept == (copies[0].stat().st_ino, copies[1].stat().st_ino), "what is there is not copied again"
    write("mine", "built again", 2_000)
    write("other", "built again as well", 2_000)
    assert (ran(mine), ran(other)) == ("built again", "built again as well")
    assert sorted(disk.iterdir()) == copies, "a copy that was cut short is not left behind"


@pytest.mark.parametrize(
    ("name", "word"),
    [("STOPPED", "waiting"), ("SIGNALING", "running"), ("RESIZING", "running"), ("SPECIAL_EXIT", "waiting"),
     ("REQUEUE_HOLD", "waiting"), ("STAGE_OUT", "ending")],
)  # fmt: skip
def test_state_held_job_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str) -> None:
    simulated = SimulatedSlurm(tmp_path)
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    record = submit(simulated.job, SlurmProfile(), Target("slurm", "p"))
    simulated.program("scontrol", f'echo "JobId=7 JobState={name} ExitCode=0:0"')
    assert slurm.state(record) == word
    with pytest.raises(UsageError, match=f"is {word} as job"):
        slurm.resume(record)
    with pytest.raises(UsageError, match=f"is {word} as"):
        submit(simulated.job, SlurmProfile(), Target("slurm", "p"))
    assert len(simulated.submitted()) == 1


def test_exclude_accepts_every_slurm_node_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("scontrol", 'case "$*" in *hostnames*) printf "n1\\nn2\\nn3\\n" ;; esac')
    simulated.program("sinfo", 'printf "n1 gpu*\\nn2 gpu*\\nn3 gpu*\\nn4 gpu*\\n"')
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    monkeypatch.chdir(tmp_path)
    submit(simulated.job, SlurmProfile(), Target("slurm", "p"))
    assert main(["resume", "run", "--exclude", "n[1-3,7],m[1-3,7],k1"]) == 0
    assert simulated.submitted()[-1].split()[2] == "--exclude=n[1-3,7],m[1-3,7],k1"
    assert slurm.idle_nodes(SlurmProfile(exclude=("n[1-3]",))) == ["n4"]


def test_report_job_waits_for_complete_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    log = slurm.log_path(simulated.job.folder)
    simulated.program("sbatch", f"printf 'measuring\\nkeepstep-report [{{\"node\": ' > {log}; echo 8")
    # Asked how the job stands for the second time, the rest has been written.
    rest = f"""[ "$(grep -c "show job" {simulated.calls})" -ne 2 ] || printf '"n1"}}]\\n' >> {log}"""
    simulated.program("scontrol", f'{rest}; echo "JobId=8 JobState=RUNNING ExitCode=0:0"')
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    assert run_report_job(ReportJob(simulated.job, SlurmProfile(), Target("slurm")), 600) == [{"node": "n1"}]


@pytest.mark.parametrize("program", ["squeue", "scancel"])
def test_stop_that_failed_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    simulated = SimulatedSlurm(tmp_path)
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    record = submit(simulated.job, SlurmProfile(), Target("slurm", "p"))
    simulated.program("scontrol", 'echo "JobId=7 JobState=RUNNING ExitCode=0:0"')
    simulated.program("scancel", "")
    simulated.program(program, AWAY)
    with pytest.raises(HardwareError, match="Unable to contact"):
        slurm.stop(record, immediately=False)
    assert not (simulated.job_folder / "stop").exists()


def test_record_exit_survives_unwritable_folder(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    # What a disk that is full or read-only does to the mark, for one user who may do everything as well.
    away = tmp_path / "away"
    program = (
        "from pathlib import Path; from keepstep.launch.slurm import record_exit; "
        f"exit(record_exit(Path('{away}'), 75))"
    )
    simulated.program("srun", f'{sys.executable} -c "{program}"')
    assert simulated.run() == 75
    assert "scontrol requeue 7" in simulated.calls.read_text()


def test_report_job_interrupted_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    # Waiting, and somebody loses patience.
    first = f'[ "$(grep -c "show job" {simulated.calls})" -gt 1 ] || kill -INT {os.getpid()}'
    simulated.program("scontrol", f'{first}; echo "JobId=8 JobState=PENDING ExitCode=0:0"')
    simulated.program("squeue", "echo PENDING")
    simulated.program("scancel", "")
    monkeypatch.setenv("PATH", simulated.environment["PATH"])
    with pytest.raises(KeyboardInterrupt):
        run_report_job(ReportJob(simulated.job, SlurmProfile(), Target("slurm")), 600)
    assert "scancel 8" in simulated.calls.read_text().splitlines()


def test_squash_replaces_image_only_when_complete(tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    image = tmp_path / "keepstep.sqsh"
    image.write_text("old")
    simulated.program("stat", "echo lustre")
    simulated.program("lfs", 'touch "${!#}"')
    command = ["bash", str(REPOSITORY / "slurm/squash"), "keepstep:0.1.0", str(image)]
    simulated.program("enroot", 'echo half > "$3"; exit 1')
    assert subprocess.run(command, env=simulated.environment, capture_output=True, timeout=PATIENCE_S).returncode == 1
    assert image.read_text() == "old"
    simulated.program("enroot", f'[ ! -e "$3" ] && [ "$(cat {image})" = old ] && echo new > "$3"')
    subprocess.run(command, env=simulated.environment, capture_output=True, timeout=PATIENCE_S, check=True)
    assert image.read_text() == "new\n"
    assert [path.name for path in tmp_path.glob("keepstep.sqsh*")] == ["keepstep.sqsh"]


def mounts_of(simulated: SimulatedSlurm) -> str:
    (line,) = [line for line in simulated.calls.read_text().splitlines() if line.startswith("srun")]
    return next(word for word in line.split() if word.startswith("--container-mounts="))


@pytest.mark.parametrize("has_parts", [True, False])
def test_container_gets_the_nodes_topology_and_sharp(
    has_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f'echo "$LD_LIBRARY_PATH" > {tmp_path}/libraries')
    topology, plugin, library = (tmp_path / name for name in ("topo.xml", "plugin", "library"))
    if has_parts:
        topology.touch()
        plugin.mkdir()
        library.mkdir()
    monkeypatch.setenv("KEEPSTEP_SHARP_PLUGIN", str(plugin))
    monkeypatch.setenv("KEEPSTEP_SHARP_LIBRARY", str(library))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/lib")
    variables = {"NCCL_TOPO_FILE": str(topology)}
    profile = SlurmProfile(image="/a.sqsh", mounts=("/data:/data",), sharp=True, variables=variables)
    assert simulated.run(profile) == 0
    added = f",{topology}:{topology},{plugin}:/usr/local/nccl-rdma-sharp-plugins,{library}:/opt/mellanox/sharp"
    mounts = mounts_of(simulated)
    assert mounts.startswith("--container-mounts=/data:/data,")
    assert mounts.endswith(added) == has_parts
    assert (str(plugin) in mounts) == has_parts
    assert (tmp_path / "libraries").read_text() == f"{plugin}/lib:{library}/lib:/site/lib\n"


def test_container_gets_no_sharp_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("srun", f'echo "${{LD_LIBRARY_PATH-none}}" > {tmp_path}/libraries')
    monkeypatch.setenv("KEEPSTEP_SHARP_PLUGIN", str(tmp_path))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert simulated.run(SlurmProfile(image="/a.sqsh")) == 0
    assert "nccl-rdma-sharp-plugins" not in mounts_of(simulated)
    assert (tmp_path / "libraries").read_text() == "none\n"


@pytest.mark.parametrize(
    ("words", "code", "called"),
    [
        ([], 0, ["-pm 1", "-lgc 1980", "-ac 2619,1980"]),
        (["1830", "3201"], 0, ["-pm 1", "-lgc 1830", "-ac 3201,1830"]),
        (["1980", "1"], 2, ["-pm 1", "-lgc 1980", "-ac 1,1980"]),
        (["reset"], 0, ["-rgc", "-rac"]),
        (["fast"], 2, []),
    ],
)
def test_pin_clocks_sets_gpu_and_memory(words: list[str], code: int, called: list[str], tmp_path: Path) -> None:
    simulated = SimulatedSlurm(tmp_path)
    simulated.program("nvidia-smi", '[ "$2" != 1,1980 ]')
    simulated.calls.touch()
    command = ["bash", str(REPOSITORY / "slurm/pin-clocks"), *words]
    done = subprocess.run(command, env=simulated.environment, capture_output=True, text=True)
    assert done.returncode == code
    assert simulated.calls.read_text().splitlines() == [f"nvidia-smi {call}" for call in called]
    assert ("hint: pin-clocks" in done.stderr) == (code == 2)
