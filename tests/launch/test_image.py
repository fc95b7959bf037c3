"""The container image, really built on a small Debian, and what jobs need inside it (make test-image)."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import canonicalize

import pytest

from keepstep.launch.environments import all_environments
from tests.doc_blocks import blocks
from tests.launch.manifests import REPOSITORY

DOCKERFILE = (REPOSITORY / "docker/Dockerfile").read_text()


def test_topology_is_that_of_azures_machine_images() -> None:
    made = subprocess.run([REPOSITORY / "docker/ndv5-topology"], capture_output=True, text=True, check=True).stdout
    canonical = canonicalize(made, strip_text=True)
    # Of topology/ndv5-topo.xml in Azure/azhpc-images.
    published = "dfd34cf4608c544356423a48cdffd6adb0c2d4b676cac8dd167719b4c3598c39"
    assert hashlib.sha256(canonical.encode()).hexdigest() == published


def test_image_is_made_with_every_file_that_a_profile_names() -> None:
    values = [value for variables in all_environments().values() for value in variables.values()]
    named = [value for value in values if value.startswith("/")]
    assert named
    assert all(re.search(rf"^RUN .*>{re.escape(path)}$", DOCKERFILE, re.MULTILINE) for path in named)


def test_image_looks_for_sharp_where_jobs_mount_it() -> None:
    body = (REPOSITORY / "src/keepstep/launch/batch.sh").read_text()
    mounted = re.search(r"plugin=(\S+) library=(\S+)", body)
    assert mounted
    assert f"ENV LD_LIBRARY_PATH={mounted[1]}/lib:{mounted[2]}/lib$" in DOCKERFILE


def built(test: Callable[..., None]) -> Callable[..., None]:
    """Needs the built image: minutes, and left to make test-image."""
    return pytest.mark.slow(pytest.mark.cluster(test))


def missing_parts() -> str:
    """Why no image can be built here; empty where one can."""
    absent = [program for program in ("buildah", "debootstrap") if not shutil.which(program)]
    if os.geteuid() or sys.platform != "linux":
        return "an image is built by root on Linux"
    return f"{' and '.join(absent)} missing (apt-get install {' '.join(absent)})" if absent else ""


def pip_settings(folder: Path) -> Iterator[str]:
    """This machine's pip settings for the build, with the folders and certificates that they name, as mounts."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    text = "\n".join(re.findall(r"^global\.(\S+='.*')$", listed.stdout, re.MULTILINE)).replace("'", "")
    for number, path in enumerate(map(Path, re.findall(r"(?<![\w:/])/\S+", text.replace("file://", "")))):
        if path.is_file():
            # Certificates: not under their own path, which a package of the image writes to.
            text = text.replace(str(path), f"/etc/pip-{number}")
            yield f"--volume={path}:/etc/pip-{number}:ro"
        elif path.is_dir():
            # The pages of an index link to files next to it.
            folder_used = path.parent if path.name == "simple" else path
            yield f"--volume={folder_used}:{folder_used}:ro"
    (folder / "pip.conf").write_text(f"[global]\n{text}\n")
    yield f"--volume={folder}/pip.conf:/etc/pip.conf:ro"


