"""The callbacks of a run: those of its configuration and those that a program passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.core.callbacks import Callback
from keepstep.core.errors import ConfigError, KeepstepError
from keepstep.core.plugins import checked_state, load_plugin


def open_callbacks(config: RunConfig) -> list[tuple[str, Callback]]:
    """The callbacks that the configuration names, each with its name."""
    found = []
    for name, options in config.observe.callbacks.items():
        made = load_plugin("callbacks", name, options or {}, "observe.callbacks")(**(options or {}))
        if not isinstance(made, Callback):
            raise ConfigError(
                f"observe.callbacks: {name} returns a {type(made).__name__}, which is no Callback",
                "derive it from keepstep.core.callbacks.Callback",
            )
        found.append((name, made))
    return found


class RunCallbacks:
    """Calls all of them, on the first process; a KeepstepError says which one failed."""

    def __init__(self, config: RunConfig, passed: Sequence[Callback] = (), *, is_first: bool = True) -> None:
        own = [(f"{number}:{type(each).__name__}", each) for number, each in enumerate(passed)]
        # Made on every process, so that a mistake is the same error everywhere.
        made = [*open_callbacks(config), *own]
        for name, callback in made:
            checked_state(callback, f"observe.callbacks: {name}")
        self._callbacks = made if is_first else []

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step was read."""
        self._call("on_step", step, lambda callback: callback.on_step(step, _numbers(metrics)))

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A validation is done."""
        self._call("on_evaluation", step, lambda callback: callback.on_evaluation(step, _numbers(metrics)))

    def save(self, step: int, path: str) -> None:
        """A checkpoint is complete."""
        self._call("on_save", step, lambda callback: callback.on_save(step, path))

    def fault(self, step: int, message: str) -> None:
        """Something went wrong, and the run knows of it."""
        self._call("on_fault", step, lambda callback: callback.on_fault(step, message))

    def state(self) -> dict[str, Any]:
        """The state of each by its name."""
        return {name: callback.state_dict() for name, callback in self._callbacks}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give each the state of its name; one that is new keeps its first state."""
        for name, callback in self._callbacks:
            if name in states:
                callback.load_state_dict(states[name])

    def _call(self, method: str, step: int, call: Callable[[Callback], None]) -> None:
        for name, callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:  # the code of others may raise anything
                raise KeepstepError(
                    f"the callback {name} failed in {method} at step {step}: {type(error).__name__}: {error}",
                    "correct it, or take it out of observe.callbacks; then start the same command to resume",
                ) from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
