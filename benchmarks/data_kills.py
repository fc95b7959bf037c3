"""Kills a large build again and again and compares it with an undisturbed one: the bytes must be the same.

python benchmarks/data_kills.py --corpus corpus.jsonl --tokenizer tokenizer.json --kills 20 --workers 1 2 3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".cache/data-kills"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--format", choices=("megatron", "mds"), default="megatron")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    command = [sys.executable, "-m", "keepstep", "data", "build", str(args.corpus), "--tokenizer", str(args.tokenizer)]
    command += ["--eos", "<|endoftext|>", "--task-bytes", "8MiB", "--format", args.format]
    command += ["--concat", "2048"] if args.format == "mds" else []
    start_s = time.perf_counter()
    subprocess.run([*command, "--out", str(args.work / "whole"), "--workers", "1"], check=True, capture_output=True)
    whole_s = time.perf_counter() - start_s
    expected = contents(args.work / "whole")
    results = []
    for workers in args.workers:
        out = args.work / f"killed-{workers}"
        kills = kill_often([*command, "--out", str(out), "--workers", str(workers)], out, args.kills, whole_s)
        same = contents(out) == expected
        results.append({"workers": workers, "kills": kills, "identical": same})
        print(json.dumps(results[-1]), flush=True)
    size_bytes = args.corpus.stat().st_size
    identical = all(result["identical"] for result in results)
    print(json.dumps({"corpus_bytes": size_bytes, "files": len(expected), "identical": identical}))
    sys.exit(not identical)


def kill_often(command: list[str], out: Path, kills: int, whole_s: float) -> int:
    """Start the build and kill its whole process group at a random moment, `kills` times; then let it finish."""
    generator = random.Random(len(command[-1]) + kills)
    done = 0
    while done < kills:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(generator.uniform(0.3, max(0.6, whole_s / 3)))
        if process.poll() is not None:
            # It finished before the kill: remove some of its work, so that every kill hits a running build.
            markers = sorted((out / ".keepstep").glob("task-*.json"))
            for marker in generator.sample(markers, len(markers) // 2):
                marker.unlink()
            (out / "dataset.json").unlink(missing_ok=True)
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done += 1
    subprocess.run(command, check=True, capture_output=True)
    return done


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    main()
