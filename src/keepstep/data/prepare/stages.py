"""Download → extract → concatenate → tokenise as one pipeline that can be interrupted anywhere and resumed.

Each stage works file by file through temporary files, and is marked complete when all its files are there; the next one
does not start before that. Shares (`i/n`) may run on many machines: the last to finish writes the marker. The first
share stores its inputs and options as the stage's plan, which holds for all other shares and later starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, UsageError
from keepstep.core.files import sync_file, write_once
from keepstep.core.threads import in_threads
from keepstep.data.prepare.build import Share, build
from keepstep.data.prepare.decompress import open_piece, read_checked
from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
from keepstep.data.prepare.records import BLOCK_BYTES, RecordOptions
from keepstep.data.prepare.sources import Piece, SourceFile, find_files
from keepstep.data.prepare.stage_files import DONE, PLAN, STAGES, Stage, complete_files, folder_name, mark_complete
from keepstep.data.remote.files import RemoteFile, is_remote
from keepstep.data.remote.hub import RateLimit, fetch
from keepstep.data.remote.node_cache import NodeCache

SLIMPAJAMA = "hf://datasets/cerebras/SlimPajama-627B/train/chunk*/example_train_*.jsonl.zst"
SLIMPAJAMA_FILES = 72

C4_SPLITS: dict[str, tuple[str, int]] = {
    "train": ("train", 0),
    "train_small": ("train", 100_000),
    "val": ("validation", 0),
    "val_small": ("validation", 10_000),
    "val_xsmall": ("validation", 3_000),
    "val_xxsmall": ("validation", 100),
}
"""Part of the file names and output samples of C4's named splits."""
C4_SUBSETS = ("en", "en.noblocklist", "en.noclean", "realnewslike")
"""Subsets with the same file names."""


def c4_split(name: str) -> tuple[str, int]:
    """Inputs and limit of `c4:SPLIT`, or of `c4:SUBSET/SPLIT` where it is not en."""
    subset, _, split = name.rpartition("/")
    subset = subset or "en"
    if split not in C4_SPLITS:
        raise UsageError(f"C4 has no split {split!r}", f"its splits are {', '.join(C4_SPLITS)}")
    if subset not in C4_SUBSETS:
        raise UsageError(
            f"C4 has no subset {subset!r} with these splits",
            f"{', '.join(C4_SUBSETS)}, or its files as hf://datasets/allenai/c4/PATTERN",
        )
    files, samples = C4_SPLITS[split]
    return f"hf://datasets/allenai/c4/{subset}/c4-{files}.*.json.gz", samples


