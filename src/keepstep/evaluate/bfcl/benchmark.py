"""BFCL's questions, answers and prompts, read from the package bfcl-eval. Nothing of the package is imported.

The system prompt is assembled from the texts in the package's own `constants/default_prompts.py`, as its handlers do.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from keepstep.core.errors import DataError, UsageError, malformed_as
from keepstep.core.messages import suggestion
from keepstep.data.chat.rows import Message, Tool, tool
from keepstep.evaluate.bfcl.checker import Language

VERSION = "2026.3.23"
"""Of bfcl-eval: the one that the verdicts are compared with."""

NON_LIVE = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
)
LIVE = (
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
MULTI_TURN = ("multi_turn_base",)
CATEGORIES = (*NON_LIVE, *LIVE, *MULTI_TURN)
GROUPS = {
    "all": CATEGORIES,
    "non_live": NON_LIVE,
    "live": LIVE,
    "single_turn": (*NON_LIVE, *LIVE),
    "multi_turn": MULTI_TURN,
}
"""Names for several categories, as on the command line of bfcl-eval."""

_SYNTAX = {"python": "Python 3", "java": "Java 8 SDK", "javascript": "JavaScript"}
_PLACES = ("data", "constants/default_prompts.py", "eval_checker/multi_turn_eval/func_source_code")


@dataclass(frozen=True)
class Question:
    """One row: the messages of each of the user's turns, the functions, and what is expected."""

    id: str
    category: str
    turns: Sequence[Sequence[Message]]
    functions: Sequence[dict[str, Any]]
    """As in the file: the verdict needs their types."""
    expected: Sequence[Any] = ()
    """Possible answers; of several turns, the calls of each; empty where only relevance is judged."""
    classes: Sequence[str] = ()
    initial_config: Any = None

    @property
    def language(self) -> Language:
        """The language of the function's types."""
        return language_of(self.category)

    def shown_functions(self) -> list[dict[str, Any]]:
        """The functions as the leaderboard shows them to a model, with hints about the language."""
        shown = copy.deepcopy(list(self.functions))
        for function in shown:
            function["description"] += f" Note that the provided function is in {_SYNTAX[self.language]} syntax."
            if self.language != "python":
                for parameter in function["parameters"]["properties"].values():
                    _as_text_parameter(parameter, "Java" if self.language == "java" else "JavaScript")
        return shown

    def tools(self) -> list[Tool]:
        """The shown functions as a chat template expects them, with JSON Schema's types."""
        return [tool(function) for function in self.shown_functions()]


def language_of(category: str) -> Language:
    """The language of a category's types."""
    return "java" if category == "simple_java" else "javascript" if category == "simple_javascript" else "python"


def _as_text_parameter(parameter: dict[str, Any], language: str) -> None:
    """Arguments of Java and JavaScript are written as text; the type moves into the description."""
    kind = parameter["type"]
    of_any_type = f" This parameter can be of any type of {language} object in string representation."
    typed = f" This is {language} {kind} type parameter in string representation."
    parameter["description"] += of_any_type if kind == "any" else typed
    if kind in (("ArrayList", "Array") if language == "Java" else ("array",)):
        element = parameter.pop("items")["type"]
        parameter["description"] += f" The list elements are of type {element}; they are not in string representation."
    if language == "JavaScript" and kind == "dict" and "properties" in parameter:
        members = json.dumps(parameter.pop("properties"))
        schema = f" The dictionary entries have the following schema; they are not in string representation. {members}"
        parameter["description"] += schema
    parameter["type"] = "string"


