"""Lets several processes share these tests: `KEEPSTEP_TEST_SHARE=0/6` runs the first of six shares."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share, shares = map(int, os.environ.get("KEEPSTEP_TEST_SHARE", "0/1").split("/"))
    items[:] = items[share::shares]