class Image:
    """A built image, and commands in a container of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        storage = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"]
        self._buildah = ["buildah", *storage]

    def _call(self, *words: str, **options: str) -> str:
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", **options}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=REPOSITORY)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        return done.stdout.strip()

    def build(self) -> None:
        root = f"{self._folder}/rootfs"
        self._call("debootstrap", "--variant=minbase", "bookworm", root, "http://deb.debian.org/debian")
        base = self._call(*self._buildah, "from", "scratch")
        self._call(*self._buildah, "add", base, root, "/")
        self._call(*self._buildah, "commit", "--rm", base, "base")
        # docker/build calls `docker build FLAGS`; buildah has the same flags.
        flags = ["--isolation=chroot", "--pull-never", f"--ignorefile={REPOSITORY}/docker/Dockerfile.dockerignore"]
        program = self._folder / "docker"
        command = " ".join([*self._buildah, "build", *flags, *pip_settings(self._folder)])
        program.write_text(f'#!/bin/bash\nshift\nexec {command} "$@"\n')
        program.chmod(0o755)
        index = "https://pypi.org/simple"
        build = ["docker/build", "--base", "localhost/base", "--torch-index", index, "--tag", "test"]
        self._call(*build, DOCKER=str(program))
        self._container = self._call(*self._buildah, "from", "--pull-never", "localhost/keepstep:test")

    def names(self) -> list[str]:
        """Names and tags of the images that were built."""
        return self._call(*self._buildah, "images", "--format", "{{.Name}}:{{.Tag}}").split()

    def run(self, words: Sequence[str], mounts: Sequence[str] = ()) -> str:
        """A command's output, run as the image's own user."""
        volumes = [f"--volume={mount}" for mount in mounts]
        return self._call(*self._buildah, "run", *volumes, self._container, "--", *words)

    def python(self, text: str, mounts: Sequence[str] = ()) -> str:
        return self.run(["python3", "-c", text], mounts)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := missing_parts():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("image")
    made = Image(folder)
    try:
        made.build()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


EXTENSION = """
import importlib.util, pathlib, subprocess, sysconfig, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "small.c").write_text('''
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "small"};
PyMODINIT_FUNC PyInit_small(void) {
  PyObject *made = PyModule_Create(&module);
  if (made) PyModule_AddIntConstant(made, "answer", 42);
  return made;
}
''')
include = "-I" + sysconfig.get_path("include")
subprocess.run(["gcc", "-shared", "-fPIC", include, "small.c", "-o", "small.so"], cwd=folder, check=True)
spec = importlib.util.spec_from_file_location("small", folder / "small.so")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.answer)
"""


@built
def test_image_compiles_an_extension_against_python(image: Image) -> None:
    assert image.python(EXTENSION) == "42"


@built
def test_image_compiles_a_function_with_torch(image: Image) -> None:
    compiled = "torch.compile(lambda x: (x * 2 + 1).relu().sum())"
    assert image.python(f"import torch; print(int({compiled}(torch.arange(5.0))))") == "25"


@built
def test_image_answers_the_command_of_the_install_page(image: Image) -> None:
    block = next(block for block in blocks("docs/install.md", "") if "docker/build" in block)
    build, run = map(shlex.split, block.splitlines())
    assert build == ["docker/build"]
    # GPUs and shared memory are docker's; the name and the command after it are ours.
    name, command = run[-3], run[-2:]
    assert run[:-3] == ["docker", "run", "--rm", "--gpus", "all", "--shm-size", "16g"]
    assert f"localhost/{name}:latest" in image.names()
    assert "torch" in image.run(command)


@built
def test_image_imports_triton(image: Image) -> None:
    found = image.python("import importlib.util; print(importlib.util.find_spec('triton') is not None)")
    if found != "True":
        pytest.skip("torch's wheel for CPUs has no triton")
    assert image.python("import triton; print(bool(triton.__version__))") == "True"


@built
def test_image_has_every_path_that_a_profile_names(image: Image) -> None:
    named = image.python(
        "from pathlib import Path\n"
        "from keepstep.launch.environments import all_environments\n"
        "paths = [v for e in all_environments().values() for v in e.values() if v.startswith('/')]\n"
        "print(len(paths), [path for path in paths if not Path(path).is_file()])"
    )
    count, _, absent = named.partition(" ")
    assert int(count) > 0
    assert absent == "[]"


@built
def test_image_demo_trains_as_a_plain_user(image: Image) -> None:
    assert image.run(["id", "-u"]) == "1000"
    # So few steps end below the demo's own bar for the loss, but they include both of its interruptions.
    said = image.run(["sh", "-c", "keepstep demo --steps 50 --runs-dir /tmp/runs 2>&1 || true"])
    assert "resumed at step" in said
    assert "step 50: validation loss" in said


PLUGIN = """
import os
from keepstep.launch.environments import missing_parts
print([message for message, _ in missing_parts({"NCCL_COLLNET_ENABLE": "1"})], os.environ["LD_LIBRARY_PATH"])
"""


@built
def test_image_loads_the_sharp_plugin_of_the_node(image: Image, tmp_path: Path) -> None:
    said = image.python(PLUGIN)
    assert "libnccl-net.so cannot be loaded" in said
    # An empty entry would mean the current folder.
    assert not re.search(r"::|:$", said)
    (tmp_path / "lib").mkdir()
    gcc = ["gcc", "-shared", "-x", "c", "/dev/null", "-o", "/tmp/made/lib/libnccl-net.so"]
    tmp_path.chmod(0o755)
    (tmp_path / "lib").chmod(0o777)
    image.run(gcc, [f"{tmp_path}:/tmp/made"])
    assert image.python(PLUGIN, [f"{tmp_path}:/usr/local/nccl-rdma-sharp-plugins:ro"]).startswith("[] ")
