"""The reference page and the editors' schema are made from the schema and agree with the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from keepstep.config.fields import all_fields, all_sections, field_help
from keepstep.config.load import load_config
from keepstep.config.parse import Problems, read_yaml
from keepstep.config.presets import PRESETS
from keepstep.config.reference import json_schema, reference_of, reference_page
from keepstep.config.values import plain
from keepstep.core.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_and_section_has_help() -> None:
    assert [path for path in (*all_fields(), *all_sections()) if not field_help()[path]] == []


def test_the_reference_page_is_up_to_date() -> None:
    message = "run: keepstep config reference > docs/reference.md"
    assert (DOCS / "reference.md").read_text() == reference_page(), message


def test_the_reference_of_one_field_is_short() -> None:
    assert reference_of(["checkpoint.keep"]).startswith(
        "checkpoint.keep: whole number, at least 0, default 3\n  Number of newest"
    )
    with pytest.raises(UsageError) as caught:
        reference_of(["checkpoint.kepe"])
    assert caught.value.hint == "did you mean checkpoint.keep?"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read(text: str) -> Any:
    node = read_yaml(text, "run.yaml", Problems())
    assert node is not None
    return plain(node)


@pytest.mark.parametrize(
    "text",
    [
        "model: llama-1b\noptimizer: {lr: 1e-4, betas: [0.9, 0.99]}\nmax_duration: 100ba\n",
        "model:\nschedule: ${variables.s}\nvariables: {s: wsd}\n",
        "name: 125\nmodel: {rotary_scaling: null, layers: '${variables.l}'}\nvariables: {l: 1}\n",
        "evaluate: {interval: 1.5ep}\n",
        "parallel: {replicate: 2, shard: -1}\n",
        "compute: {joined_products: false}\n",
        *(f"model: {name}\n" for name in PRESETS),
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(text: str, validator: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    load_config(path)
    validator.validate(read(text))


@pytest.mark.parametrize(
    "text",
    [
        "optimzer: {lr: 1}\n",
        "optimizer: {lr: x}\n",
        "optimizer: {lr: 0}\n",
        "optimizer: {betas: [0.9]}\n",
        "model: lama-1b\n",
        "parallel: 2\n",
        "max_duration: 100\n",
        "precision: bf61\n",
        "seed: 1.5\n",
        "seed: 1e14\n",
        "parallel: {shard: 0}\n",
        "schedule: {stage_at: 1}\n",
        "compute: {compile: yes}\n",
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(text: str, validator: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(read(text))
