"""Plug-ins by path and by entry point: what can be loaded, and the error for what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.errors import ConfigError
from keepstep.core.plugins import checked_state, is_plugin, load_plugin

CODE = """
def loader(seq_len, vocab, seed, stride=1): return "made"
def narrow(seq_len): return "made"
value = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module and the metadata of an installed package with entry points."""
    (tmp_path / "plugged_code.py").write_text(CODE)
    (tmp_path / "plugged_broken.py").write_text("import there_is_no_such_module")
    info = tmp_path / "plugged-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[keepstep.data]\nnamed = plugged_code:loader\ntwice = plugged_code:loader\n"
    )
    other = tmp_path / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[keepstep.data]\ntwice = plugged_code:narrow\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["named", "plugged_code:loader"])
def test_plugin_loads_by_name_and_by_path(package: Path, name: str) -> None:
    assert is_plugin("data", name)
    assert load_plugin("data", name, {"stride": 2}, "data.path").__name__ == "loader"


@pytest.mark.parametrize("name", ["some/folder", "s3://bucket/data", "demo", "unnamed", "a:b:c", ":x", "data.jsonl"])
def test_plugin_is_neither_a_path_nor_an_address(package: Path, name: str) -> None:
    assert not is_plugin("data", name)


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("plugged_code:absent", {}, "plugged_code has no absent", "check the name"),
        ("plugged_absent:loader", {}, "cannot be imported: ModuleNotFoundError", "install its package"),
        ("plugged_broken:loader", {}, "No module named 'there_is_no_such_module'", "install its package"),
        ("plugged_code:narrow", {}, "narrow(seq_len=…, vocab=…, seed=…)", "give it these arguments"),
        ("plugged_code:loader", {"strid": 1}, "unexpected keyword argument 'strid'", "other arguments as an option"),
        ("plugged_code:value", {}, "3 is not a callable object", "give it these arguments"),
        ("nmaed", {}, "nothing of that name is installed", "did you mean named?"),
        ("twice", {}, "both have that name", "write data.path=plugged_code:"),
    ],
)
def test_plugin_errors_name_the_remedy(
    package: Path, name: str, options: dict[str, int], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_plugin("data", name, options, "data.path")
    assert message in raised.value.message
    assert "data.path" in raised.value.message
    assert hint in str(raised.value.problems[0].hint)
    assert raised.value.exit_code == 2


class WithState:
    def __init__(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> object:
        return self._state


@pytest.mark.parametrize("state", [{"set": {1}}, {1: "a number as a key"}, {"tuple": (1, 2)}])
def test_plugin_state_must_survive_json(state: object) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        checked_state(WithState(state), "it")
    assert checked_state(WithState({"list": [1, 2.5, None]}), "it") == {"list": [1, 2.5, None]}
