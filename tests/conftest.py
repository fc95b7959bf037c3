"""What every test can rely on, however the tests were started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores: threads of theirs that wait for each other took a quarter of all time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where this is set, each of the many processes that tests start compiles all of keepstep again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

try:
    from hypothesis import settings
except ImportError:
    # tests/gpu run with pytest alone.
    pass
else:
    # How long one example takes depends on what else the machine does.
    settings.register_profile("keepstep", deadline=None)
    settings.load_profile("keepstep")


@pytest.fixture(autouse=True, scope="session")
def _default_signals() -> Iterator[None]:
    """Restore the default handling of Ctrl-C and hangup, here and in the processes that tests start.

    `nohup make test &` ignores them, and processes inherit that.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
