"""Imported first by the warm process that workers are forked from: requests to stop are not meant for it.

A scheduler sends its signals to every process of a job. The warm one must outlive its workers, or nobody would learn
how they ended; it goes when the agent goes.
"""

from __future__ import annotations

import signal

from keepstep.resilience.signals import STOP_SIGNALS

for _number in (*STOP_SIGNALS, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_IGN)
