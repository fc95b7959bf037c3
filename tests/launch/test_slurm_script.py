"""The batch script: what it holds, and that nothing in it can be made to mean something else."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.main import main
from keepstep.core.errors import ConfigError, UsageError
from keepstep.launch.environments import all_environments
from keepstep.launch.job import Job, JobRecord, load_record, read_target
from keepstep.launch.profile_kinds import KubernetesProfile, SlurmProfile
from keepstep.launch.profiles import commented, load_profile
from keepstep.launch.quoting import sbatch_value, shell_word, slug
from keepstep.launch.slurm import render
from tests.launch.manifests import REPOSITORY

BODY = (REPOSITORY / "src/keepstep/launch/batch.sh").read_text()
GOLDEN = Path(__file__).parent / "golden"
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=60)


def job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "name": "my-run",
        "words": ("train", "/shared/runs/my-run/job/run.yaml", "optimizer.lr=1e-4"),
        "folder": Path("/shared/runs/my-run"),
        "nodes": 4,
        "working_dir": Path("/shared"),
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


def settings(script: str) -> list[str]:
    """What the script sets, as bash itself reads it."""
    above = script.removesuffix(BODY)
    show = 'printf "%s\\0" "${KEEPSTEP_WORDS[@]}" "$KEEPSTEP_JOB_FOLDER" "${NOTE-}" "${KEEPSTEP_SRUN[@]}"'
    done = subprocess.run(["bash", "-c", f"{above}\n{show}"], capture_output=True, check=True, cwd="/tmp")
    return done.stdout.decode().split("\0")[:-1]


PROFILES = {
    "container": SlurmProfile(
        partition="gpu", account="team", reservation="paul", time_limit="2-00:00:00", image="/data/keepstep.sqsh",
        mounts=("/data:/data", "/blob:/blob"), stage_image="/mnt/nvme/images", environment="azure-ndv5", sharp=True,
        secrets={"HF_TOKEN": "/home/me/.hf_token"}, exclude=("n7", "n9"), options=("--constraint=h100", "--no-kill"),
    ),
    "venv": SlurmProfile(gpus_per_node=8, min_nodes=2, venv="/shared/env", environment="nebius"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROFILES)
def test_the_script_is_the_one_on_record(name: str) -> None:
    profile = PROFILES[name]
    script = render(job(min_nodes=profile.min_nodes), profile)
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("KEEPSTEP_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
    assert script == path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


@given(name=TEXT, word=TEXT, folder=TEXT, note=TEXT, image=TEXT)
def test_script_quotes_any_text(name: str, word: str, folder: str, note: str, image: str) -> None:
    profile = SlurmProfile(variables={"NOTE": note}, image=image, mounts=(f"/a:{note}",))
    where = Path("/shared") / re.sub(r"[\x00-\x1f\x7f\\]", "", folder.replace("/", "-"))
    script = render(job(name=name, words=("train", word), folder=where), profile)
    got = settings(script)
    assert got[:4] == ["train", word, str(where / "job"), note]
    if image:
        assert f"--container-image={image}" in got
        mounts = [f"/a:{note}", *dict.fromkeys(["/shared:/shared", f"{where}:{where}"])]
        assert f"--container-mounts={','.join(mounts)}" in got
    for line in script.split("\n"):
        if line.startswith("#SBATCH --job-name="):
            assert re.fullmatch(r"#SBATCH --job-name=[a-z0-9-]{1,40}", line)


@given(TEXT)
def test_a_header_never_grows_a_line(value: str) -> None:
    try:
        written = sbatch_value("comment", value)
    except UsageError:
        assert re.search(r"[\x00-\x1f\x7f]", value)
        return
    assert "\n" not in written
    assert shlex.split(written) in ([value], [] if not value else [value])


@given(TEXT)
def test_a_slug_is_a_dns_label_and_tells_names_apart(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", slug(name))
    assert len(slug(name)) <= 40
    assert slug(name) != slug(name + "x")


def test_a_newline_in_a_path_is_refused_with_a_message() -> None:
    with pytest.raises(UsageError, match="line ends"):
        render(job(folder=Path("/shared/a\n#SBATCH --uid=0")), SlurmProfile())
    with pytest.raises(UsageError, match="not an sbatch option"):
        render(job(), SlurmProfile(options=("--wrap\nevil",)))


def test_a_secret_is_read_on_the_node_and_printed_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hunter2\n")
    script = render(job(), SlurmProfile(secrets={"HF_TOKEN": str(file)}))
    assert "hunter2" not in script
    above = script.removesuffix(BODY)
    done = subprocess.run(["bash", "-c", f'{above}\necho "got=$HF_TOKEN"'], capture_output=True, text=True, check=True)
    assert done.stdout == "got=hunter2\n"


@pytest.mark.parametrize("kind", [SlurmProfile, KubernetesProfile])
def test_profile_refuses_credentials_and_nothing_else(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "profile.yaml"
    secret = ("HF_TOKEN", "WANDB_API_KEY", "WANDB_KEY", "db_password", "DB_PASS", "MY_AUTH", "AWS_SECRET_ACCESS_KEY")
    for variable in (*(f"{name}: x" for name in secret), "HTTPS_PROXY: http://me:hunter2@proxy:3128"):
        path.write_text(f"variables: {{{variable}}}\n")
        with pytest.raises(ConfigError, match="looks like a credential"):
            load_profile(kind, str(path))
    plain = {"TOKENIZERS_PARALLELISM": "false", "HTTPS_PROXY": "http://proxy:3128", "KEYBOARD": "x", "NCCL_NET": "AWS"}
    path.write_text(yaml.safe_dump({"variables": plain}))
    assert dict(load_profile(kind, str(path)).variables) == plain


def test_a_save_may_take_all_the_time_that_is_left_for_it() -> None:
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800\n" in render(job(), SlurmProfile(warn_before_end_s=1800))
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=540\n" in render(job(), SlurmProfile())


def test_profile_reports_all_mistakes_together(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("partitoin: gpu\nnodes: two\nexclusive: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(SlurmProfile, str(path))
    text = "\n".join(caught.value.lines())
    assert "unknown key partitoin" in text
    assert "did you mean partition?" in text
    assert "nodes is 'two', but it must be a whole number" in text
    assert "exclusive is 1" in text


@pytest.mark.parametrize(
    ("limit", "sound"),
    [("5", False), ("5:59", False), ("0:05:00", False), ("0-0:5", False), ("6", True), ("12:00:00", True),
     ("0-1", True), ("2-00:00:00", True), ("1-12:30", True), ("0", True), ("UNLIMITED", True), ("", True)],
)  # fmt: skip
def test_a_time_limit_leaves_time_before_its_warning(limit: str, sound: bool, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"time_limit: {limit}\n" if limit else "time_limit: ''\n")
    if sound:
        assert load_profile(SlurmProfile, str(path)).time_limit == limit
        return
    with pytest.raises(ConfigError, match="nothing is left to train in"):
        load_profile(SlurmProfile, str(path))


def test_profile_keeps_text_as_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "time_limit: 12:00:00\naccount: 0123\npartition: no\nexclude: [n1, 007]\nnodes: 0x10\nexclusive: no\n"
        "variables: {NO: yes, A: 010, B: 1:30, C: 1e3, D: true, E: ''}\n"
    )
    profile = load_profile(SlurmProfile, str(path))
    script = render(job(), profile)
    for line in ("--time=12:00:00", "--account=0123", "--partition=no", "--exclude=n1,007"):
        assert f"#SBATCH {line}\n" in script
    for line in ("NO=yes", "A=010", "B=1:30", "C=1e3", "D=true", "E=''"):
        assert f"export {line}\n" in script
    assert (profile.nodes, profile.exclusive) == (16, False)
    path.write_text("node_selector: {pool: yes, rack: 012}\n")
    assert load_profile(KubernetesProfile, str(path)).node_selector == {"pool": "yes", "rack": "012"}


@pytest.mark.parametrize("kind", [SlurmProfile, KubernetesProfile])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secrets: {HF-TOKEN: FILE}", "secrets: 'HF-TOKEN' is not a variable's name"),
        ("secrets: {'A; touch pwned; B': FILE}", "is not a variable's name"),
        ("variables: {1: x}", "variables: '1' is not a variable's name"),
        ("variables: {NCCL_DEBUG: }", "variables: NCCL_DEBUG is empty, but it must be a text or a number"),
        ("variables: {NCCL_DEBUG: [a, b]}", "but it must be a text or a number"),
    ],
)
def test_a_variable_that_no_shell_could_set_is_refused(
    kind: type[SlurmProfile] | type[KubernetesProfile], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("FILE", "/home/me/token" if kind is SlurmProfile else "hub/token"))
    with pytest.raises(ConfigError) as caught:
        load_profile(kind, str(path))
    assert message in "\n".join(caught.value.lines())


@pytest.mark.parametrize("kind", [SlurmProfile, KubernetesProfile])
def test_the_printed_profile_is_all_defaults(
    kind: type[SlurmProfile] | type[KubernetesProfile], tmp_path: Path
) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(commented(kind))
    assert load_profile(kind, str(path)) == kind()
    assert all(f"{field.name}:" in path.read_text() for field in dataclasses.fields(kind))


def test_shipped_profiles_load() -> None:
    assert load_profile(SlurmProfile, "azure-h100").environment == "azure-ndv5"
    assert load_profile(SlurmProfile, "nebius-h200").environment == "nebius"
    assert load_profile(KubernetesProfile, "aks-h100").gpus_per_node == 8
    with pytest.raises(UsageError, match="azure-h100"):
        load_profile(SlurmProfile, "azure-h200")


@pytest.mark.parametrize("text", ["pbs", "local:x", "slurm:", "k8s:", ""])
def test_a_wrong_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--on is"):
        read_target(text)


@pytest.mark.parametrize(
    "script", [(REPOSITORY / "slurm/launch.sb").read_text(), render(job(), SlurmProfile())], ids=["launch.sb", "ours"]
)
def test_scripts_start_when_all_nodes_are_ready(script: str) -> None:
    assert "#SBATCH --wait-all-nodes=1" in script.partition("\n\n")[0].splitlines()


def test_launch_sb_body_and_environments_equal_the_packages() -> None:
    script = (REPOSITORY / "slurm/launch.sb").read_text()
    assert script.endswith(BODY)
    for name, variables in all_environments().items():
        for variable, value in variables.items():
            assert f"{variable}={value}" in script, name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-i a.sqsh -d /d -m /d:/d", "-c CONFIG is missing"),
        ("-c mpt-7b -d /d -m /d:/d", "-i IMAGE is missing"),
        ("-c mpt-7b -i a.sqsh -m /d:/d", "-d DATADIR is missing"),
        ("-c mpt-7b -i a.sqsh -d /d", "-m MOUNTS is missing"),
        ("-c mpt-7b -i a.sqsh -d /d -m /d:/d -s", "-s needs -F FOLDER"),
        ("-c mpt-7b -i a.sqsh -d /d -m /d:/d -u 2", "-u is '2'"),
        ("-c mpt-7b -i a.sqsh -d /d -m /d:/d -x", "unknown flag -x"),
        ("-c mpt-7b -i a.sqsh -d /d -m /d:/d -I", "-I needs a value"),
    ],
)
def test_launch_sb_refuses_what_it_does_not_understand(flags: str, message: str) -> None:
    script = str(REPOSITORY / "slurm/launch.sb")
    done = subprocess.run(["bash", script, *flags.split()], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_missing_job_names_those_there_are(tmp_path: Path) -> None:
    JobRecord("a", "slurm", "p", "7", 2, 1.0).save(tmp_path / "a")
    assert load_record(tmp_path, "a").job_id == "7"
    with pytest.raises(UsageError) as caught:
        load_record(tmp_path, "b")
    assert caught.value.hint == "submitted: a"


def test_quoting_refuses_what_no_command_can_take() -> None:
    with pytest.raises(UsageError, match="NUL"):
        shell_word("a\0b")


@pytest.mark.parametrize("where", ["slurm:azure-h100", "k8s:aks-h100"])
@pytest.mark.parametrize(("flags", "told"), [(["--procs", "3"], "--procs 3 is for this machine"), (["--ui"], "--ui")])
def test_submit_refuses_options_for_this_machine(
    flags: list[str], told: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "model=mpt-tiny", "data=synthetic", *flags, "--on", where, "--dry-run"]) == 2
    assert told in capsys.readouterr().err


def test_submit_checks_every_allowed_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that starts again on what is left of its nodes must not end there as wrongly configured."""
    (tmp_path / "profile.yaml").write_text("nodes: 4\nmin_nodes: 2\ngpus_per_node: 8\n")
    words = [
        "train",
        "model=mpt-tiny",
        "data=synthetic",
        "microbatch=1",
        "--on",
        f"slurm:{tmp_path}/profile.yaml",
        "--dry-run",
    ]
    assert main([*words, "global_batch=64"]) == 2
    error = capsys.readouterr().err
    assert "may continue on 3 of 4 nodes, where global_batch is 64" in error
    assert "reproducible=elastic" in error
    assert main([*words, "global_batch=96"]) == 0
    assert main([*words, "global_batch=64", "reproducible=elastic"]) == 0
