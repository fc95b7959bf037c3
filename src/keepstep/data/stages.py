"""Download → extract → concatenate → tokenise as one pipeline that can stop anywhere and go on.

Each stage works file by file, writes aside and renames, and is marked only when all its files are whole; the next one
refuses to start before that. Shares (`i/n`) may run on many machines: whoever finishes last writes the mark. What the
first of them found, and was asked for, is written down: it holds for all, and for every later start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, UsageError
from keepstep.core.files import sync_file, write_once
from keepstep.core.threads import in_threads
from keepstep.data.build.run import Share
from keepstep.data.hub import Pace, fetch
from keepstep.data.node_cache import NodeCache
from keepstep.data.records import BLOCK_BYTES, open_decompressed
from keepstep.data.remote import RemoteFile, is_remote
from keepstep.data.sources import SourceFile, find_files
from keepstep.data.stage_files import DONE, PLAN, STAGES, Stage, folder_name, mark_whole, whole_files

SLIMPAJAMA = "hf://datasets/cerebras/SlimPajama-627B/train/chunk*/example_train_chunk*_shard*.jsonl.zst"
SLIMPAJAMA_FILES = 72

C4_SPLITS: dict[str, tuple[str, int]] = {
    "train": ("hf://datasets/allenai/c4/en/c4-train.*.json.gz", 0),
    "train_small": ("hf://datasets/allenai/c4/en/c4-train.*.json.gz", 100_000),
    "val": ("hf://datasets/allenai/c4/en/c4-validation.*.json.gz", 0),
    "val_small": ("hf://datasets/allenai/c4/en/c4-validation.*.json.gz", 10_000),
    "val_xsmall": ("hf://datasets/allenai/c4/en/c4-validation.*.json.gz", 3_000),
    "val_xxsmall": ("hf://datasets/allenai/c4/en/c4-validation.*.json.gz", 100),
}
"""Files and output samples of C4's named splits."""


C4_SUBSETS = ("en", "en.noblocklist", "en.noclean", "realnewslike")
"""Subsets whose files are named alike."""


def c4_split(name: str) -> tuple[str, int]:
    """Inputs and limit of `c4:SPLIT`, or of `c4:SUBSET/SPLIT` where it is not en."""
    subset, _, split = name.rpartition("/")
    if split not in C4_SPLITS:
        raise UsageError(f"C4 has no split {split!r}", f"its splits are {', '.join(C4_SPLITS)}")
    if (subset or "en") not in C4_SUBSETS:
        raise UsageError(
            f"C4 has no subset {subset!r} with such splits",
            f"{', '.join(C4_SUBSETS)}, or its files as hf://datasets/allenai/c4/PATTERN",
        )
    files, samples = C4_SPLITS[split]
    return files.replace("/en/", f"/{subset or 'en'}/"), samples