class Benchmark:
    """The files of bfcl-eval in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._docs: dict[str, list[dict[str, Any]]] = {}

    def questions(self, categories: Iterable[str], limit: int = 0) -> list[Question]:
        """The questions of these categories, in order; `limit` of each."""
        return [question for category in categories for question in self._category(category, limit)]

    def _category(self, category: str, limit: int) -> list[Question]:
        rows = self.rows(f"data/BFCL_v4_{category}.json")
        has_answers = not category.endswith("relevance")
        answers = self.rows(f"data/possible_answer/BFCL_v4_{category}.json") if has_answers else [{}] * len(rows)
        with malformed_as(DataError, f"BFCL's {category} in {self.root} is damaged", _remedy()):
            pairs = list(zip(rows, answers, strict=True))
            return [self._question(category, *pair) for pair in (pairs[:limit] if limit else pairs)]

    def _question(self, category: str, row: dict[str, Any], answer: dict[str, Any]) -> Question:
        if answer and answer["id"] != row["id"]:
            raise ValueError(f"the answer of {row['id']} is missing")
        classes = row.get("involved_classes", ())
        functions = row["function"] if not classes else [doc for name in classes for doc in self._function_docs(name)]
        expected = answer.get("ground_truth", ())
        return Question(row["id"], category, row["question"], functions, expected, classes, row.get("initial_config"))

    def _function_docs(self, class_name: str) -> list[dict[str, Any]]:
        if class_name not in self._docs:
            self._docs[class_name] = self.rows(f"data/multi_turn_func_doc/{self.modules[class_name]}.json")
        return self._docs[class_name]

    @cached_property
    def modules(self) -> dict[str, str]:
        """The module of each simulated API: it has the name of the file that documents its functions."""
        files = _constants(self.root / "constants/executable_backend_config.py")["MULTI_TURN_FUNC_DOC_FILE_MAPPING"]
        return {name: Path(file).stem for name, file in files.items()}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of its files."""
        path = self.root / name
        with malformed_as(DataError, f"{path} is damaged", _remedy()):
            try:
                return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}", _remedy()) from None

    @cached_property
    def _prompts(self) -> dict[str, Any]:
        return _constants(self.root / "constants/default_prompts.py")

    @cached_property
    def most_steps(self) -> int:
        """Answers of a model in one turn before the leaderboard ends the conversation."""
        return int(self._prompts["MAXIMUM_STEP_LIMIT"])

    def system_prompt(self, functions: Sequence[dict[str, Any]]) -> str:
        """The leaderboard's default system prompt for models without a template for tools."""
        with malformed_as(DataError, f"the prompts in {self.root} are damaged", _remedy()):
            chosen = dict(parse_qsl(self._prompts["DEFAULT_SYSTEM_PROMPT_FORMAT"]))
            texts = self._prompts["PROMPT_STYLE_TEMPLATES"][chosen["style"]]
            form = chosen["ret_fmt"]
            call_format = texts["tool_call_no_tag"].format(
                output_format=self._prompts["OUTPUT_FORMAT_MAPPING"][form],
                param_types=self._prompts["PARAM_TYPE_MAPPING"][form],
            )
            listed = json.dumps(functions, indent=4)
            filled: str = self._prompts["_PLAINTEXT_SYSTEM_PROMPT_TEMPLATE"].format(
                persona=texts["persona"],
                task=texts["task"],
                tool_call_format=call_format,
                multiturn_behavior=texts["multiturn_behavior"],
                available_tools=texts["available_tools"].format(format=chosen["func_doc_fmt"], functions=listed),
            )
            return filled

    def prompted(self, question: Question) -> list[Message]:
        """The first turn with the system prompt; a system message of the question's own follows in the same message."""
        system = self.system_prompt(question.shown_functions())
        first, *rest = question.turns[0]
        if first["role"] == "system":
            return [{**first, "content": f"{system}\n\n{first['content']}"}, *rest]
        return [{"role": "system", "content": system}, first, *rest]


def _constants(path: Path) -> dict[str, Any]:
    """The constants that a Python file assigns, read and not run."""
    with malformed_as(DataError, f"{path} is damaged", _remedy()):
        found: dict[str, Any] = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                try:
                    found[node.targets[0].id] = ast.literal_eval(node.value)
                except ValueError:
                    continue
        return found


def _remedy() -> str:
    return f"pip install --no-deps bfcl-eval=={VERSION}, or name the folder of an unpacked one with --data"


def open_benchmark(folder: Path | None = None) -> Benchmark:
    """The benchmark in a folder `bfcl_eval`, or in the installed package."""
    if folder is None:
        found = importlib.util.find_spec("bfcl_eval")
        if found is None or not found.submodule_search_locations:
            raise DataError("the benchmark's questions are missing: bfcl-eval is not installed", _remedy())
        folder = Path(found.submodule_search_locations[0])
    elif not (folder / "data").is_dir() and (folder / "bfcl_eval").is_dir():
        folder = folder / "bfcl_eval"
    missing = [place for place in _PLACES if not (folder / place).exists()]
    if missing:
        raise DataError(f"{folder} is not the folder of bfcl-eval: it has no {missing[0]}", _remedy())
    return Benchmark(folder)


def chosen_categories(text: str) -> tuple[str, ...]:
    """Categories from `simple_python,live`: names of categories and groups, in the benchmark's order."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in (*CATEGORIES, *GROUPS):
            known = f"one of {', '.join((*GROUPS, *CATEGORIES))}"
            raise UsageError(f"--categories: {name!r} is unknown", suggestion(name, [*GROUPS, *CATEGORIES], known))
    wanted = {category for name in names for category in GROUPS.get(name, (name,))}
    return tuple(category for category in CATEGORIES if category in wanted)
