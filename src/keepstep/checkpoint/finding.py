"""Finding the step to go on from and loading it whole: repair, then fall back, and no damage loads in silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from keepstep.checkpoint import commit, parity
from keepstep.checkpoint.layout import split_state
from keepstep.checkpoint.manifest import StepFolder
from keepstep.checkpoint.nearby import Nearby
from keepstep.checkpoint.restore import restore
from keepstep.checkpoint.retention import reading
from keepstep.checkpoint.store import Store, UnreadableError, open_store
from keepstep.checkpoint.together import Together
from keepstep.config.schema import CheckpointConfig
from keepstep.core.errors import CheckpointError, StateMismatchError

LOOK_REMEDY = "see that the place exists and can be reached, and that this user or these credentials may read it"
_WAITS_S = (1.0, 5.0, 20.0)
"""Between tries to read a step: a storage that hiccups must not cost the steps since an older one."""
BEGAN_AT = "resume_from"
"""In a step's metadata: the step that its run began from, where `resume_from` named one."""


@dataclass(frozen=True)
class LoadedStep:
    """What a load gave back beside the tensors it filled."""

    step: int
    where: StepFolder
    folder: str
    """The step's folder, written out."""
    values: dict[str, Any]
    metadata: Mapping[str, Any]
    world_size: int
    """Processes that saved it."""
    bytes_read: int
    """What this process read."""


