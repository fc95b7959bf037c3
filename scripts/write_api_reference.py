#!/usr/bin/env python3
"""Writes docs/api.md, the reference of the library, from the signatures and docstrings of its names.

    python scripts/write_api_reference.py          rewrite the page

Needs keepstep and its dependencies.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

from keepstep.core.callbacks import Callback
from keepstep.library.data_stream import DataStream, open_stream
from keepstep.library.model import LoadedModel, load
from keepstep.library.run import Checkpoint, Run
from keepstep.library.training import train

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
NAMES: dict[str, Any] = {
    "keepstep.train": train,
    "keepstep.Callback": Callback,
    "keepstep.Run": Run,
    "Checkpoint": Checkpoint,
    "keepstep.load": load,
    "LoadedModel": LoadedModel,
    "keepstep.data.open": open_stream,
    "DataStream": DataStream,
}
"""What users write, in the order of the page. Names without `keepstep.` are what the others return."""
HEAD = """# API

Written by `scripts/write_api_reference.py` from the docstrings. [Library](library.md) explains it with examples.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, item in NAMES.items():
        parts.append(_of_class(name, item) if inspect.isclass(item) else _of_function(name, item, "##"))
    return "\n".join(parts)


def _of_function(name: str, function: Any, level: str) -> str:
    return f"{level} {name}\n\n```\n{_header(name, function)}\n```\n\n{_paragraphs(function)}\n"


def _header(name: str, function: Any) -> str:
    """Parameters and result as they are in the source: the same text with every version of Python."""
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    text = "\n".join(line for line in lines if line.strip() != "self,").removesuffix(":")
    return re.sub(r"^def \w+\((self, |self)?", f"{name}(", text)


def _of_class(name: str, item: type) -> str:
    parts = [f"## {name}\n\n{_paragraphs(item)}\n"]
    if item.__init__.__doc__ and not item.__init__.__doc__.startswith("Initialize"):
        parts.append(f"- `{_header(name, item.__init__).removesuffix(' -> None')}`: {_line(item.__init__)}")
    parts += [f"- `{field}`: {help_text}" for field, help_text in _attributes(item)]
    methods = []
    for member, value in vars(item).items():
        if isinstance(value, property):
            parts.append(f"- `{member}`: {_line(value)}")
        elif inspect.isfunction(value) and not member.startswith("_"):
            methods.append(_of_function(member, value, "###"))
    return "\n".join(parts).rstrip() + "\n\n" + "\n".join(methods)


def _attributes(item: type) -> list[tuple[str, str]]:
    """Attributes with a docstring below them, in the class and in `__init__`."""
    (tree,) = ast.parse(inspect.getsource(item)).body
    assert isinstance(tree, ast.ClassDef)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.FunctionDef))]
    return [
        (_name(one), " ".join(text.value.value.split()))
        for body in bodies
        for one, text in itertools.pairwise(body)
        if isinstance(one, ast.Assign | ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


def _name(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return ast.unparse(target).removeprefix("self.")


def _paragraphs(item: Any) -> str:
    text = inspect.getdoc(item)
    assert text, f"{item} has no docstring"
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _line(item: Any) -> str:
    return " ".join(_paragraphs(item).split())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
