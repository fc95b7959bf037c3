#!/usr/bin/env python3
"""Writes requirements/hashed.txt: the dependencies at the versions of pinned.txt, with the hash of every file.

    python scripts/write_hashes.py          after a change of pyproject.toml or requirements/pinned.txt

Needs uv (in the extra `test`) and a package index. pip installs from the file only what has one of these hashes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "requirements" / "hashed.txt"
HEAD = "# Written by scripts/write_hashes.py: pip install --require-hashes -r requirements/hashed.txt\n"
COMMAND = ["pip", "compile", "pyproject.toml", "--constraint", "requirements/pinned.txt", "--generate-hashes"]
# One file for every platform and Python that we support, without the address of the index that answered.
OPTIONS = ["--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]


def main() -> int:
    """Resolve, and replace the file if that worked."""
    done = subprocess.run(
        [sys.executable, "-m", "uv", *COMMAND, *OPTIONS, *sys.argv[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print("error: the dependencies cannot be resolved", file=sys.stderr)
        print(" hint: --default-index URL names another package index", file=sys.stderr)
        return 1
    OUTPUT.write_text(HEAD + done.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
