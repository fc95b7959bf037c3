"""`keepstep data check --against bfcl`: whether a training set holds a question, a function or an answer of BFCL.

- Normalised match: a message or a description with the same words; a tool with the same name and parameters; a call
  that the benchmark accepts. Case and punctuation do not count.
- n-gram match: a message or a description that has n words in a row in common with a question or a description.

All categories of the package are compared, also those that `keepstep eval bfcl` does not ask.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, UsageError
from keepstep.data.chat.files import (
    RejectedRow,
    atomic_text_file,
    conversation_files,
    holds_conversations,
    read_conversations,
)
from keepstep.data.chat.rows import Conversation, calls_of
from keepstep.data.prepare.records import RecordOptions, Rejects, texts_of
from keepstep.evaluate.ast_check import MalformedCall
from keepstep.evaluate.bfcl.benchmark import VERSION, Benchmark
from keepstep.evaluate.bfcl.decode import python_calls

NGRAM = 8
_MOST_LISTED = 100


@dataclass(frozen=True)
class Match:
    """Something of the benchmark in a row."""

    kind: str
    """question, function or answer"""
    by: str
    """normalised or ngram"""
    benchmark_id: str
    text: str


class BenchmarkIndex:
    """The benchmark's texts, functions and answers, by what a row is compared with."""

    def __init__(self, benchmark: Benchmark, ngram: int = NGRAM) -> None:
        self.ngram = ngram
        self.counts: Counter[str] = Counter()
        self._texts: dict[str, tuple[str, str]] = {}
        self._ngrams: dict[str, tuple[str, str]] = {}
        self._signatures: dict[tuple[str, ...], str] = {}
        self._answers: dict[str, list[tuple[str, dict[Any, Any]]]] = {}
        for path in sorted((benchmark.root / "data").rglob("*.json")):
            name = path.relative_to(benchmark.root)
            # Not the data of older versions, and not the list of ids for prompts in other formats.
            if "unused_datasets" not in name.parts and not name.stem.endswith("format_sensitivity"):
                for number, row in enumerate(benchmark.rows(str(name)), start=1):
                    self._add(row, str(row.get("id", f"{path.stem}:{number}")))

    def _add(self, row: dict[str, Any], identity: str) -> None:
        for turn in row.get("question", ()):
            for message in turn:
                if message["role"] == "user":
                    self._add_text("question", message["content"], identity)
        for function in [*row.get("function", ()), *([row] if "parameters" in row else [])]:
            self.counts["function"] += 1
            self._signatures.setdefault(_signature(function["name"], function["parameters"]), identity)
            self._add_text("function", function["description"], identity)
        for expected in row.get("ground_truth", ()):
            for name, accepted in _accepted_calls(expected):
                self.counts["answer"] += 1
                self._answers.setdefault(name, []).append((identity, accepted))

    def _add_text(self, kind: str, text: str, identity: str) -> None:
        words = _words(text)
        self.counts["question"] += kind == "question"
        self._texts.setdefault(" ".join(words), (kind, identity))
        for gram in _grams(words, self.ngram):
            self._ngrams.setdefault(gram, (kind, identity))

    def text_match(self, text: str) -> Match | None:
        """The first match of a text."""
        words = _words(text)
        if found := self._texts.get(" ".join(words)) if words else None:
            return Match(found[0], "normalised", found[1], text[:200])
        gram = next((gram for gram in _grams(words, self.ngram) if gram in self._ngrams), None)
        return Match(self._ngrams[gram][0], "ngram", self._ngrams[gram][1], gram) if gram else None

    def conversation_matches(self, conversation: Conversation) -> list[Match]:
        """All matches of a row."""
        texts = [message["content"] for message in conversation.messages if message["role"] != "tool"]
        found = [self.text_match(text) for text in texts]
        for item in conversation.tools:
            function = item["function"]
            found.append(self.text_match(function["description"]))
            identity = self._signatures.get(_signature(function["name"], function["parameters"]))
            found.append(Match("function", "normalised", identity, function["name"]) if identity else None)
        for message in conversation.messages:
            found += [self._answer_match(name, given) for name, given in calls_of(message)]
        return [match for match in found if match]

    def _answer_match(self, name: str, given: dict[str, Any]) -> Match | None:
        for identity, accepted in self._answers.get(_plain(name), ()) if given else ():
            if all(_plain(value) in accepted.get(_plain(key), ()) for key, value in given.items()):
                return Match("answer", "normalised", identity, f"{name}({json.dumps(given, default=repr)[:160]})")
        return None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(words: list[str], size: int) -> Iterator[str]:
    return (" ".join(words[start : start + size]) for start in range(len(words) - size + 1))


