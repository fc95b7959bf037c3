"""Compares data preparation and loading with other tools, on the same corpus and machine, in one run.

    python benchmarks/data.py --peers .venv-bench/bin/python

keepstep is timed as a complete process with start and imports, with byte code as in an installed package. The peers are
timed inside their process, after their imports.
Writes benchmarks/results/data.json and prints the ratios.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEQ_LEN = 2048
EOS = "<|endoftext|>"
MARKS = ("<!-- bench-data: written by benchmarks/data.py -->", "<!-- end of bench-data -->")
SUFFIXES = {".py", ".md", ".rst", ".txt", ".h", ".hpp", ".pyi", ".cuh"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".venv-bench/bin/python"), help="a Python with the peers")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench-data"), help="scratch folder")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the corpus")
    parser.add_argument(
        "--peer-megabytes", type=int, default=0, help="prepare only this much with the peers; 0 for all"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json; default: a BPE of 32,768 trained on the corpus"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each loading measurement")
    parser.add_argument("--only", choices=("prep", "load", "scale"), help="run only this part")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "data.json")
    parser.add_argument("--docs", type=Path, help="page whose table of results is rewritten, between its markers")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(work / f"corpus-{args.megabytes}.jsonl", args.megabytes * 1_000_000)
    tokenizer = args.tokenizer or make_tokenizer(corpus, work / "tokenizer.json")
    results: dict[str, Any] = {
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "corpus": {"bytes": corpus.stat().st_size, "documents": sum(1 for _ in corpus.open("rb"))},
    }
    peer_corpus = first_part(corpus, args.peer_megabytes * 1_000_000) if args.peer_megabytes else corpus
    results["corpus"]["peer_bytes"] = peer_corpus.stat().st_size
    compile_ours()
    bench = Bench(args.peers.absolute(), (corpus, peer_corpus), tokenizer.resolve(), work, args.seconds)
    if args.only in (None, "prep"):
        results.update(bench.preparation())
    if args.only in (None, "load"):
        results.update(bench.loading())
    if args.only in (None, "scale"):
        results.update(bench.scale())
    if args.only is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
        table = results_table(results)
        print(table, file=sys.stderr)
        if args.docs is not None:
            fill_page(args.docs, table)
    print(json.dumps(results, indent=2))


def compile_ours() -> None:
    """Compile our modules to byte code, as pip does; a fresh checkout has none."""
    import keepstep

    compileall.compile_dir(str(Path(keepstep.__file__).parent), quiet=2)


def results_table(results: dict[str, Any]) -> str:
    """The table that docs/data.md shows."""
    prep, load = results["prep"], results["load"]
    rows = [
        ("prepare, MDS", f"{prep['ours_mds']['mb_per_s']:.0f} MB/s",
         f"llm-foundry {prep['llm_foundry']['mb_per_s']:.2g} MB/s", results["prep_ratio_llm_foundry"]),
        ("prepare, .bin/.idx", f"{prep['ours_megatron']['mb_per_s']:.0f} MB/s",
         f"Megatron preprocess_data {prep['megatron']['mb_per_s']:.2g} MB/s", results["prep_ratio_megatron"]),
        ("prepare, .bin/.idx", f"{prep['ours_megatron']['mb_per_s']:.0f} MB/s",
         f"datasets.map {prep['hf_datasets_map']['mb_per_s']:.2g} MB/s", results["prep_ratio_hf_datasets"]),
        ("load, MDS", f"{load['ours_mds']['samples_per_s']:,.0f}/s",
         f"StreamingDataset {load['streaming']['samples_per_s']:,.0f}/s", results["load_ratio_streaming"]),
        ("load, .bin/.idx", f"{load['ours_bin']['samples_per_s']:,.0f}/s",
         f"GPTDataset {load['gptdataset']['samples_per_s']:,.0f}/s", results["load_ratio_gptdataset"]),
        ("load, .bin/.idx", f"{load['ours_bin']['samples_per_s']:,.0f}/s",
         f"litdata {load['litdata']['samples_per_s']:,.0f}/s", results["load_ratio_litdata"]),
    ]  # fmt: skip
    lines = [f"| {what} | {ours} | {theirs} | {ratio:.1f} × |" for what, ours, theirs, ratio in rows]
    facts = (
        f"Preparing took {results['prep_peak_mb']:.0f} MB at its peak, all processes together. The first batch came "
        f"{results['start']['open_s'] + results['start']['first_batch_s']:.2f} s after import, at sample 10^9 "
        f"{results['resume_at_1e9']['open_s'] + results['resume_at_1e9']['first_batch_s']:.2f} s. An index of 10^12 "
        f"tokens opened in {results['index_open_s']:.1f} s and {results['index_peak_gb']:.2f} GB."
    )
    head = "| | ours | theirs | ratio |\n|---|---|---|---|\n"
    return head + "\n".join(lines) + f"\n\n{facts}\n"


def fill_page(page: Path, table: str) -> None:
    """Write the table between the page's markers."""
    before, _, rest = page.read_text().partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{page} lacks the markers {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{MARKS[0]}\n{table}{MARKS[1]}{after}")


class PeakMemory(threading.Thread):
    """Samples the peak memory of a process and its descendants; the sum of the peaks bounds the total from above."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._peaks_kib = root, dict[int, int]()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            waiting = [self._root]
            while waiting:
                pid = waiting.pop()
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        waiting += map(int, (task / "children").read_text().split())
                except OSError:
                    continue
                found = status.partition("VmHWM:")[2].split(maxsplit=1)
                if found:
                    self._peaks_kib[pid] = int(found[0])

    def end(self) -> float:
        """Stop sampling and return the sum in MB."""
        self._ended.set()
        self.join()
        return sum(self._peaks_kib.values()) * 1024 / 1e6


def make_corpus(path: Path, size_bytes: int) -> Path:
    """Text files of this machine's Python installations, without duplicates, in path order."""
    if path.is_file():
        return path
    places = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/include", "/usr/share/doc"]
    seen: set[bytes] = set()
    written = 0
    aside = path.with_suffix(".part")
    with aside.open("wb") as file:
        for place in places:
            for source in sorted(Path(place).rglob("*")):
                if source.suffix not in SUFFIXES or not source.is_file():
                    continue
                try:
                    text = source.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                digest = hashlib.sha256(text.encode()).digest()
                if text.strip() and digest not in seen:
                    seen.add(digest)
                    written += file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
                if written >= size_bytes:
                    break
            if written >= size_bytes:
                break
    aside.replace(path)
    return path


def first_part(corpus: Path, size_bytes: int) -> Path:
    """The first lines of the corpus, for peers that would take too long for all of it."""
    path = corpus.with_name(f"{corpus.stem}-first-{size_bytes}.jsonl")
    with corpus.open("rb") as source, path.open("wb") as target:
        for line in source:
            if target.tell() >= size_bytes:
                break
            target.write(line)
    return path


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def make_tokenizer(corpus: Path, path: Path) -> Path:
    """A BPE over every twentieth document."""
    from keepstep.data.tokenization import train_bpe

    if not path.is_file():
        with corpus.open() as lines:
            train_bpe((json.loads(line)["text"] for number, line in enumerate(lines) if number % 20 == 0), 32_768, path)
    return path


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time (the slower of two), and the times of all."""
    ordered = sorted(runs, key=lambda run: float(run["seconds"]))
    return ordered[len(ordered) // 2] | {"all_seconds": [run["seconds"] for run in runs]}


class Bench:
    """One run of all comparisons."""

    def __init__(self, peers: Path, corpora: tuple[Path, Path], tokenizer: Path, work: Path, seconds: float) -> None:
        self.peers, self.tokenizer, self.work, self.seconds = peers, tokenizer, work, seconds
        self.corpus, self.peer_corpus = corpora

    def preparation(self) -> dict[str, Any]:
        """MB of input per second, ours and the peers'.

        Ours runs before and after the peers and its median counts: a shared machine's speed drifts within minutes.
        """
        bin_runs, mds_runs = self._our_builds(), self._our_builds(mds=True)
        foundry = self._peer("prep-llm-foundry", "peer-mds")
        megatron = self._peer("prep-megatron", "peer-bin")
        datasets = self._peer("prep-datasets", "peer-datasets")
        ours_bin, ours_mds = _middle(bin_runs + self._our_builds()), _middle(mds_runs + self._our_builds(mds=True))
        if self.peer_corpus != self.corpus:
            self._ours("bin-part", "--format", "megatron", corpus=self.peer_corpus)
        mine = self.work / ("bin" if self.peer_corpus == self.corpus else "bin-part")
        same = self._same_stream(mine, self.work / "peer-bin" / "set_text_document.bin")
        return {
            "prep": {
                "ours_megatron": ours_bin,
                "ours_mds": ours_mds,
                "llm_foundry": foundry,
                "megatron": megatron,
                "hf_datasets_map": datasets,
                "tokens_equal_megatron": same,
            },
            # Parent and workers together.
            "prep_peak_mb": max(ours_bin["peak_mb"], ours_mds["peak_mb"]),
            "prep_ratio_llm_foundry": ours_mds["mb_per_s"] / foundry["mb_per_s"],
            "prep_ratio_megatron": ours_bin["mb_per_s"] / megatron["mb_per_s"],
            "prep_ratio_hf_datasets": ours_bin["mb_per_s"] / datasets["mb_per_s"],
            # Work per second of processor time, which does not depend on how busy the machine is.
            "prep_cpu_ratio_llm_foundry": ours_mds["mb_per_cpu_s"] / foundry["mb_per_cpu_s"],
            "prep_cpu_ratio_megatron": ours_bin["mb_per_cpu_s"] / megatron["mb_per_cpu_s"],
        }

    def _our_builds(self, mds: bool = False, repeat: int = 3) -> list[dict[str, Any]]:
        if mds:
            return [self._ours("mds", "--format", "mds", "--concat", str(SEQ_LEN)) for _ in range(repeat)]
        return [self._ours("bin", "--format", "megatron") for _ in range(repeat)]

    def _ours(self, name: str, *options: str, corpus: Path | None = None) -> dict[str, Any]:
        out, corpus = self.work / name, corpus or self.corpus
        megabytes = corpus.stat().st_size / 1e6
        command = [sys.executable, "-m", "keepstep", "data", "build", str(corpus), "--out", str(out)]
        command += ["--tokenizer", str(self.tokenizer), "--eos", EOS, "--workers", "2", "--json", *options]
        shutil.rmtree(out, ignore_errors=True)
        before_s = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
        start_s = time.perf_counter()
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        memory = PeakMemory(running.pid)
        memory.start()
        answer, errors = running.communicate()
        seconds = time.perf_counter() - start_s
        peak_mb = memory.end()
        if running.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors[-3000:]}")
        cpu_s = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN)) - before_s
        return {
            "seconds": seconds,
            "mb_per_s": megabytes / seconds,
            "cpu_s": cpu_s,
            "mb_per_cpu_s": megabytes / cpu_s,
            "peak_mb": peak_mb,
            "tokens": json.loads(answer)["tokens"],
        }

    def _peer(self, action: str, out: str, *more: str) -> dict[str, Any]:
        print(f"peer: {action}", file=sys.stderr)
        command = [str(self.peers), str(HERE / "data_peers.py"), action, "--out", str(self.work / out)]
        command += ["--corpus", str(self.peer_corpus), "--tokenizer", str(self.tokenizer), "--eos", EOS, *more]
        before_s = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
        found = self._run_peer(command)
        if "seconds" in found:
            megabytes = self.peer_corpus.stat().st_size / 1e6
            cpu_s = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN)) - before_s
            found |= {"mb_per_s": megabytes / found["seconds"], "cpu_s": cpu_s, "mb_per_cpu_s": megabytes / cpu_s}
        shutil.rmtree(self.work / f"{out}.cache", ignore_errors=True)
        return found

    def _run_peer(self, command: list[str]) -> dict[str, Any]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    @staticmethod
    def _same_stream(ours: Path, theirs: Path) -> bool:
        """Whether our parts, concatenated, are byte for byte what the peer wrote."""
        digest = hashlib.sha256()
        for part in sorted(ours.glob("*.bin")):
            digest.update(part.read_bytes())
        return digest.digest() == hashlib.sha256(theirs.read_bytes()).digest()

    def loading(self) -> dict[str, Any]:
        """Shuffled samples of 2,048 tokens per second, in one process."""
        if not (self.work / "mds" / "index.json").is_file():
            self._our_builds(mds=True, repeat=1)
            self._our_builds(repeat=1)
        merged = self.work / "merged" / "set_text_document"
        shutil.rmtree(merged.parent, ignore_errors=True)
        command = [sys.executable, "-m", "keepstep", "data", "merge", str(self.work / "bin"), "--out", str(merged)]
        subprocess.run(command, check=True, capture_output=True)
        self._peer("prep-litdata", "litdata", "--data", str(merged.with_name(merged.name + ".bin")))
        ours_mds, ours_bin = self._our_pace(self.work / "mds"), self._our_pace(merged)
        streaming = self._load_peer("load-streaming", self.work / "mds")
        gpt = self._load_peer("load-gptdataset", merged)
        litdata = self._load_peer("load-litdata", self.work / "litdata")
        return {
            "load": {
                "ours_mds": ours_mds,
                "ours_bin": ours_bin,
                "streaming": streaming,
                "gptdataset": gpt,
                "litdata": litdata,
            },
            "load_ratio_streaming": ours_mds["samples_per_s"] / streaming["samples_per_s"],
            "load_ratio_gptdataset": ours_bin["samples_per_s"] / gpt["samples_per_s"],
            "load_ratio_litdata": ours_bin["samples_per_s"] / litdata["samples_per_s"],
        }

    def _load_peer(self, action: str, data: Path) -> dict[str, Any]:
        print(f"peer: {action}", file=sys.stderr)
        command = [str(self.peers), str(HERE / "data_peers.py"), action, "--data", str(data)]
        return self._run_peer([*command, "--seconds", str(self.seconds)])

    def _our_pace(self, data: Path) -> dict[str, Any]:
        return self._probe(str(data), "pace", str(self.seconds))

    def _probe(self, data: str, action: str, value: str = "") -> dict[str, Any]:
        command = [sys.executable, str(HERE / "data_probe.py"), action, data, value]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def scale(self) -> dict[str, Any]:
        """First batch, a resume at a late sample, and opening 10^12 tokens in both formats."""
        small = self.work / "mds"
        if not (small / "index.json").is_file():
            self._our_builds(mds=True, repeat=1)
        pair = self._probe(str(make_huge_pair(self.work / "huge")), "start", str(10**9))
        huge, shards = make_huge_mds(self.work / "huge-mds")
        mds = self._probe(str(huge), "start", "0") | {"shards": shards}
        return {
            "start": self._probe(str(small), "start", "0"),
            "resume_at_1e9": self._probe(str(small), "start", str(10**9)),
            "open_1t_megatron": pair,
            "open_1t_mds": mds,
            # The maximum over the two formats.
            "index_open_s": max(pair["open_s"], mds["open_s"]),
            "index_peak_gb": max(pair["peak_mib"], mds["peak_mib"]) * 2**20 / 1e9,
        }


def make_huge_pair(folder: Path) -> Path:
    """10^12 tokens in 10^9 documents, as sparse files: 2 TB in size, a few bytes on disk."""
    folder.mkdir(exist_ok=True)
    documents, tokens = 10**9, 10**12
    stream, index = folder / "set.bin", folder / "set.idx"
    with stream.open("wb") as file:
        file.truncate(2 * tokens)
    with index.open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1))
        # Every document except the last is empty; the sizes of the files still agree.
        file.truncate(34 + 20 * documents + 8)
        file.seek(34 + 4 * (documents - 1))
        file.write(struct.pack("<i", 1000))
        file.seek(34 + 12 * documents - 8)
        file.write(struct.pack("<q", 2 * (tokens - 1000)))
        file.seek(34 + 20 * documents)
        file.write(struct.pack("<q", documents))
        # The last percent of the documents starts late, so that the validation share is not empty.
        file.seek(34 + 4 * documents + 8 * (documents - documents // 100))
        file.write(struct.pack("<q", 2 * (tokens - tokens // 100)))
        file.seek(34 + 12 * documents + 8 * (documents - documents // 100))
        file.write(struct.pack("<q", documents - documents // 100))
    return folder / "set"


def make_huge_mds(folder: Path) -> tuple[Path, int]:
    """An index of 10^12 tokens whose shards, as large as the format allows, are all one file; and the shard count."""
    import numpy as np

    from keepstep.data.formats.mds_writer import SIZE_LIMIT, TokenShardWriter, write_index

    shutil.rmtree(folder, ignore_errors=True)
    writer = TokenShardWriter(folder, "shard", np.dtype("int32"))
    writer.add_rows(np.zeros((SIZE_LIMIT // (4 * SEQ_LEN) - 64, SEQ_LEN), dtype=np.int32))
    writer.flush()
    (entry,) = writer.entries
    count = 10**12 // SEQ_LEN // entry["samples"] + 1
    write_index(folder, [entry] * count)
    return folder, count


if __name__ == "__main__":
    main()
