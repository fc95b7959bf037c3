"""The official checker of bfcl-eval, for comparison; tests that need it are skipped where it is not installed.

It imports the clients of every model provider for one setting of its models. Here that setting is given instead; all
other code is the package's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("bfcl_eval") is None:
    reason = "bfcl-eval is not installed: pip install --no-deps -r requirements/bfcl.txt"
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(importlib.util.find_spec("bfcl_eval").submodule_search_locations[0])  # type: ignore[union-attr, index]
AST_CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "live_simple",
    "live_multiple", "live_parallel", "live_parallel_multiple",
)  # fmt: skip


def module(name: str) -> Any:
    """A module of the package, imported without the clients of model providers."""
    settings = ModuleType("bfcl_eval.constants.model_config")

    class AnyModel(dict):  # type: ignore[type-arg]
        def __missing__(self, name: str) -> Any:
            return SimpleNamespace(underscore_to_dot=False)

    settings.MODEL_CONFIG_MAPPING = AnyModel()  # type: ignore[attr-defined]
    sys.modules.setdefault("bfcl_eval.constants.model_config", settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"bfcl_eval.{name}")


def rows(category: str, folder: str = "") -> list[dict[str, Any]]:
    """Questions of a category, or with `possible_answer` their answers."""
    text = (ROOT / "data" / folder / f"BFCL_v4_{category}.json").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