class Finder:
    """The loading half of a `Checkpointer`; its methods are documented there."""

    def __init__(
        self,
        store: Store,
        config: CheckpointConfig,
        together: Together,
        nearby: Nearby | None,
        warn: Callable[..., None],
    ) -> None:
        self._store = store
        self._config = config
        self._together = together
        self._nearby = nearby
        self._warn = warn
        self.begins = False
        """Whether the steps found last are the one that `resume_from` names, and not the run's own."""
        self.own_after: int | None = None
        """Without `autoresume`: own steps committed after this sequence number count all the same."""

    def find(self) -> StepFolder | None:
        """The newest committed step, or the one that `resume_from` names; None when there is none."""
        steps = self._candidates()
        return steps[0] if steps else None

    def load(self, where: StepFolder, into: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """Fill the tensors of `into` in place and return the plain values; CheckpointError names what is damaged.

        Whole sections (top-level keys) may be left out of `into`; without `strict`, single tensors as well. What lies
        below the key `rank` is filled if a process of this number saved it.
        """
        return self._load(where, into, strict).values

    def load_newest(self, into: dict[str, Any], strict: bool = True, only: str = "") -> LoadedStep | None:
        """Load the newest whole step, repairing it or falling back past it if it is damaged, with an event for each.

        None when there is no step at all; when there are steps but none is whole this raises: starting over in
        silence would lose the run. `only` names one step by the hash of its manifest.
        """
        elsewhere = frozenset().union(*self._together.gather(set(split_state(into)[0])))
        problem: CheckpointError | None = None
        tried: set[StepFolder] = set()
        waits_s = list(_WAITS_S)
        # Looked for anew after each that fails: a run that is under way may have retired it, and has a newer one then.
        while (where := self._next(tried, only)) is not None:
            tried.add(where)
            loaded, problem = self._try_load(where, into, strict, elsewhere)
            while isinstance(problem, UnreadableError) and waits_s:
                wait_s = waits_s.pop(0)
                self._warn("checkpoint_unreadable", f"{problem.message}; once more in {wait_s:g} s", step=where.step)
                time.sleep(wait_s)
                loaded, problem = self._try_load(where, into, strict, elsewhere)
            if isinstance(problem, StateMismatchError):
                # Nothing is damaged: the run is not the one that saved this. Older steps would not fit either.
                raise problem
            if problem is not None and self._mended(where):
                loaded, problem = self._try_load(where, into, strict, elsewhere)
            if loaded is not None:
                return loaded
            assert problem is not None
            if self._is_there(where):
                self._warn("checkpoint_damaged", problem.message, step=where.step)
        if problem is not None:
            raise CheckpointError(
                f"no checkpoint in {self._store.locate()} can be loaded; the last problem: {problem.message}",
                problem.hint,
            )
        return None

    def _next(self, tried: set[StepFolder], only: str) -> StepFolder | None:
        steps = (step for step in self._candidates() if only in ("", step.marker.manifest_hash))
        return next((step for step in steps if step not in tried), None)

    def _try_load(
        self, where: StepFolder, into: dict[str, Any], strict: bool, elsewhere: frozenset[str]
    ) -> tuple[LoadedStep | None, CheckpointError | None]:
        """Load on every rank; when one fails, all have failed."""
        loaded, own = None, None
        try:
            if self._nearby is not None and not self.begins:
                self._nearby.bring(where, into)
            loaded = self._load(where, into, strict, elsewhere)
        except CheckpointError as error:
            own = error
        everyone = self._together.gather((type(own), own.message, own.hint) if own is not None else None)
        failures = [failure for failure in everyone if failure is not None]
        if failures:
            # Where one process could not read and another found damage, waiting is of no use.
            kind, message, hint = min(failures, key=lambda failure: failure[0] is UnreadableError)
            return None, kind(message, hint)
        return loaded, None

    def _is_there(self, where: StepFolder) -> bool:
        """Whether a step has not been removed since it was found."""
        try:
            return commit.read_step(self._source(), where.name) == where
        except FileNotFoundError:
            return False
        except (OSError, CheckpointError):
            return True

    def _mended(self, where: StepFolder) -> bool:
        """Rebuild a damaged step from its parity or its replicas; whether that is worth another try."""
        if self._nearby is not None and not self.begins:
            dropped = self._nearby.drop_damaged(where)
            if dropped:
                self._warn("checkpoint_repaired", f"{where.name}: fetching {', '.join(dropped)} anew", step=where.step)
            return bool(dropped)
        rebuilt: list[str] = []
        if self._together.rank == 0:
            try:
                _, rebuilt = parity.mend(self._source(), where)
            except (OSError, CheckpointError):
                rebuilt = []
        rebuilt = self._together.share(rebuilt)
        if rebuilt:
            self._warn(
                "checkpoint_repaired", f"{where.name}: rebuilt {', '.join(rebuilt)} from parity", step=where.step
            )
        return bool(rebuilt)

    def _load(
        self, where: StepFolder, into: dict[str, Any], strict: bool, elsewhere: frozenset[str] = frozenset()
    ) -> LoadedStep:
        store = self._source()
        with reading(store, where.name):
            manifest = commit.read_manifest(store, where)
            threads = self._together.threads(share=1)
            values, bytes_read = restore(
                store,
                where.name,
                manifest,
                into,
                self._together.rank,
                self._together.world_size,
                strict,
                threads,
                elsewhere,
            )
        folder = store.locate(where.name)
        return LoadedStep(manifest.step, where, folder, values, manifest.metadata, manifest.world_size, bytes_read)

    def _resume_place(self) -> tuple[str, str] | None:
        parent, _, name = self._config.resume_from.rstrip("/").rpartition("/")
        return (parent or ".", name) if name else None

    def _source(self) -> Store:
        place = self._resume_place()
        return open_store(place[0]) if self.begins and place is not None else self._store

    def _candidates(self) -> list[StepFolder]:
        """The steps to try, best first. Once a run has steps of its own it goes on from those, wherever it began."""
        place = self._resume_place()
        own = self._own_steps() if self._config.autoresume or self.own_after is not None else []
        if not self._config.autoresume:
            own = [step for step in own if step.marker.sequence > (self.own_after or 0)]
        if place is not None:
            own = self._begun_there(own)
        self.begins = place is not None and not own
        return self._on_first_rank(self._named_step) if self.begins else own

    def newest_sequence(self) -> int:
        """The sequence number of the newest commit among the run's own steps; 0 when there is none. Collective."""
        return max((step.marker.sequence for step in self._own_steps()), default=0)

    def _own_steps(self) -> list[StepFolder]:
        return self._nearby.steps() if self._nearby is not None else self._on_first_rank(self._look)

    def _begun_there(self, steps: list[StepFolder]) -> list[StepFolder]:
        """The newest of the run's own steps, as far as they were saved after it began from `resume_from`."""
        looks = self._nearby.leads if self._nearby is not None else self._together.rank == 0
        known: dict[str, bool] = {}
        for step in steps if looks else ():
            try:
                began_at = commit.read_manifest(self._store, step).metadata.get(BEGAN_AT)
            except CheckpointError:
                # Damaged, or on another node; loading says which.
                continue
            known[step.name] = began_at == self._config.resume_from
            if not known[step.name]:
                break
        for others in self._together.gather(known):
            known |= others
        names = list(takewhile(lambda name: known.get(name, True), (step.name for step in steps)))
        return steps[: len(names)] if any(known.get(name) for name in names) else []

    def _on_first_rank(self, look: Callable[[], list[StepFolder]]) -> list[StepFolder]:
        """Rank 0 looks, and what it sees or fails with holds for all."""
        steps: list[StepFolder] = []
        failure: tuple[str, str | None] | None = None
        if self._together.rank == 0:
            try:
                steps = look()
            except CheckpointError as error:
                failure = (error.message, error.hint)
            except OSError as error:
                place = self._config.resume_from if look == self._named_step else self._store.locate()
                failure = (f"checkpoints in {place} cannot be looked at: {error}", LOOK_REMEDY)
        steps, failure = self._together.share((steps, failure))
        if failure is not None:
            raise CheckpointError(*failure)
        return steps

    def _look(self) -> list[StepFolder]:
        damages: list[CheckpointError] = []
        steps = commit.committed_steps(self._store, damages.append)
        for error in damages:
            self._warn("checkpoint_damaged", error.message)
        # With `resume_from` there is another step to begin from, which somebody named on purpose.
        if damages and not steps and self._resume_place() is None:
            raise damages[0]
        return steps

    def _named_step(self) -> list[StepFolder]:
        place = self._resume_place()
        assert place is not None
        try:
            return [commit.read_step(open_store(place[0]), place[1])]
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint.resume_from is {self._config.resume_from}, and there is no committed step",
                "keepstep ckpt ls RUN lists the steps of a run",
            ) from error
