"""The recipes of five documents, followed block by block: each is rendered, run, or has a reason why it differs."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load_config
from keepstep.launch.foundry import translate
from tests.launch.documents import REPOSITORY
from tests.launch.manifests import Manifest, helm, template
from tests.launch.recipes import (
    DOCUMENTS,
    FOLDER,
    HOW,
    Block,
    checksum,
    differences,
    document_blocks,
    read_documents,
    stored_blocks,
)
from tests.launch.test_documents import srun_words

BLOCKS = stored_blocks()
HELM = [block for block in BLOCKS if any(words[:2] == ["helm", "install"] for words in block.commands)]
SBATCH = [block for block in BLOCKS if block.how == "run" and block.text.startswith("sbatch")]
OBJECTS = [block for block in BLOCKS if block.objects]


def by_id(block: Block) -> str:
    return block.id


def test_every_block_of_the_documents_has_an_entry() -> None:
    found = read_documents(FOLDER)
    if not found:
        pytest.skip("the documents are not here: only the stored list of their blocks is checked")
    assert {name.split()[0] for name in found} == DOCUMENTS.keys()
    assert {name: checksum(text) for name, text in found.items()} == {block.id: block.sha256 for block in BLOCKS}


def test_stored_blocks_are_as_written_and_complete() -> None:
    for block in BLOCKS:
        assert block.how in HOW, block.id
        # A command that names somebody's account is shortened.
        if block.text and not block.text.endswith(" ..."):
            assert checksum(block.text) == block.sha256, block.id
        assert block.how != "differs" or (block.ours and block.why), block.id
        assert block.how != "run" or block in SBATCH or block.tests, block.id
        assert block.how != "rendered" or block in HELM or block in OBJECTS, block.id
    for name in DOCUMENTS:
        numbers = [int(block.id.split()[1]) for block in BLOCKS if block.id.startswith(f"{name} ")]
        assert numbers == list(range(1, len(numbers) + 1))


def test_tests_named_by_blocks_exist() -> None:
    for file, name in sorted({tuple(test.split("::")) for block in BLOCKS for test in block.tests}):
        tree = ast.parse((REPOSITORY / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_document_blocks_finds_fences_and_loose_commands() -> None:
    text = "a\n```bash\nhelm x\n```\n   ```\n   one\n     two\n   ```\nsbatch -N 1 y\n5   sbatch z\nsee sbatch\n"
    assert list(document_blocks(text)) == ["helm x", "one\n  two", "sbatch -N 1 y", "sbatch z"]


@pytest.mark.parametrize("block", HELM, ids=by_id)
@pytest.mark.slow
def test_helm_block_renders_as_written(block: Block) -> None:
    for words in block.commands:
        assert words[:2] == ["helm", "install"]
        chart, flags = Path(words[3]).name, words[4:]
        assert template(words[2], chart, *flags)
        linted = helm("lint", "--strict", words[3], *flags)
        assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("block", SBATCH, ids=by_id)
def test_sbatch_block_starts_the_run_as_written(block: Block, tmp_path: Path) -> None:
    (words,) = block.commands
    flags = words[words.index("slurm/launch.sb") + 1 :]
    # The script's flags with a value; -s and -S have none.
    options = {flag: value for flag, value in pairwise(flags) if flag.startswith("-") and flag not in ("-s", "-S")}
    (command,) = srun_words(REPOSITORY / "slurm/launch.sb", flags, tmp_path)
    assert f"--container-image={options['-i']}" in command
    assert any(word.startswith(f"--container-mounts={options['-m']},") for word in command)
    updates = [value for flag, value in pairwise(command) if flag == "--foundry-update"]
    _, name, file, *overrides = command[command.index("train") :]
    config = load_config(Path(file), [name, *overrides, *translate(updates)]).config
    assert (config.model.preset, config.data.path) == (options["-c"], options["-d"])
    if "-s" in flags:
        assert (str(config.checkpoint.interval), config.checkpoint.keep) == (f"{options['-I']}ba", int(options["-N"]))
        assert config.checkpoint.folder == f"{options['-F']}/job-7"
    else:
        assert not config.checkpoint.interval.value
    assert [str(config.max_duration)] == re.findall(r"max_duration=(\w+)", block.text) or "-y" not in flags


def labels_of(node: Any) -> set[str]:
    """Every label of every object and pod template, as key=value."""
    if isinstance(node, list):
        return {label for item in node for label in labels_of(item)}
    if not isinstance(node, dict):
        return set()
    own = {f"{key}={value}" for key, value in (node.get("labels") or {}).items()}
    return own.union(*map(labels_of, node.values()))


@cache
def installed(document: str) -> list[Manifest]:
    """What all Helm commands of a document create, with the job kind of its operator."""
    manifests: list[Manifest] = []
    for words in [words for each in HELM if each.id.startswith(document) for words in each.commands]:
        kind = ["--set", "jobKind=pytorchjob"] if words[3] == "charts/training" else []
        manifests += template(words[2], Path(words[3]).name, *words[4:], *kind)
    return manifests


@pytest.mark.slow
@pytest.mark.parametrize("block", OBJECTS, ids=by_id)
def test_kubectl_block_names_what_the_charts_create(block: Block) -> None:
    manifests = installed(block.id.split()[0])
    names = {f"{manifest['kind']}/{manifest['metadata']['name']}" for manifest in manifests}
    assert set(block.objects) <= names | {f"Label/{label}" for label in labels_of(manifests)}


def test_page_has_the_table_of_differences() -> None:
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    assert differences() in page, "write the table again: python -m tests.launch.recipes --table"
