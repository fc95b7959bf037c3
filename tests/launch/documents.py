"""Commands as the documents show them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ("coming-from", "kubernetes", "slurm", "engines", "infrastructure", "health")


def commands(program: str) -> list[list[str]]:
    """Every command line of the documents that starts with `program`, as words."""
    found = []
    for name in DOCUMENTS:
        path = REPOSITORY / "docs" / f"{name}.md"
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == program and words not in found:
                    found.append(words)
    return found
