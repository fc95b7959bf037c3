"""An installation has every file that the package reads, not only its modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_beside_the_modules_is_installed() -> None:
    package = ROOT / "src" / "keepstep"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["keepstep"]
    installed = {path for pattern in patterns for path in package.glob(pattern)}
    read = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "models" / "kernels" / "tiles.cu" in read
    assert read <= installed
