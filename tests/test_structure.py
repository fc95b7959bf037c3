"""The layout keeps its promises: no import cycle, no mock, small folders, short functions; its table is current."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.doc_blocks import ROOT

MOST_LINES = 67_950
"""Python lines in src. Delete before you add; raise this on purpose, not by accident.

It was 42,700 before the library, plug-ins, the lease, the rendezvous gate, completion, priced requests, `serve`, GGUF
and eight more Hugging Face families came, 51,000 before experts, BFCL, preference and reinforcement learning, 55,500
before replicas that outlive each other, 59,500 before frozen weights in fp8 and NF4, a faster Muon and `bench step
--tune`, kernels for experts and survivors on several nodes, 62,400 before attention kernels for packed documents, and
63,800 before activation offloading, snapshots in memory for any layout and JSON schemas that are enforced or refused,
65,000 before feed-forwards in chunks, 65,400 before literals of Java and JavaScript in generated calls, 65,700 before
kernels that write fp8 directly, gradients of experts and of the head in fp8, and GRPO's choice of prompts, 67,000
before fp8 kernels that write both copies, rope inside the projection for heads of 128, a `--tune` that keeps what it
has, plans of given weights, attention in heads of 96, the leaderboard and rewarded answers on the page, and
`microbatch: auto`, 67,700 before templates in Ollama's language, 67,800 before conversations whose next turn computes
only what is new.
"""


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_structure", ROOT / "scripts" / "measure_structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module by name.
    sys.modules["measure_structure"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_modules_have_no_import_cycle(structure: ModuleType) -> None:
    assert structure.import_cycles(structure.read_modules()) == []


@pytest.mark.slow
def test_package_never_uses_mock(structure: ModuleType) -> None:
    assert structure.mock_uses(structure.read_modules()) == 0


@pytest.mark.slow
def test_folders_stay_small(structure: ModuleType) -> None:
    counts = structure.files_by_folder(structure.read_modules())
    assert {folder: files for folder, files in counts.items() if files > 17} == {}


@pytest.mark.slow
def test_functions_fit_on_a_screen(structure: ModuleType) -> None:
    parts = [(module.name, part) for module in structure.read_modules().values() for part in module.functions]
    assert [(name, part.name, part.lines) for name, part in parts if part.lines > 66] == []


@pytest.mark.slow
def test_files_import_few_modules(structure: ModuleType) -> None:
    modules = structure.read_modules().values()
    assert {module.name: len(module.imports) for module in modules if len(module.imports) >= 20} == {}


@pytest.mark.slow
def test_source_stays_small(structure: ModuleType) -> None:
    assert sum(module.lines for module in structure.read_modules().values()) < MOST_LINES


@pytest.mark.slow
def test_table_on_the_page_is_current(structure: ModuleType) -> None:
    """Names must match; numbers may drift by a tenth before somebody has to run `make structure`."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = page.partition(structure.MARKERS[0])[2].partition(structure.MARKERS[1])[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\d,]+) \| (\d+) \| (\d+) \|", shown, re.M)
    rooms = structure.measure_rooms(structure.read_modules())
    assert [row[0] for row in rows] == [room.name for room in rooms]
    for row, room in zip(rows, rooms, strict=True):
        shown_numbers = [int(number.replace(",", "")) for number in row[1:]]
        measured = [room.files, room.lines, room.fan_in, room.fan_out]
        assert shown_numbers == pytest.approx(measured, rel=0.1, abs=2), f"{room.name}: run make structure"
