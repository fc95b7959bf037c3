"""The saved config is the config."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.config.check import broken_rules
from keepstep.config.dump import dump_config, show_config
from keepstep.config.fields import all_fields, assemble
from keepstep.config.load import load_config
from keepstep.config.presets import ALIASES, PRESETS
from keepstep.config.schema import RunConfig
from keepstep.core.units import Duration

texts = st.text(max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
free = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts.filter(bool), inner, max_size=3)
)
counts = st.builds(Duration, st.integers(1, 10**15).map(float), st.sampled_from(["ba", "tok", "sp"]))
durations = counts | st.builds(Duration, st.floats(1e-9, 1e9), st.sampled_from(["ep", "s"]))


def values_of(path: str, kind: Any, default: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if path == "name":
        return st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
    if path == "model.preset":
        return st.sampled_from(["custom", *PRESETS, *ALIASES])
    if path == "model.linear":
        return st.sampled_from(["dense", "fp8"])
    if path in ("chat.read_first", "schedule.warmup", "max_duration"):
        return counts
    if path == "resilience.lease_s":
        return st.floats(1, 3600)
    if path == "variables":
        return st.dictionaries(texts.filter(bool), free, max_size=3)
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        str: texts,
        Duration: durations,
        float: st.floats(1e-12, 0.999),
    }
    return by_type.get(kind, st.just(default))


configs = st.fixed_dictionaries(
    {path: values_of(path, field.type, field.default) for path, field in all_fields().items()}
).map(assemble)


@settings(max_examples=120)
@given(config=configs)
@pytest.mark.slow
def test_a_dumped_config_loads_back_equal(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Rules across fields are another test's; here a broken one is mended, so that the values themselves stay arbitrary.
    checkpoint = replace(config.checkpoint, skip_optimizer=False)
    parallel = replace(config.parallel, async_tensor=False)
    compute = replace(config.compute, attention="auto")
    data = replace(config.data, order="keepstep")
    lora = replace(config.lora, rank=0, base="bf16")
    objectives = {
        "preference": replace(config.preference, method="none", label_smoothing=0.0),
        "rl": replace(config.rl, method="none"),
    }
    resilience = replace(config.resilience, survive=False)
    model = replace(config.model, partial_rotary_factor=1.0, rotary_local_base=0.0, head_qk_norm=True)
    sections = {"checkpoint": checkpoint, "compute": compute, "data": data, "lora": lora, "parallel": parallel,
                "resilience": resilience}  # fmt: skip
    config = replace(config, reproducible="resume", model=model, **sections, **objectives)
    assert list(broken_rules(config)) == []
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path).config == config


@pytest.mark.slow
def test_every_preset_survives_the_trip_and_so_does_what_show_prints(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    for name in PRESETS:
        loaded = load_config(None, [f"model={name}", "name=${model.preset}", "variables.a={b: [1, 'no', null, .inf]}"])
        for text in (dump_config(loaded.config), show_config(loaded), show_config(loaded, changed_only=True)):
            path.write_text(text)
            assert load_config(path).config == loaded.config


def test_the_dump_names_every_field() -> None:
    def count(section: Any) -> int:
        return sum(count(v) if is_dataclass(v) and not isinstance(v, Duration) else 1 for v in values(section))

    def values(section: Any) -> list[Any]:
        return [getattr(section, field.name) for field in fields(section)]

    assert len(all_fields()) == count(RunConfig())
