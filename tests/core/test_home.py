"""Users without a home: containers run as numbers that no file knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.errors import UsageError
from keepstep.core.files import home_folder
from keepstep.launch.profile_kinds import SlurmProfile
from keepstep.launch.profiles import load_profile
from keepstep.observe.history import default_cache_dir


@pytest.fixture
def nobody_in_particular(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.mark.usefixtures("nobody_in_particular")
def test_a_user_without_a_home_sees_runs_and_submits_them() -> None:
    assert home_folder() == Path("/")
    assert default_cache_dir() == Path("/.cache/keepstep/runs")
    assert load_profile(SlurmProfile, "azure-h100")
    with pytest.raises(UsageError, match="there is no profile"):
        load_profile(SlurmProfile, "~/mine.yaml")
