"""Lets several processes share these tests: `KEEPSTEP_TEST_SHARE=0/6` runs the first of six shares."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tests that start whole runs come last: time on a rented GPU may end before them.
    items.sort(key=lambda item: hasattr(getattr(item, "module", None), "measure"))
    share, shares = map(int, os.environ.get("KEEPSTEP_TEST_SHARE", "0/1").split("/"))
    items[:] = items[share::shares]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # Pytest shows reasons at the end, which may never come.
        print(f"\n{report.nodeid} failed:\n{report.longreprtext[-3000:]}", flush=True)