@dataclass(frozen=True)
class Pipeline:
    """One run of the stages before tokenising."""

    out: Path
    inputs: tuple[str, ...]
    sample: int
    """Files to take, evenly spread over all; 0 takes every file."""
    into: int
    """Files to concatenate into, exactly; 0 is as many as there are, but at most SlimPajama's 72."""
    share: Share
    workers: int
    pace: Pace

    def folder(self, stage: Stage) -> Path:
        """Where a stage writes."""
        return self.out / folder_name(stage)

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage is marked."""
        return (self.folder(stage) / DONE).is_file()

    def run(self, stage: Stage) -> bool:
        """Do our share of a stage; True when the stage as a whole is done."""
        if stage == "concatenate" and self.into and (self.folder(stage) / PLAN).is_file():
            self._settle(stage, {"into": self.into})
        if self.is_done(stage):
            if stage == "download" and (self.folder(stage) / PLAN).is_file():
                self._files()
            return True
        before = STAGES.index(stage) - 1
        if before >= 0 and not self.is_done(STAGES[before]):
            raise DataError(
                f"{stage} cannot start: {STAGES[before]} is not whole",
                f"run every share of --stage {STAGES[before]} first",
            )
        self.folder(stage).mkdir(parents=True, exist_ok=True)
        match stage:
            case "download":
                files = _named(self._files())
                return self._each(stage, {name: self._downloader(file) for name, file in files.items()})
            case "extract":
                sources = whole_files(self.folder("download"))
                return self._each(stage, {_unpacked_name(path.name): _extractor(path) for path in sources})
            case "concatenate":
                groups = self._groups(whole_files(self.folder("extract")))
                self._settle(stage, {"into": len(groups)})
                return self._each(stage, groups)
            case "tokenise":
                raise AssertionError("tokenising is a build")

    def _files(self) -> list[SourceFile]:
        """The files to take: those that were there when the download began, on the Hub at the commit of that day."""
        asked = {"inputs": list(self.inputs), "files": self.sample}
        path = self.folder("download") / PLAN
        found = [] if path.is_file() else [asdict(file) for file in self._look()]
        return [SourceFile(**file) for file in self._settle("download", asked, {"found": found})["found"]]

    def _look(self) -> list[SourceFile]:
        files = find_files(self.inputs)
        for file in files:
            if file.kind != "jsonl":
                raise DataError(
                    f"{file.path} holds no lines of JSON, and lines are what the pipeline joins",
                    "keepstep data build reads such files as they are",
                )
        if 0 < self.sample < len(files):
            return [files[len(files) * number // self.sample] for number in range(self.sample)]
        return files

    def _settle(self, stage: Stage, asked: dict[str, Any], found: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a stage was begun with, which is what is asked for now, or else an error."""
        path = self.folder(stage) / PLAN
        if not path.is_file():
            write_once(path, json.dumps({**asked, **(found or {})}, indent=1) + "\n")
        known: dict[str, Any] = json.loads(path.read_text())
        for name, wanted in asked.items():
            if known[name] != wanted:
                raise DataError(
                    f"{self.folder(stage)} was started with other {name}: {known[name]!r} then, {wanted!r} now",
                    "give the same to go on, or another --out",
                )
        return known

    def _downloader(self, file: SourceFile) -> Callable[[Path], None]:
        def act(target: Path) -> None:
            if file.path.startswith("hf://"):
                found = Path(fetch(file.path, target.with_name(target.name + ".hub"), pace=self.pace))
                found.replace(target)
                shutil.rmtree(target.with_name(target.name + ".hub"), ignore_errors=True)
            elif is_remote(file.path):
                cache = NodeCache(target.with_name(target.name + ".cache"), max(1 << 20, 2 * file.size_bytes))
                cache.open(RemoteFile(file.path, file.size_bytes), lambda path: path.replace(target))
                self.pace.spend(file.size_bytes)
                shutil.rmtree(cache.folder, ignore_errors=True)
            else:
                shutil.copyfile(file.path, target)
            if file.size_bytes >= 0 and target.stat().st_size != file.size_bytes:
                raise DataError(
                    f"{file.path} came with {target.stat().st_size:,} bytes instead of {file.size_bytes:,}",
                    "start the same command again",
                )

        return act

    def _groups(self, sources: Sequence[Path]) -> dict[str, Callable[[Path], None]]:
        into = self.into or min(SLIMPAJAMA_FILES, len(sources))
        if len(sources) < into:
            raise DataError(f"{len(sources)} files cannot become {into}", f"take more files, or --into {len(sources)}")
        bounds = [len(sources) * number // into for number in range(into + 1)]
        return {
            f"part-{number:05d}.jsonl": _concatenator(sources[bounds[number] : bounds[number + 1]])
            for number in range(into)
        }

    def _each(self, stage: Stage, work: dict[str, Callable[[Path], None]]) -> bool:
        folder = self.folder(stage)
        names = sorted(work)
        mine = names[self.share.number :: self.share.of]

        def act(name: str) -> None:
            if (folder / name).exists():
                return
            aside = folder / f".{name}.{os.getpid()}.part"
            try:
                work[name](aside)
                sync_file(aside)
                aside.replace(folder / name)
            finally:
                aside.unlink(missing_ok=True)

        in_threads(act, mine, self.workers)
        if not all((folder / name).exists() for name in names):
            return False
        for leftover in folder.glob(".*"):
            # Whoever finishes at the same moment clears away, too.
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        mark_whole(folder, names)
        return True


def _named(files: Sequence[SourceFile]) -> dict[str, SourceFile]:
    """Flat names that keep all files apart, unpacked ones too."""
    short = ["_".join(file.path.split("://")[-1].strip("/").split("/")[-3:]) for file in files]
    times = Counter(map(_unpacked_name, short))
    named = {
        name if times[_unpacked_name(name)] == 1 else f"{number:05d}_{name}": file
        for number, (name, file) in enumerate(zip(short, files, strict=True))
    }
    assert len(named) == len(files), "two files have one name"
    return named


def _unpacked_name(name: str) -> str:
    return name.removesuffix(".zst").removesuffix(".gz")


def _extractor(source: Path) -> Callable[[Path], None]:
    def act(target: Path) -> None:
        with open_decompressed(str(source)) as stream, target.open("wb") as file:
            while block := stream.read(BLOCK_BYTES):
                file.write(block)

    return act


def _concatenator(sources: Sequence[Path]) -> Callable[[Path], None]:
    def act(target: Path) -> None:
        with target.open("wb") as file:
            for source in sources:
                last = b"\n"
                with source.open("rb") as stream:
                    while block := stream.read(BLOCK_BYTES):
                        file.write(block)
                        last = block[-1:]
                if last != b"\n":
                    # Two records must not become one where a file lacks its last line end.
                    file.write(b"\n")

    return act