def _plain(value: Any) -> str:
    """A value as text without case and punctuation; 1 and 1.0 are the same, and so are a list and a tuple."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    written = value if isinstance(value, str) else json.dumps(value, default=repr, sort_keys=True)
    return " ".join(_words(written))


def _signature(name: str, parameters: Any) -> tuple[str, ...]:
    return _plain(name), *sorted(_plain(key) for key in parameters.get("properties", {}))


def _accepted_calls(expected: Any) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """Names and accepted values of possible answers, or of the calls of a turn."""
    if isinstance(expected, dict):
        for name, parameters in expected.items():
            yield _plain(name), {_plain(key): {_plain(value) for value in known} for key, known in parameters.items()}
    for text in expected if isinstance(expected, list) else ():
        try:
            for name, given in python_calls(f"[{text}]"):
                yield _plain(name), {_plain(key): {_plain(value)} for key, value in given.items()}
        except MalformedCall:
            continue


@dataclass
class Report:
    """What was compared, and what was found."""

    rows: int = 0
    rejected_rows: int = 0
    contaminated_rows: int = 0
    matches: list[dict[str, Any]] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, found: Iterable[Match]) -> bool:
        """Count a row and its matches; True if it has none."""
        listed = list(dict.fromkeys(found))
        self.rows += 1
        self.contaminated_rows += bool(listed)
        for match in listed:
            self.by_kind[f"{match.kind}_{match.by}"] += 1
            if len(self.matches) < _MOST_LISTED:
                self.matches.append({"row": place, **vars(match)})
        return not listed


def check_contamination(
    path: Path,
    index: BenchmarkIndex,
    text_field: str = "text",
    progress: Callable[[str], None] = lambda _: None,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Compare conversations, or plain text, with the benchmark; the report as plain values.

    Conversations without a match are written to `kept`.
    """
    report = Report()
    if holds_conversations(path, text_field):
        with atomic_text_file(kept) if kept else nullcontext() as file:
            for item in read_conversations(path):
                if isinstance(item, RejectedRow):
                    report.rejected_rows += 1  # training rejects it, too
                    continue
                is_clean = report.add(f"{item.file}:{item.row}", index.conversation_matches(item.conversation))
                if file and is_clean:
                    file.write(json.dumps(item.conversation.row(), ensure_ascii=False) + "\n")
                if report.rows % 10_000 == 0:
                    progress(f"compared {report.rows:,} rows")
        files = conversation_files(path)
    elif kept:
        raise UsageError(f"--kept writes conversations, and {path} holds text", "remove what was found from the text")
    else:
        files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
        rejects = Rejects()
        for number, text in enumerate(texts_of([str(path)], RecordOptions(text_field), rejects), start=1):
            match = index.text_match(text)
            report.add(f"document {number}", [match] if match else [])
        report.rejected_rows = rejects.total
    if not report.rows:
        raise DataError(f"{path} holds no row to compare", "give conversations, or text with --field for its column")
    compared = {"questions": index.counts["question"], "functions": index.counts["function"]}
    return {
        "against": f"bfcl-eval {VERSION}",
        **compared,
        "answers": index.counts["answer"],
        "ngram": index.ngram,
        "data": str(path),
        "data_sha256": _sha256(files),
        **vars(report),
    }


def _sha256(files: Iterable[Path]) -> str:
    """Of all files: the report belongs to these bytes."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
