"""A user's mistake is two clear lines and an exit code to branch on."""

from __future__ import annotations

import pytest

from keepstep.core import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.KeepstepError, 1),
        (errors.CheckpointError, 1),
        (errors.UsageError, 2),
        (errors.ConfigError, 2),
        (errors.PreflightError, 3),
        (errors.DataError, 4),
        (errors.HardwareError, 5),
    ],
)
def test_each_kind_has_the_exit_code_that_is_promised(kind: type[errors.KeepstepError], code: int) -> None:
    error = kind("it broke", "mend it")
    assert isinstance(error, errors.KeepstepError)
    assert error.exit_code == code
    assert error.lines() == ["error: it broke", " hint: mend it"]
    assert str(error) == "it broke"


def test_a_stop_on_request_has_its_own_code_and_is_not_called_an_error() -> None:
    stopped = errors.StopRequested("saved", "start again")
    assert isinstance(stopped, errors.KeepstepError)
    assert stopped.exit_code == 75
    assert stopped.lines() == ["saved", " hint: start again"]


def test_without_a_hint_there_is_one_line() -> None:
    assert errors.DataError("gone").lines() == ["error: gone"]


def test_a_config_error_keeps_every_problem_with_its_own_hint() -> None:
    error = errors.ConfigError([errors.KeepstepError("a", "x"), errors.KeepstepError("b")])
    assert error.lines() == ["error: a", " hint: x", "error: b"]
    assert str(error) == "a\nb"


def test_missing_key_of_a_damaged_file_is_named() -> None:
    told = pytest.raises(errors.DataError, match=r"^the file is damaged: 'tokens' is missing$")
    with told, errors.malformed_as(errors.DataError, "the file is damaged"):
        raise KeyError("tokens")
