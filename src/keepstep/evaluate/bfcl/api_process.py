"""The process that runs BFCL's simulated APIs, started by `sandbox.py` as a script: it imports nothing of keepstep.

Code of the benchmark, and expressions that a model wrote, run here: with limits on CPU time, memory and files, without
network and without other programs. The kernel refuses the system calls (seccomp), and an audit hook refuses what Python
offers for them, which also holds where seccomp is missing.
"""

import copy
import ctypes
import importlib
import inspect
import json
import os
import platform
import re
import resource
import signal
import struct
import sys
import types
from typing import Any

_REFUSED_CALLS = {
    # socket, socketpair, connect, bind, sendto, execve, execveat, clone, clone3, ptrace, kill, io_uring_setup,
    # and those that aarch64 does not have: fork, vfork
    "x86_64": (0xC000003E, (41, 53, 42, 49, 44, 59, 322, 56, 435, 101, 62, 425, 57, 58)),
    "aarch64": (0xC00000B7, (198, 199, 203, 200, 206, 221, 281, 220, 435, 117, 129, 425)),
}
_REFUSED_EVENTS = re.compile(r"(socket|subprocess|os|shutil|ctypes|pty|urllib|signal|tempfile|fcntl|mmap)\.")
_READING_EVENTS = ("os.listdir", "os.scandir")
_REFUSED_NAMES = ("kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run")
"""Names that the leaderboard does not call."""
_NAME = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")


def confine(limits: dict[str, int], root: str) -> None:
    """Give up everything that the simulated APIs do not need."""
    for name, most in (
        ("AS", limits["memory_bytes"]),
        ("CPU", limits["cpu_s"]),
        ("FSIZE", 0),
        ("CORE", 0),
        ("NOFILE", 64),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    if sys.platform == "linux" and platform.machine() in _REFUSED_CALLS:
        _refuse_system_calls(*_REFUSED_CALLS[platform.machine()])
    readable = (root, sys.prefix, sys.base_prefix, *(path for path in sys.path if path.startswith("/")))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in "wax+" for letter in mode or "") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes or not isinstance(path, str) or ".." in path or not path.startswith(readable):
                raise PermissionError(f"the sandbox does not open {path!r}")
        elif _REFUSED_EVENTS.match(event) and event not in _READING_EVENTS:
            raise PermissionError(f"the sandbox refuses {event}")

    sys.addaudithook(refuse)


def _refuse_system_calls(architecture: int, numbers: tuple[int, ...]) -> None:
    """A seccomp filter that answers these system calls with EPERM, for this process and until it ends."""
    load, equal, answer = 0x20, 0x15, 0x06
    allow, refuse, end = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, end), (load, 0, 0, 0)]
    for place, number in enumerate(numbers):
        steps.append((equal, len(numbers) - place, 0, number))
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, with_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, with_filter, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses the sandbox's filter of system calls (seccomp)")


class Apis:
    """The instances of the simulated APIs, for two sides: the model's calls and the expected ones."""

    def __init__(self, made: dict[str, Any]) -> None:
        package = types.ModuleType("bfcl_eval")
        package.__path__ = [made["root"]]
        sys.modules["bfcl_eval"] = package
        folder = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
        self._classes = {
            name: getattr(importlib.import_module(f"{folder}.{module}"), name)
            for name, module in made["classes"].items()
        }
        self._config = made["config"]
        self._sides: dict[str, dict[str, Any]] = {}

    def _instances(self, side: str) -> dict[str, Any]:
        if side not in self._sides:
            self._sides[side] = {}
            for name, kind in self._classes.items():
                instance = self._sides[side][name] = kind()
                if hasattr(instance, "_load_scenario"):
                    instance._load_scenario(copy.deepcopy(self._config.get(name, {})), long_context=False)
        return self._sides[side]

    def execute(self, side: str, calls: list[str]) -> list[str]:
        """The results of expressions such as `cd(folder="a")`, as text."""
        instances = {f"{side}_{name}": instance for name, instance in self._instances(side).items()}
        owners = {
            method: owner
            for owner, instance in instances.items()
            for method, _ in inspect.getmembers(instance, predicate=inspect.ismethod)
            if not method.startswith("_")
        }

        def owned(match: re.Match[str]) -> str:
            # Also inside of strings, and without the space before a bracket: verdicts depend on it.
            return f"{owners[match[1]]}.{match[1]}" if match[1] in owners else match[1]

        return [_result(_NAME.sub(owned, call), instances) for call in calls]

    def differences(self) -> list[str]:
        """Public attributes of the model's instances that differ from the expected ones."""
        model, expected = self._instances("model"), self._instances("expected")
        return [
            f"{name}.{attribute}"
            for name, instance in expected.items()
            for attribute, value in vars(instance).items()
            if not attribute.startswith("_") and getattr(model[name], attribute, None) != value
        ]


def _result(expression: str, names: dict[str, Any]) -> str:
    try:
        called = expression.partition("(")[0]
        called = called.split(".")[1] if "." in called else called
        if called in _REFUSED_NAMES:
            raise PermissionError(f"Function call {called} is not allowed.")
        value = eval(expression, {**names})
        if type(value) is dict:
            try:
                return json.dumps(value)
            except (TypeError, ValueError):
                return str(value)
        return str(value)
    except Exception as error:
        return f"Error during execution: {error}"


def main() -> None:
    """Answer each line of JSON on stdin, a method of `Apis` and its arguments, with a line on stdout."""
    made = json.loads(sys.stdin.readline())
    # What the APIs print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Ctrl-C is for the process that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine(made["limits"], made["root"])
    apis = Apis(made)
    for line in sys.stdin:
        # RLIMIT_CPU does not see a process that sleeps. The timer's signal ends it.
        signal.setitimer(signal.ITIMER_REAL, made["limits"]["wall_s"])
        method, *arguments = json.loads(line)
        answer = json.dumps(getattr(apis, method)(*arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
