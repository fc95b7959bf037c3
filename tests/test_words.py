"""The field's words are used: the private words for them do not come back."""

from __future__ import annotations

import re

import pytest

from tests.doc_blocks import ROOT

PLACES = (
    "src", "docs", "charts", "slurm", "infra", "recipes", "docker", "scripts", "benchmarks", "Makefile", "README.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml",
)  # fmt: skip
KINDS = {".py", ".cu", ".md", ".yaml", ".yml", ".tpl", ".tf", ".sh", ".sb", ".txt", ".js", ".html", ".css", ".toml", ""}

WORDS = {
    r"anew|afresh": "again",
    r"heed(s|ed|ing)?": "respect",
    r"mend(s|ed|ing)?": "repair, fix",
    r"beside": "next to, compared with",
    r"begun": "started",
    r"(is|are|was|were|be|been) told": "is reported, gets",
    r"go(es|ing)? on|went on": "continue, resume",
    r"(lies|lay|lie) (in|on|at|there|below|outside|between|within|next)": "is",
    r"at once": "together, immediately",
    r"(matrix|backward|forward|head's|joined) products?|products? of matrices": "matmul, gemm",
    r"played|plays": "simulated; scenarios",
    r"turned? (queries|keys|back)|rotary turns?": "rope",
    r"project_and_turn|split_and_turn|turn_back|turned_\w+": "qkv_rope, split_apply_rope",
    r"joined_products": "fused_matmuls",
    r"at_once|hands_over|keeps_activation": "a field of BlockPlan",
    r"output_token": "grad_placeholder",
    r"NO_LOSS|IGNORED": "IGNORE_INDEX",
    r"Pulse|PULSE_FILE": "Heartbeat",
    r"Meetings?": "Rendezvous",
    r"Keeper|Rewind|Readback|Moment": "SnapshotPolicy, Rollback, AsyncMetrics, StepState",
    r"Nearby|Finder|StepFolder": "ProcessGroupInfo, NodeLocalLoader, CheckpointLoader, CommittedCheckpoint",
    r"Crew|Grid": "WorkerPool, ParallelMesh",
    r"texttest|tooltest": "text_perplexity, tool_calls",
    r"[Tt]old before": "predicted, then measured",
}
"""Pattern of a private word, and the word of PyTorch, Megatron-LM and the papers."""

ALLOWED = (
    # The flag of `keepstep data verify`, which stays.
    r"--mend\b|args\.mend|\bmend: bool|\"mend\"",
    # A file in run folders of earlier versions.
    r"begun\.json",
    # The old name of a setting, which files may still use, and the key in outputs of `keepstep bench step`.
    r"joined_products: bool|joined_products=config",
    r"compute\.joined_products|\"joined_products\"|`compute\.joined_products`",
)


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """Every line with its place, without the allowed words."""
    allowed = re.compile("|".join(ALLOWED))
    return [
        (f"{path.relative_to(ROOT)}:{number}", allowed.sub("", line))
        for place in PLACES
        for path in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")))
        if path.is_file() and path.suffix in KINDS and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


@pytest.mark.parametrize(("pattern", "instead"), WORDS.items(), ids=WORDS.values())
def test_private_word_is_gone(pattern: str, instead: str, lines: list[tuple[str, str]]) -> None:
    word = re.compile(rf"\b(?:{pattern})\b")
    left = [f"{place}: {line.strip()}" for place, line in lines if word.search(line)]
    assert not left, f"write: {instead}\n" + "\n".join(left)
