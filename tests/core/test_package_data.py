"""An installation has every file that the package reads, not only its modules."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from tests.test_install import source_tree

ROOT = Path(__file__).parents[2]


def test_every_file_beside_the_modules_is_installed() -> None:
    package = ROOT / "src" / "keepstep"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["keepstep"]
    installed = {path for pattern in patterns for path in package.glob(pattern)}
    read = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "models" / "kernels" / "gemm_tiles.cu" in read
    assert read <= installed


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds our wheel and finds its dependencies in the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = source_tree(folder / "sources")
    # setuptools of this environment builds: torch brings one that is new enough, and nothing is downloaded.
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", folder, sources], check=True)
    venv.create(folder / "env", with_pip=False)
    wheel = next(folder.glob("keepstep-*.whl"))
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    # A path in a .pth file comes after our wheel, and the .pth files in it (the checkout of these tests) do not count.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(installation: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # For helm, which the tests bring along.
    environment["PATH"] += os.pathsep + str(Path(sys.executable).parent)

    def run(*words: str) -> str:
        command = [installation / "bin" / "keepstep", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ask = "import keepstep; print(keepstep.__file__)"
    python = [installation / "bin" / "python", "-c", ask]
    where = subprocess.run(python, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert where.startswith(str(installation))
    assert (installation / "share" / "man" / "man1" / "keepstep.1").is_file()
    share = installation / "share" / "keepstep"
    for folder in ("charts", "recipes", "slurm"):
        in_repository = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert in_repository <= {path.relative_to(share) for path in (share / folder).rglob("*")}
    run("new", "first")
    run("train", "first/run.yaml", "max_duration=2ba", "model.layers=1", "checkpoint.interval=1ba")
    assert "2" in run("ckpt", "ls", "runs/first")
    run("report", "runs/first")
    recipe = str(share / "recipes" / "mpt-125m.yaml")
    assert "kind: " in run("train", recipe, "data.path=/data/c4", "--on", "k8s:aks-h100", "--dry-run")
