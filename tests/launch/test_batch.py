"""What a job's script does when the run ends, with Slurm's commands played by small scripts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from manifests import REPOSITORY

from keepstep.cli import doctor
from keepstep.cli.main import main
from keepstep.core.errors import HardwareError, UsageError
from keepstep.launch import slurm
from keepstep.launch.job import Job, JobRecord, Target
from keepstep.launch.profiles import SlurmProfile
from keepstep.launch.submit import submit


class Played:
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
        return subprocess.run(["bash", str(script)], env=self.environment, timeout=60).returncode

    def submitted(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("sbatch")]


def test_a_retry_without_failed_nodes_still_does_without_those_that_were_left_out_before(tmp_path: Path) -> None:
    played = Played(tmp_path, excluded="n7,n9")
    played.program("srun", f"echo n2 > {played.job_folder}/failed-nodes; exit 5")
    assert played.run(SlurmProfile(exclude=("n7", "n9"))) == 5
    assert [line.split()[2] for line in played.submitted()] == ["--exclude=n2,n7,n9"]


def test_a_retry_names_only_the_failed_nodes_where_no_others_were_left_out(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.program("srun", f"echo n2 > {played.job_folder}/failed-nodes; exit 5")
    assert played.run() == 5
    assert [line.split()[2] for line in played.submitted()] == ["--exclude=n2"]


def test_a_run_that_somebody_stopped_is_not_submitted_again_when_its_hardware_fails(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.program("srun", f"touch {played.job_folder}/stop; echo n2 > {played.job_folder}/failed-nodes; exit 5")
    assert played.run() == 5
    assert not played.submitted()


def test_a_stop_that_comes_before_the_nodes_have_started_counts(tmp_path: Path) -> None:
    played = Played(tmp_path)
    # The step starts after the stop was asked for, so that the signal has nobody to reach.
    node = f"{sys.executable} -m keepstep launch node --nodes 1 -- doctor --probe"
    played.program("srun", f"KEEPSTEP_JOB_FOLDER={played.job_folder} {node}")
    played.job_folder.mkdir(parents=True)
    (played.job_folder / "stop").touch()
    assert played.run() == 75
    assert "requeue" not in played.calls.read_text()


AWAY = 'echo "error: Unable to contact slurm controller (connect failure)" >&2; exit 1'


def fails_twice(played: Played, name: str) -> str:
    """The start of a program that is of no use the first two times."""
    return f'[ "$(grep -c "^{name}" {played.calls})" -gt 2 ] || {{ {AWAY}; }}'


def test_a_saved_run_is_requeued_though_the_controller_is_away_for_a_while(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.program("srun", f"touch {played.job_folder}/saved")
    played.program(
        "squeue", f"{fails_twice(played, 'squeue')}; echo 'squeue: warning: old configuration' >&2; echo RUNNING"
    )
    played.program(
        "scontrol", f'case "$*" in *hostnames*) echo n1 ;; *) {fails_twice(played, "scontrol requeue")} ;; esac'
    )
    assert played.run() == 75
    asked = [line for line in played.calls.read_text().splitlines() if line.startswith(("squeue", "scontrol requeue"))]
    assert asked == ["squeue -h -j 7 -o %T"] * 3 + ["scontrol requeue 7"] * 3


def test_a_job_that_slurm_does_not_know_any_more_asks_once_and_ends(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.program("srun", f"touch {played.job_folder}/saved")
    played.program("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert played.run() == 75
    assert played.calls.read_text().count("squeue") == 1
    assert "requeue" not in played.calls.read_text()


def test_a_saved_run_that_is_not_requeued_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    played = Played(tmp_path)
    played.program("srun", f"touch {played.job_folder}/saved")
    assert played.run(SlurmProfile(max_requeues=0)) == 75
    assert "not requeued, for the job has started again 0 times (max_requeues is 0)" in capfd.readouterr().out


def test_resume_without_a_node_keeps_the_profile_s_own_nodes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path)
    played.program("scontrol", "")
    monkeypatch.setenv("PATH", played.environment["PATH"])
    record = slurm.submit(played.job, SlurmProfile(exclude=("n7", "n[9-11]")), "p")
    (played.job_folder / "stop").touch()
    assert slurm.resume(record, ["n3"]) == "8"
    assert played.submitted()[-1].split()[2] == "--exclude=n3,n7,n[9-11]"
    assert not (played.job_folder / "stop").exists(), "a job that is submitted again is wanted again"
    slurm.resume(record)
    assert "--exclude" not in played.submitted()[-1], "the script itself names them"


def test_a_scheduler_that_does_not_answer_is_not_taken_for_one_that_has_forgotten_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path)
    monkeypatch.setenv("PATH", played.environment["PATH"])
    record = JobRecord("run", "slurm", "p", "7", 2, 1.0, script=str(played.job_folder / "job.sbatch"))
    record.save(played.job.folder)
    played.program("scontrol", 'echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1')
    assert slurm.state(record) == "unreachable"
    with pytest.raises(HardwareError, match="cannot be asked"):
        slurm.resume(record)
    with pytest.raises(HardwareError, match="cannot be asked"):
        submit(played.job, SlurmProfile(), Target("slurm", "p"))
    assert not [line for line in played.calls.read_text().splitlines() if line.startswith("sbatch")]
    played.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.state(record) == ""


def test_stop_says_so_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    monkeypatch.setenv("PATH", played.environment["PATH"])
    played.job_folder.mkdir(parents=True)
    record = JobRecord("run", "slurm", "p", "7", 2, 1.0, script=str(played.job_folder / "job.sbatch"))
    played.program("scontrol", 'echo "JobId=7 JobState=COMPLETED ExitCode=0:0"')
    with pytest.raises(UsageError, match="does not run: finished"):
        slurm.stop(record, at_once=False)
    assert not (played.job_folder / "stop").exists()


def test_a_job_runs_in_its_own_image_whatever_was_staged_on_the_node_before(tmp_path: Path) -> None:
    played = Played(tmp_path)
    # Copies as asked to, and shows which image the container would have been made from.
    played.program(
        "srun",
        '[ "$2" != bash ] || { shift; exec "$@"; }\n'
        f'for word in "$@"; do case $word in --container-image=*) cat "${{word#*=}}" > {tmp_path}/ran ;; esac; done',
    )
    disk = tmp_path / "a disk"

    def ran(image: Path) -> str:
        assert played.run(SlurmProfile(image=str(image), stage_image=str(disk))) == 0
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
def test_a_job_that_is_held_or_stopped_for_a_while_is_not_taken_for_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    played = Played(tmp_path)
    monkeypatch.setenv("PATH", played.environment["PATH"])
    record = slurm.submit(played.job, SlurmProfile(), "p")
    played.program("scontrol", f'echo "JobId=7 JobState={name} ExitCode=0:0"')
    assert slurm.state(record) == word
    with pytest.raises(UsageError, match=f"is {word} as job"):
        slurm.resume(record)
    with pytest.raises(UsageError, match=f"is {word} as"):
        submit(played.job, SlurmProfile(), Target("slurm", "p"))
    assert len(played.submitted()) == 1


def test_nodes_are_left_out_in_any_form_that_slurm_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    played.program("scontrol", 'case "$*" in *hostnames*) printf "n1\\nn2\\nn3\\n" ;; esac')
    played.program("sinfo", 'printf "n1 gpu*\\nn2 gpu*\\nn3 gpu*\\nn4 gpu*\\n"')
    monkeypatch.setenv("PATH", played.environment["PATH"])
    monkeypatch.chdir(tmp_path)
    slurm.submit(played.job, SlurmProfile(), "p")
    assert main(["resume", "run", "--exclude", "n[1-3,7],m[1-3,7],k1"]) == 0
    assert played.submitted()[-1].split()[2] == "--exclude=n[1-3,7],m[1-3,7],k1"
    assert slurm.idle_nodes(SlurmProfile(exclude=("n[1-3]",))) == ["n4"]


def test_a_report_that_is_still_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    log = slurm.log_path(played.job.folder)
    played.program("sbatch", f"printf 'measuring\\nkeepstep-report [{{\"node\": ' > {log}; echo 8")
    # Asked how the job stands for the second time, the rest has been written.
    rest = f"""[ "$(grep -c "show job" {played.calls})" -ne 2 ] || printf '"n1"}}]\\n' >> {log}"""
    played.program("scontrol", f'{rest}; echo "JobId=8 JobState=RUNNING ExitCode=0:0"')
    monkeypatch.setenv("PATH", played.environment["PATH"])
    arguments = argparse.Namespace(on="slurm", timeout_s=60)
    assert doctor._measure_there(arguments, played.job, SlurmProfile(), ["n1"]) == ([{"node": "n1"}], ["n1"])


@pytest.mark.parametrize("program", ["squeue", "scancel"])
def test_a_stop_that_could_not_be_sent_does_not_end_the_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    played = Played(tmp_path)
    monkeypatch.setenv("PATH", played.environment["PATH"])
    record = slurm.submit(played.job, SlurmProfile(), "p")
    played.program("scontrol", 'echo "JobId=7 JobState=RUNNING ExitCode=0:0"')
    played.program("scancel", "")
    played.program(program, AWAY)
    with pytest.raises(HardwareError, match="Unable to contact"):
        slurm.stop(record, at_once=False)
    assert not (played.job_folder / "stop").exists()


def test_a_saved_run_goes_on_though_its_node_could_leave_no_word(tmp_path: Path) -> None:
    played = Played(tmp_path)
    # What a disk that is full or read-only does to the mark, for one user who may do everything as well.
    away = tmp_path / "away"
    program = (
        f"from pathlib import Path; from keepstep.cli.launch import _leave_word; exit(_leave_word(Path('{away}'), 75))"
    )
    played.program("srun", f'{sys.executable} -c "{program}"')
    assert played.run() == 75
    assert "scontrol requeue 7" in played.calls.read_text()


def test_a_measurement_that_nobody_waits_for_any_more_does_not_stay_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path)
    # Waiting, and somebody loses patience.
    first = f'[ "$(grep -c "show job" {played.calls})" -gt 1 ] || kill -INT {os.getpid()}'
    played.program("scontrol", f'{first}; echo "JobId=8 JobState=PENDING ExitCode=0:0"')
    played.program("squeue", "echo PENDING")
    played.program("scancel", "")
    monkeypatch.setenv("PATH", played.environment["PATH"])
    with pytest.raises(KeyboardInterrupt):
        doctor._measure_there(argparse.Namespace(on="slurm", timeout_s=60), played.job, SlurmProfile(), [])
    assert "scancel 8" in played.calls.read_text().splitlines()


def test_an_image_on_lustre_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    played = Played(tmp_path)
    image = tmp_path / "keepstep.sqsh"
    image.write_text("old")
    played.program("stat", "echo lustre")
    played.program("lfs", 'touch "${!#}"')
    command = ["bash", str(REPOSITORY / "slurm/squash"), "keepstep:0.1.0", str(image)]
    played.program("enroot", 'echo half > "$3"; exit 1')
    assert subprocess.run(command, env=played.environment, capture_output=True, timeout=60).returncode == 1
    assert image.read_text() == "old"
    played.program("enroot", f'[ ! -e "$3" ] && [ "$(cat {image})" = old ] && echo new > "$3"')
    subprocess.run(command, env=played.environment, capture_output=True, timeout=60, check=True)
    assert image.read_text() == "new\n"
    assert [path.name for path in tmp_path.glob("keepstep.sqsh*")] == ["keepstep.sqsh"]
