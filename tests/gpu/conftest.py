"""Lets several processes share these tests and one GPU: `KEEPSTEP_TEST_SHARE=0/6` runs the first of six shares."""

import os
from collections.abc import Iterator

import pytest
import torch

COMPILER_WARNINGS = (
    "<class 'torch.autograd.function.Function'> should not be",
    "`torch.jit.script_method` is deprecated",
)
"""What torch's compiler does itself, at whichever test compiles first. As errors they would end the compilation."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item, warning in ((item, warning) for item in items for warning in COMPILER_WARNINGS):
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}:DeprecationWarning"))
    # Tests that start whole runs come last: time on a rented GPU may end before them.
    items.sort(key=lambda item: hasattr(getattr(item, "module", None), "measure"))
    share, shares = map(int, os.environ.get("KEEPSTEP_TEST_SHARE", "0/1").split("/"))
    items[:] = items[share::shares]


@pytest.fixture(autouse=True)
def _freed_memory() -> Iterator[None]:
    """A process that keeps what its largest test took leaves too little to runs and to the other shares."""
    yield
    torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # Pytest shows reasons at the end, which may never come.
        print(f"\n{report.nodeid} failed:\n{report.longreprtext[-3000:]}", flush=True)
