"""Times our own loader in a separate process: `pace FOLDER SECONDS` or `start FOLDER SAMPLE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

BATCH = 64
SEQ_LEN = 2048


def main() -> None:
    action, path, value = sys.argv[1:4]
    start_s = time.perf_counter()
    from keepstep.config.schema import DataConfig
    from keepstep.data.loader import build_loaders

    import_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    loader = build_loaders(DataConfig(path=path), SEQ_LEN, 70_000, 1234, Path(path).parent / "cache").train
    opened_s = time.perf_counter() - start_s
    first = int(value) if action == "start" else 0
    start_s = time.perf_counter()
    loader.rows(first, 8)
    found = {"import_s": import_s, "open_s": opened_s, "first_batch_s": time.perf_counter() - start_s}
    if action == "pace":
        found["samples_per_s"] = pace(loader, float(value))
    found["peak_mib"] = peak_mib()
    print(json.dumps(found))


def peak_mib() -> float:
    """Peak memory of this process. getrusage would include the parent's memory at the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) / 1024


def pace(loader: object, seconds: float) -> float:
    """Samples per second, inputs and targets as int64, in batches."""
    rows = loader.rows  # type: ignore[attr-defined]
    at = 0
    for _ in range(20):
        rows(at, BATCH)
        at += BATCH
    count, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        rows(at, BATCH)
        at += BATCH
        count += BATCH
    return count / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
