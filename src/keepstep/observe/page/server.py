"""The server of the live page: it reads run folders and answers with JSON. It cannot change anything."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from keepstep.observe.access import Access, AccessServer, Answer, not_found
from keepstep.observe.history import History, open_recent
from keepstep.observe.logs import merged
from keepstep.observe.run_folder import RunFolder, find_runs
from keepstep.observe.view import SERIES, SPLIT, config_difference, damaged, jsonable, overview, series, summary

_MAX_PIECES = 4000
_MAX_OVERLAID = 12
_SCRIPTS = ("format.js", "chart.js", "panels.js", "app.js")


class PageServer(AccessServer):
    """Serves the page over one folder of runs. A request can only name runs that a listing of the folder finds."""

    def __init__(self, runs_dir: Path, access: Access, cache_dir: Path | None = None) -> None:
        super().__init__(access)
        self.runs_dir = runs_dir
        self._cache_dir = cache_dir
        self._histories: dict[str, History] = {}
        self._recent: dict[str, tuple[tuple[float, ...], History]] = {}
        self._lock = threading.Lock()
        self._routes: dict[str, Callable[[dict[str, str]], Answer]] = {
            "/": lambda _: page(),
            "/api/runs": self._list,
            "/api/view": self._view,
            "/api/config": self._config,
            "/api/logs": self._logs,
        }

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """Route a request."""
        route = self._routes.get(path)
        return route(query) if route else not_found("page")

    def warm(self) -> None:
        """Read the newest runs before the first visitor arrives."""
        folders = sorted(self._folders().values(), key=lambda folder: -_changed(folder)[0])
        for folder in folders[:_MAX_OVERLAID]:
            with suppress(Exception):
                self._history(folder)

    def _folders(self) -> dict[str, RunFolder]:
        return {folder.name: folder for folder in find_runs(self.runs_dir)}

    def _history(self, folder: RunFolder) -> History:
        with self._lock:
            history = self._histories.setdefault(folder.name, History(folder, self._cache_dir))
        history.refresh()
        return history

    def _list(self, _: dict[str, str]) -> Answer:
        now = time.time()
        rows = []
        for folder in self._folders().values():
            changed = _changed(folder)
            known = self._recent.get(folder.name)
            try:
                if known is None or known[0] != changed:
                    self._recent[folder.name] = known = (changed, open_recent(folder))
                rows.append(summary(known[1], now))
            except OSError:
                # It was just deleted, or another user owns it: list the others.
                continue
            except Exception as error:  # whatever one run holds, the others are listed
                rows.append(damaged(folder, error))
        rows.sort(key=lambda row: -(row["updated"] if math.isfinite(row["updated"]) else 0))
        return _json({"now": now, "runs_dir": self.runs_dir.name, "runs": rows})

    def _view(self, query: dict[str, str]) -> Answer:
        folders = self._folders()
        names = [query.get("run", ""), *filter(None, query.get("overlay", "").split("/"))][:_MAX_OVERLAID]
        if names[0] not in folders:
            return not_found("run")
        histories = {name: self._history(folders[name]) for name in dict.fromkeys(names) if name in folders}
        with ExitStack() as stack:
            # Another request must not add rows meanwhile. Always in the same order, to avoid a deadlock.
            for name in sorted(histories):
                stack.enter_context(histories[name].lock)
            return self._view_of(histories, query)

    def _view_of(self, histories: dict[str, History], query: dict[str, str]) -> Answer:
        chosen = next(iter(histories))
        pieces = int(_bounded(query.get("points"), 600, 10, _MAX_PIECES))
        weight = _bounded(query.get("smooth"), 0.9, 0.0, 0.9999)
        first = _bounded(query.get("from"), -math.inf, -math.inf, math.inf)
        last = _bounded(query.get("to"), math.inf, -math.inf, math.inf)
        version = "-".join(str(history.version) for history in histories.values())
        version = f"{version} {pieces} {weight} {first} {last} {query.get('overlay', '')}"
        curves: dict[str, Any] | None = None
        if version != query.get("version"):
            split = [f"split.{part}" for part in SPLIT]
            wanted = [*SERIES, "valid_loss"]
            curves = {
                name: series(history, wanted + (split if name == chosen else []), pieces, weight, first, last)
                for name, history in histories.items()
            }
        now = time.time()
        run = jsonable(overview(histories[chosen], now))
        # Curves are finite already: they need not pass through jsonable.
        return _text({"now": now, "version": version, "run": run, "series": curves})

    def _config(self, query: dict[str, str]) -> Answer:
        folders = self._folders()
        if (folder := folders.get(query.get("run", ""))) is None:
            return not_found("run")
        text, other = History(folder).config_text(), folders.get(query.get("against", ""))
        difference = config_difference(History(other).config_text(), text) if other else None
        return _json({"text": text, "difference": difference})

    def _logs(self, query: dict[str, str]) -> Answer:
        folder = self._folders().get(query.get("run", ""))
        if folder is None:
            return not_found("run")
        return _json(vars(merged(folder.logs, 300)))


def _changed(folder: RunFolder) -> tuple[float, ...]:
    marks: list[float] = []
    for path in (folder.metrics, folder.events, folder.ranks):
        marks += [0.0, 0.0]
        with suppress(OSError):
            status = path.stat()
            marks[-2:] = [status.st_mtime, float(status.st_size)]
    return tuple(marks)


def _bounded(text: str | None, default: float, low: float, high: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return default if math.isnan(value) else min(max(value, low), high)


def _json(value: Any) -> Answer:
    return _text(jsonable(value))


def _text(value: Any) -> Answer:
    return Answer(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), "application/json")


@cache
def page() -> Answer:
    """The self-contained page, with a policy that allows only its own script and style."""
    parts = resources.files("keepstep.observe.page") / "static"
    style = (parts / "style.css").read_text()
    script = '"use strict";\n' + "\n".join((parts / name).read_text() for name in _SCRIPTS)
    html = (parts / "index.html").read_text().replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Answer(html.encode(), "text/html; charset=utf-8", policy=policy)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
