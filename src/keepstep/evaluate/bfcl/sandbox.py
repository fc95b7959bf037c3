"""The simulated APIs of a conversation, in a process with limits: see `api_process.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

from keepstep.core.errors import DataError
from keepstep.evaluate.bfcl.benchmark import Benchmark, Question

LIMITS = {"cpu_s": 30, "wall_s": 120, "memory_bytes": 2**30}
"""Of one conversation; an ordinary one takes a fraction of a second. `wall_s` is for each request."""

Side = Literal["model", "expected"]


class SandboxEnded(Exception):  # noqa: N818 - a model's call broke a limit: the conversation is wrong, not the program
    """The process ended, because a call went beyond its limits."""


class ApiSession:
    """The instances of a question's APIs, one set for the model's calls and one for the expected calls."""

    def __init__(self, benchmark: Benchmark, question: Question, limits: dict[str, int] = LIMITS) -> None:
        classes = {name: benchmark.modules[name] for name in question.classes}
        # -I: no folder and no environment variable of the user's can replace a module. -B: it writes no files.
        command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("api_process.py"))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", env={})
        made = {"root": str(benchmark.root.resolve()), "classes": classes, "config": question.initial_config}
        self._send({**made, "limits": limits})

    def execute(self, side: Side, calls: Sequence[str]) -> list[str]:
        """The results of these calls, as text. Raises SandboxEnded."""
        return [str(item) for item in self._request("execute", side, list(calls))]

    def differences(self) -> list[str]:
        """Attributes whose values differ between the sides. Raises SandboxEnded."""
        return [str(item) for item in self._request("differences")]

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        # Without a reader the process has ended, and there is no answer.
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _request(self, *message: Any) -> list[Any]:
        assert self._process.stdout is not None
        self._send(message)
        line = self._process.stdout.readline()
        if line:
            found: list[Any] = json.loads(line)
            return found
        said = ""
        with suppress(BrokenPipeError):
            said = self._process.communicate()[1].strip().rpartition("\n")[2]
        raise SandboxEnded(f"exit code {self._process.returncode}{said and ': '}{said}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def check_sandbox(benchmark: Benchmark, question: Question) -> None:
    """Load a question's APIs once: an import that fails must not count as the model's mistake."""
    with closing(ApiSession(benchmark, question)) as session:
        try:
            session.execute("expected", [])
        except SandboxEnded as ended:
            hint = "pip install mpmath, and bfcl-eval in the version that keepstep names"
            raise DataError(f"BFCL's simulated APIs do not start ({ended})", hint) from None
