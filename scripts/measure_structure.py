#!/usr/bin/env python3
"""Measures the layout of src/keepstep: size, coupling and longest parts of each room, and import cycles.

    python scripts/measure_structure.py                              print the tables
    python scripts/measure_structure.py --docs docs/architecture.md  rewrite them between the page's markers

A room is a folder directly under src/keepstep. Every import counts, also one inside a function. Needs no dependency.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "keepstep"
MARKERS = ("<!-- structure: written by scripts/measure_structure.py -->", "<!-- end of structure -->")


@dataclass(frozen=True)
class Part:
    """A function or a class."""

    name: str
    lines: int


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    path: Path
    lines: int
    imports: frozenset[str]
    functions: tuple[Part, ...]
    classes: tuple[Part, ...]

    @property
    def room(self) -> str:
        """Folder directly under the package; empty for the package's own files."""
        parts = self.path.relative_to(SOURCE / PACKAGE).parts
        return parts[0] if len(parts) > 1 else ""


@dataclass(frozen=True)
class Room:
    """One folder directly under the package."""

    name: str
    files: int
    lines: int
    fan_in: int
    fan_out: int
    longest_function: Part
    longest_class: Part


def read_modules() -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    paths = {_module_name(path): path for path in sorted((SOURCE / PACKAGE).rglob("*.py"))}
    return {name: _read_module(name, path, paths) for name, path in paths.items()}


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_module(name: str, path: Path, known: dict[str, Path]) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    functions = tuple(_parts(tree, (ast.FunctionDef, ast.AsyncFunctionDef)))
    imports = frozenset(_imports(tree, known) - {name})
    return Module(name, path, text.count("\n"), imports, functions, tuple(_parts(tree, (ast.ClassDef,))))


def _parts(tree: ast.Module, kinds: tuple[type[ast.stmt], ...]) -> Iterator[Part]:
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield Part(node.name, (node.end_lineno or node.lineno) - node.lineno + 1)  # type: ignore[attr-defined]


def _imports(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Modules of the package that this one imports. `from package import name` may name a module or an attribute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full_names & known.keys()) or {node.module}
    return found & known.keys()


def measure_rooms(modules: dict[str, Module]) -> list[Room]:
    """Rooms by name."""
    edges = {
        (module.room, modules[imported].room)
        for module in modules.values()
        for imported in module.imports
        if module.room and modules[imported].room and module.room != modules[imported].room
    }
    rooms = []
    for name in sorted({module.room for module in modules.values()} - {""}):
        own = [module for module in modules.values() if module.room == name]
        rooms.append(
            Room(
                name,
                len(own),
                sum(module.lines for module in own),
                sum(target == name for _, target in edges),
                sum(source == name for source, _ in edges),
                _longest(part for module in own for part in module.functions),
                _longest(part for module in own for part in module.classes),
            )
        )
    return rooms


def _longest(parts: Iterator[Part]) -> Part:
    return max(parts, key=lambda part: part.lines, default=Part("", 0))


def files_by_folder(modules: dict[str, Module]) -> dict[str, int]:
    """Python files directly in each folder, without `__init__.py`."""
    counts: dict[str, int] = {}
    for module in modules.values():
        folder = str(module.path.parent.relative_to(SOURCE / PACKAGE))
        counts[folder] = counts.get(folder, 0) + (module.path.name != "__init__.py")
    return counts


def import_cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import one another (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for imported in sorted(modules[name].imports):
            if imported not in order:
                visit(imported)
                lowest[name] = min(lowest[name], lowest[imported])
            elif imported in stack:
                lowest[name] = min(lowest[name], order[imported])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in modules:
        if name not in order:
            visit(name)
    return found


def mock_uses(modules: dict[str, Module]) -> int:
    """Occurrences of the word `mock` in the package."""
    return sum(module.path.read_text().count("mock") for module in modules.values())


def tables(modules: dict[str, Module]) -> str:
    """Both tables as Markdown."""
    lines = [
        "| room | files | lines | fan-in | fan-out | longest function | longest class |",
        "|---|---|---|---|---|---|---|",
    ]
    for room in measure_rooms(modules):
        parts = " | ".join(
            f"{part.lines} `{part.name}`" if part.lines else "–" for part in (room.longest_function, room.longest_class)
        )
        lines.append(f"| `{room.name}` | {room.files} | {room.lines:,} | {room.fan_in} | {room.fan_out} | {parts} |")
    folder, most_files = max(files_by_folder(modules).items(), key=lambda item: item[1])
    widest = max(modules.values(), key=lambda module: len(module.imports))
    lines += [
        "",
        "| total | |",
        "|---|---|",
        f"| Python lines in `src` | {sum(module.lines for module in modules.values()):,} |",
        f"| most files in one folder | {most_files} (`{folder}`) |",
        f"| most imports of one file | {len(widest.imports)} (`{widest.path.relative_to(SOURCE / PACKAGE)}`) |",
        f"| import cycles | {len(import_cycles(modules))} |",
        f"| uses of `mock` | {mock_uses(modules)} |",
    ]
    return "\n".join(lines) + "\n"


def rewrite(page: Path, text: str) -> None:
    """Put the tables between the page's markers."""
    before, _, rest = page.read_text().partition(MARKERS[0])
    _, found, after = rest.partition(MARKERS[1])
    if not found:
        raise SystemExit(f"error: {page} lacks the markers {MARKERS[0]} and {MARKERS[1]}")
    page.write_text(f"{before}{MARKERS[0]}\n{text}{MARKERS[1]}{after}")


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="page whose tables are rewritten")
    args = parser.parse_args()
    text = tables(read_modules())
    if args.docs is None:
        print(text, end="")
    else:
        rewrite(args.docs, text)


if __name__ == "__main__":
    main()
