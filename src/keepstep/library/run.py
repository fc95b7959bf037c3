"""`keepstep.Run`: what a run has written, as arrays, tables and text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.config.load import load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic
from keepstep.core.messages import invalid_value
from keepstep.library.overrides import hints_in_traceback
from keepstep.observe import report
from keepstep.observe.columns import Columns, FloatArray
from keepstep.observe.history import open_history
from keepstep.observe.run_folder import find_run, read_from
from keepstep.observe.verdict import Verdict, judge
from keepstep.observe.view import plan_and_measured

if TYPE_CHECKING:
    from keepstep.library.model import LoadedModel


@dataclass(frozen=True)
class Checkpoint:
    """A committed step on disk; `keepstep.load(path)` opens it."""

    step: int
    """Steps of training before it was saved."""
    path: Path
    """Its folder."""
    time: float
    """When it was committed, in seconds since 1970."""


class Run:
    """A run's folder, finished or not. Every access reads what is new; nothing here disturbs the run."""

    def __init__(self, path: str | Path) -> None:
        """Open a run by its folder, or by its name below `runs`."""
        with hints_in_traceback():
            self._history = open_history(find_run(str(path), Path("runs")))
        self.path = self._history.folder.root
        """The run's folder."""

    def __repr__(self) -> str:
        now = self.status
        of = f" of {now.total_steps}" if now.total_steps else ""
        return f"Run({str(self.path)!r}: {now.state}, step {now.step}{of}, loss {now.loss:.4f})"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def status(self) -> Verdict:
        """State (running, finished, stopped, failed …) with its reasons, step, loss, newest saved step, time left."""
        self._history.refresh()
        return judge(self._history, time.time())

    @property
    def config(self) -> RunConfig:
        """Every setting, as it was frozen at the start."""
        return load_config(self._history.folder.config).config

    @property
    def metrics(self) -> dict[str, FloatArray]:
        """One array for each metric, with one value for each step: step, loss, lr, grad_norm, tokens_per_s and more.

        Steps that were done again after a fault count once. A missing value is NaN.
        """
        self._history.refresh()
        return _arrays(self._history.train)

    @property
    def evaluations(self) -> dict[str, FloatArray]:
        """Arrays with one value for each evaluation: step, valid_loss, valid_ppl."""
        self._history.refresh()
        return _arrays(self._history.valid)

    def frame(self) -> Any:
        """Return metrics and evaluations as one pandas DataFrame, with the step as its index. Needs pandas."""
        try:
            import pandas
        except ImportError:
            with hints_in_traceback():
                hint = "pip install pandas, or use run.metrics, which is made of numpy arrays"
                raise UsageError("a DataFrame needs pandas, which is not installed", hint) from None
        steps, valid = (pandas.DataFrame(table).set_index("step") for table in (self.metrics, self.evaluations))
        return steps.join(valid.drop(columns=["time"], errors="ignore"), how="outer")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Start, resume, checkpoint_committed, fault, restart, finish and others, each with its time."""
        self._history.refresh()
        return list(self._history.events)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Committed steps on disk, oldest first."""
        from keepstep.checkpoint.protocol.commit import committed_steps
        from keepstep.checkpoint.storage.store import open_store

        place = self.config.checkpoint.folder or str(self._history.folder.checkpoints)
        found = reversed(committed_steps(open_store(place)))
        return [Checkpoint(step.step, Path(place) / step.name, step.marker.time) for step in found]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Texts that the model wrote during the run, oldest first: step, prompt, text."""
        return read_from(self._history.folder.samples)[0]

    @property
    def plan(self) -> dict[str, Mapping[str, float]]:
        """What was predicted, and what was measured: speed, memory, time of a save."""
        self._history.refresh()
        rows = plan_and_measured(self._history)
        return {row["what"]: {"planned": row["planned"], "measured": row["measured"]} for row in rows}

    def report(self, path: str | Path | None = None) -> str:
        """Return the report as Markdown; with a `path` that ends in .html or .md, also write it there."""
        self._history.refresh()
        text = report.markdown(self._history, time.time())
        if path is not None:
            file = Path(path)
            if file.suffix not in (".html", ".md"):
                with hints_in_traceback():
                    message = invalid_value("path", str(file), "must end in .html or .md")
                    raise UsageError(message, str(file.with_suffix(".html")))
            write_atomic(file, report.page(self._history, time.time()) if file.suffix == ".html" else text)
        return text

    def load(self, device: str = "auto") -> LoadedModel:
        """Open the model, as `keepstep.load(run.path)` does."""
        from keepstep.library.model import load

        return load(self.path, device=device)


def _arrays(table: Columns) -> dict[str, FloatArray]:
    return {name: table.column(name).copy() for name in sorted(table.names)}
