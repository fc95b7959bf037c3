"""The way to the agent of a run folder: a socket named after the folder.

It is an abstract Unix socket. The kernel releases its name when the process ends, however it ends, so a name leads to a
live agent. Only processes of the same machine and network namespace find it.
"""

from __future__ import annotations

import socket
from pathlib import Path

from keepstep.core import proc


class AgentRegistration:
    """Makes this process known as the agent of a run folder, until it ends or closes this."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket: socket.socket | None = None

    def refresh(self) -> None:
        """Register, unless that is done; an agent that ended in the meantime may have held the name."""
        if self._socket is None:
            name, own = _name(self._folder), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # The leading zero byte makes it a name without a file.
                own.bind(f"\0{name}")
                self._socket = own
            except OSError:
                own.close()

    def close(self) -> None:
        """Release the name."""
        if self._socket is not None:
            self._socket.close()


def agent_of(folder: Path) -> int | None:
    """The process number of the live agent that runs in a folder on this machine; None when there is none."""
    return proc.socket_holder(_name(folder))


def _name(folder: Path) -> str:
    """From the folder's identity, not its path: containers may use one path for different folders."""
    status = folder.stat()
    return f"keepstep-agent-{status.st_dev}-{status.st_ino}"
