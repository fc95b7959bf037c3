"""The help of each setting: the text under its line in schema.py, read from the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache

from keepstep.config import schema
from keepstep.config.fields import all_fields, all_sections


@cache
def field_help() -> Mapping[str, str]:
    """Help by dotted path, for fields and for sections, each as one line."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    sections = {"": schema.RunConfig, **all_sections()}
    texts = {path: inspect.cleandoc(kind.__doc__ or "") for path, kind in sections.items()}
    for path, kind in sections.items():
        for name, text in _texts_below(classes[kind.__name__]):
            texts[f"{path}.{name}" if path else name] = text
    return {path: " ".join(texts.get(path, "").split()) for path in (*sections, *all_fields())}


def _texts_below(section: ast.ClassDef) -> list[tuple[str, str]]:
    found = []
    for line, after in zip(section.body, section.body[1:], strict=False):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found.append((line.target.id, after.value.value))
    return found
