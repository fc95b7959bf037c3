"""Compiled code of another version of keepstep is not used again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from keepstep import models
from keepstep.parallel.apply import name_compile_cache


def test_another_version_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    name_compile_cache()
    tag = torch.compiler.config.cache_key_tag
    upgraded = shutil.copytree(Path(models.__file__).parent, tmp_path / "models")
    monkeypatch.setattr(models, "__file__", str(upgraded / "__init__.py"))
    with (upgraded / "ops" / "rope.py").open("a") as changed:
        changed.write("# another argument\n")
    name_compile_cache()
    assert tag.startswith("keepstep ")
    assert torch.compiler.config.cache_key_tag not in ("", tag)