@dataclass(frozen=True)
class Pipeline:
    """The stages of one output folder."""

    out: Path
    inputs: tuple[str, ...]
    sample: int
    """Files to take, evenly spread over all; 0 takes every file."""
    into: int
    """Files to concatenate into, exactly; 0 is one for each input, but at most SlimPajama's 72."""
    share: Share
    workers: int
    rate_limit: RateLimit

    def folder(self, stage: Stage) -> Path:
        """The output folder of a stage."""
        return self.out / folder_name(stage)

    def is_done(self, stage: Stage) -> bool:
        """Whether a stage is complete."""
        return (self.folder(stage) / DONE).is_file()

    def run(self, stage: Stage) -> bool:
        """Do this share of a stage; True when all shares of the stage are done."""
        if stage == "concatenate" and self.into and (self.folder(stage) / PLAN).is_file():
            self._load_or_create_plan(stage, {"into": self.into})
        if self.is_done(stage):
            if stage == "download" and (self.folder(stage) / PLAN).is_file():
                self._files()
            return True
        sources = self._sources(stage)
        self.folder(stage).mkdir(parents=True, exist_ok=True)
        match stage:
            case "download":
                files = _local_names(self._files())
                return self._run_each(stage, {name: partial(self._download, file) for name, file in files.items()})
            case "extract":
                return self._run_each(stage, {_unpacked_name(path.name): partial(_extract, path) for path in sources})
            case "concatenate":
                groups = self._groups(sources)
                self._load_or_create_plan(stage, {"into": len(groups)})
                return self._run_each(stage, groups)
            case "tokenise":
                raise AssertionError("tokenise has its own method")

    def tokenise(self, tokenizer: Path, eos: str, text_field: str) -> dict[str, Any] | None:
        """Build .bin/.idx from the concatenated files, one pair for each; None while other shares are not done."""
        self._sources("tokenise")
        options = BuildOptions(
            inputs=(str(self.folder("concatenate") / "*.jsonl"),),
            tokenizer_sha256=sha256_file(tokenizer),
            records=RecordOptions(text_field),
            eos=eos,
            task_per_file=True,
        )
        plan = make_plan(options)
        return build(self.folder("tokenise"), plan, tokenizer, workers=self.workers, share=self.share)

    def _sources(self, stage: Stage) -> list[Path]:
        """The files of the stage before this one, which must be complete; none for the first."""
        if stage == STAGES[0]:
            return []
        before = STAGES[STAGES.index(stage) - 1]
        if not self.is_done(before):
            raise DataError(
                f"{stage} cannot start: {before} is not complete", f"run every share of --stage {before} first"
            )
        return complete_files(self.folder(before))

    def _files(self) -> list[SourceFile]:
        """The files to download: those found when the download started, on the Hub at the commit of that time."""
        asked = {"inputs": list(self.inputs), "files": self.sample}
        path = self.folder("download") / PLAN
        found = [] if path.is_file() else [asdict(file) for file in self._find_files()]
        return [SourceFile(**file) for file in self._load_or_create_plan("download", asked, {"found": found})["found"]]

    def _find_files(self) -> list[SourceFile]:
        files = find_files(self.inputs)
        for file in files:
            if file.kind != "jsonl":
                raise DataError(
                    f"{file.path} is not JSON lines, which the pipeline needs to join files",
                    "keepstep data build reads such files directly",
                )
        if 0 < self.sample < len(files):
            return [files[len(files) * number // self.sample] for number in range(self.sample)]
        return files

    def _load_or_create_plan(
        self, stage: Stage, asked: dict[str, Any], found: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The plan of a stage, written at first use; an error if it differs from what is asked now."""
        path = self.folder(stage) / PLAN
        if not path.is_file():
            write_once(path, json.dumps({**asked, **(found or {})}, indent=1) + "\n")
        known: dict[str, Any] = json.loads(path.read_text())
        for name, wanted in asked.items():
            if known[name] != wanted:
                raise DataError(
                    f"{self.folder(stage)} was started with other {name}: {known[name]!r} then, {wanted!r} now",
                    "give the same to continue, or another --out",
                )
        return known

    def _download(self, file: SourceFile, target: Path) -> None:
        if file.path.startswith("hf://"):
            folder = target.with_name(target.name + ".hub")
            found = Path(fetch(file.path, folder))
            self.rate_limit.spend(found.stat().st_size)
            found.replace(target)
            shutil.rmtree(folder, ignore_errors=True)
        elif is_remote(file.path):
            cache = NodeCache(target.with_name(target.name + ".cache"), max(1 << 20, 2 * file.size_bytes))
            cache.open(RemoteFile(file.path, file.size_bytes), lambda path: path.replace(target))
            self.rate_limit.spend(file.size_bytes)
            shutil.rmtree(cache.folder, ignore_errors=True)
        else:
            shutil.copyfile(file.path, target)
        if file.size_bytes >= 0 and target.stat().st_size != file.size_bytes:
            raise DataError(
                f"{file.path} came with {target.stat().st_size:,} bytes instead of {file.size_bytes:,}",
                "start the same command again",
            )

    def _groups(self, sources: Sequence[Path]) -> dict[str, Callable[[Path], None]]:
        into = self.into or min(SLIMPAJAMA_FILES, len(sources))
        if len(sources) < into:
            message = f"{len(sources)} files cannot be joined into {into}: there must be at least as many"
            raise DataError(message, f"take more files, or --into {len(sources)}")
        bounds = [len(sources) * number // into for number in range(into + 1)]
        return {
            f"part-{number:05d}.jsonl": partial(_concatenate, sources[bounds[number] : bounds[number + 1]])
            for number in range(into)
        }

    def _run_each(self, stage: Stage, work: dict[str, Callable[[Path], None]]) -> bool:
        """Write this share's files that do not exist yet; True, and a marker, once the files of all shares exist."""
        folder = self.folder(stage)
        names = sorted(work)
        own = names[self.share.number :: self.share.of]

        def act(name: str) -> None:
            if (folder / name).exists():
                return
            part = folder / f".{name}.{os.getpid()}.part"
            try:
                work[name](part)
                sync_file(part)
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)

        in_threads(act, own, self.workers)
        if not all((folder / name).exists() for name in names):
            return False
        for leftover in folder.glob(".*"):
            # Another share that finishes at the same moment removes them, too.
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        mark_complete(folder, names)
        return True


def _local_names(files: Sequence[SourceFile]) -> dict[str, SourceFile]:
    """Flat names that are unique for all files, decompressed or not."""
    short = ["_".join(file.path.split("://")[-1].strip("/").split("/")[-3:]) for file in files]
    times = Counter(map(_unpacked_name, short))
    named = {
        name if times[_unpacked_name(name)] == 1 else f"{number:05d}_{name}": file
        for number, (name, file) in enumerate(zip(short, files, strict=True))
    }
    assert len(named) == len(files), "two files have one name"
    return named


def _unpacked_name(name: str) -> str:
    return re.sub(r"\.(gz|zst)$", "", name, flags=re.IGNORECASE)


def _extract(source: Path, target: Path) -> None:
    stream, _ = open_piece(Piece(str(source), "jsonl", source.suffix.lower(), 0, -1))
    with closing(stream), target.open("wb") as file:
        while block := read_checked(stream, BLOCK_BYTES, str(source)):
            file.write(block)


def _concatenate(sources: Sequence[Path], target: Path) -> None:
    with target.open("wb") as file:
        for source in sources:
            last = b"\n"
            with source.open("rb") as stream:
                while block := stream.read(BLOCK_BYTES):
                    file.write(block)
                    last = block[-1:]
            if last != b"\n":
                # A file without a last line end must not join two records into one.
                file.write(b"\n")
