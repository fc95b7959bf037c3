"""Remove exact and near duplicates from raw text, before it is tokenised.

Every document gets a fingerprint (exact) and a MinHash signature of its word shingles (near). Documents that agree in a
complete band of the signature are candidates; candidates whose signatures agree above the threshold are duplicates. The
first one in input order is kept. The output is JSONL, with a report next to it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keepstep.core.files import sync_file, write_json
from keepstep.data.order import mix_array
from keepstep.data.prepare.records import RecordOptions, Rejects, require_texts, texts_of

HASHES = 128
BANDS = 32
_WORDS = re.compile(r"\w+")
_SPACES = re.compile(r"\s+")
_FIRST_CAPACITY = 1024
_NONE = -1
_ALL_BANDS = np.arange(BANDS)
_SEEDS = mix_array(np.arange(1, HASHES + 1, dtype=np.uint64))


@dataclass(frozen=True)
class DedupReport:
    """How many documents were removed and kept."""

    documents: int
    exact_duplicates: int
    near_duplicates: int
    kept: int
    rejected: int
    threshold: float


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ only in case and white space."""
    return hashlib.blake2b(_SPACES.sub(" ", text).strip().lower().encode(), digest_size=16).digest()


def signature(text: str, shingle: int = 5) -> NDArray[np.uint64]:
    """MinHash over shingles of words: the share of equal hashes estimates the share of common shingles."""
    words = [word.lower() for word in _WORDS.findall(text)]
    count = max(1, len(words) - shingle + 1)
    # A text without words is its own shingle; otherwise all drawings and formulas would be duplicates.
    raw = {" ".join(words[start : start + shingle]) if words else text for start in range(count)}
    hashes = np.frombuffer(
        b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in sorted(raw)), np.uint64
    )
    lowest = np.full(HASHES, np.iinfo(np.uint64).max, dtype=np.uint64)
    for first in range(0, len(hashes), 4096):
        block = mix_array(hashes[first : first + 4096, None] ^ _SEEDS)
        np.minimum(lowest, block.min(axis=0), out=lowest)
    return lowest


class Signatures:
    """Signatures of documents, looked up by their bands. Plain arrays, because dicts would take 7 KB for each document.

    Each bucket is a linked list of documents: `_newest` holds the last document of a bucket, `_before` the previous
    document of the same bucket.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hashes = np.zeros((_FIRST_CAPACITY, HASHES), dtype=np.uint64)
        self._before = np.zeros((_FIRST_CAPACITY, BANDS), dtype=np.int32)
        self._newest = np.full((BANDS, _FIRST_CAPACITY), _NONE, dtype=np.int32)

    def similar(self, mine: NDArray[np.uint64], threshold: float) -> bool:
        """Whether a document that agrees in a complete band agrees in at least this share of all hashes."""
        links = self._newest[_ALL_BANDS, self._buckets(mine)]
        found = []
        while (linked := links != _NONE).any():
            found.append(links[linked])
            links = np.where(linked, self._before[links, _ALL_BANDS], _NONE)
        if not found:
            return False
        equal = self._hashes[np.unique(np.concatenate(found))] == mine
        # Documents with other bands may share the bucket.
        banded = equal.reshape(len(equal), BANDS, -1).all(axis=2).any(axis=1)
        return bool((banded & (equal.mean(axis=1) >= threshold)).any())

    def add(self, mine: NDArray[np.uint64]) -> None:
        """Add a signature."""
        if self.count == len(self._hashes):
            capacity = self.count + self.count // 8
            # In place where possible: a copy would need twice the memory for a moment.
            self._hashes.resize((capacity, HASHES), refcheck=False)
            self._before.resize((capacity, BANDS), refcheck=False)
        if self.count == self._newest.shape[1]:
            self._newest = np.full((BANDS, 2 * self.count), _NONE, dtype=np.int32)
            for number in range(self.count):
                self._link(number)
        self._hashes[self.count] = mine
        self._link(self.count)
        self.count += 1

    def _link(self, number: int) -> None:
        buckets = self._buckets(self._hashes[number])
        self._before[number] = self._newest[_ALL_BANDS, buckets]
        self._newest[_ALL_BANDS, buckets] = number

    def _buckets(self, mine: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bands = mix_array(mine.reshape(BANDS, -1).sum(axis=1, dtype=np.uint64))
        return bands & np.uint64(self._newest.shape[1] - 1)


class Deduplicator:
    """Classifies one document after the other as new or as a duplicate."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._exact: set[bytes] = set()
        self._kept = Signatures()

    def classify(self, text: str) -> str:
        """`exact`, `near`, or empty for a new document."""
        key = fingerprint(text)
        if key in self._exact:
            return "exact"
        self._exact.add(key)
        if self._threshold >= 1:
            return ""
        mine = signature(text)
        if self._kept.similar(mine, self._threshold):
            return "near"
        self._kept.add(mine)
        return ""


def deduplicate(inputs: Sequence[str], out: Path, *, threshold: float, options: RecordOptions) -> DedupReport:
    """Write the documents that are kept to `out` (JSONL), and the report to `out`.report.json."""
    deduplicator = Deduplicator(threshold)
    rejects = Rejects()
    counts = {"": 0, "exact": 0, "near": 0}
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for text in require_texts(texts_of(inputs, options, rejects), rejects):
                found = deduplicator.classify(text)
                counts[found] += 1
                if not found:
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        sync_file(part)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    report = DedupReport(sum(counts.values()), counts["exact"], counts["near"], counts[""], rejects.total, threshold)
    write_json(out.with_name(out.name + ".report.json"), asdict(report))
    return report
