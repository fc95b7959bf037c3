"""Questions and prompts are those that the official package gives to a model; scores are its averages."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from keepstep.core.errors import DataError, UsageError
from keepstep.evaluate.bfcl.benchmark import CATEGORIES, chosen_categories, open_benchmark
from keepstep.evaluate.bfcl.scores import score, summaries
from tests.evaluate.bfcl.official import ROOT, module


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.slow
def test_prompts_equal_the_official_ones(category: str) -> None:
    for needed in ("tenacity", "tree_sitter", "tree_sitter_java", "tree_sitter_javascript", "filelock"):
        pytest.importorskip(needed)
    entries = module("utils").load_dataset_entry(category)
    prompting = module("model_handler.utils").system_prompt_pre_processing_chat_model
    benchmark = open_benchmark()
    questions = benchmark.questions([category])
    assert [item.id for item in questions] == [entry["id"] for entry in entries]
    for question, entry in zip(questions, entries, strict=True):
        messages = prompting(copy.deepcopy(entry["question"][0]), entry["function"], entry["id"])
        assert benchmark.prompted(question) == messages


def test_folder_of_an_unpacked_package_is_read() -> None:
    assert open_benchmark(ROOT).questions(["simple_python"], 3) == open_benchmark(ROOT.parent).questions(
        ["simple_python"], 3
    )


def test_missing_benchmark_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no data") as caught:
        open_benchmark(tmp_path)
    assert "pip install --no-deps bfcl-eval==" in str(caught.value.hint)


def test_categories_and_groups_are_chosen_by_name() -> None:
    assert chosen_categories("multi_turn,simple_python") == ("simple_python", "multi_turn_base")
    assert chosen_categories("all") == CATEGORIES
    with pytest.raises(UsageError, match="'simple_pyton' is unknown") as caught:
        chosen_categories("simple_pyton")
    assert "simple_python" in str(caught.value.hint)


def test_summaries_are_the_leaderboards_averages() -> None:
    right = dict.fromkeys(CATEGORIES, 4) | {"simple_java": 1, "simple_javascript": 1, "multiple": 2, "parallel": 0}
    right |= {"irrelevance": 1, "live_multiple": 0, "live_irrelevance": 3, "live_relevance": 2, "multi_turn_base": 1}
    counts = {name: 4 if name != "live_multiple" else 20 for name in right}
    lines = [
        {"category": name, "error": None if number < right[name] else "wrong"}
        for name, count in counts.items()
        for number in range(count)
    ]
    assert summaries(score(lines)) == {
        "non_live_ast": (0.5 + 0.5 + 0 + 1) / 4,
        "live_ast": 12 / 32,
        "irrelevance": (0.25 + 0.75) / 2,
        "relevance": 0.5,
        "multi_turn_base": 0.25,
    }


def test_summary_is_missing_without_one_of_its_categories() -> None:
    scores = score([{"category": name, "error": None} for name in CATEGORIES if name != "parallel"])
    assert summaries(scores)["non_live_ast"] is None
    assert summaries(scores)["live_ast"] == 1.0
