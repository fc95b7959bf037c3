"""A replica's connection to the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import wait

from keepstep.core.errors import KeepstepError
from keepstep.resilience.survivors import wire
from keepstep.resilience.survivors.wire import Message

POLL_S = 0.5
"""Between two calls of `idle` while nothing arrives."""


class CoordinatorLostError(Exception):
    """The agent is gone: no step can be committed any more."""


class EvictedError(ConnectionError):
    """The others continue without this replica; its agent starts another one."""


class RunOverError(KeepstepError):
    """The run ended before this replica had joined the others: there is nothing left to do."""

    exit_code = 0


class Control:
    """Sends to the coordinator, and keeps what it says until somebody asks for it."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self.socket = wire.connect(coordinator)
        self._inbox, self._messages = wire.Inbox(), list[Message]()

    @property
    def has_news(self) -> bool:
        """Whether the coordinator has said something, or is gone."""
        return bool(self._messages or wait([self.socket], 0))

    def send(self, message: Message) -> None:
        """Send a message."""
        try:
            wire.send(self.socket, message)
        except OSError as error:
            raise self._lost() from error

    def next(self, *kinds: str, idle: Callable[[], None] = lambda: None) -> Message:
        """Wait for a message of one of these kinds; others are of an epoch that is over."""
        while True:
            while self._messages:
                message = self._messages.pop(0)
                if message["kind"] in kinds:
                    return message
                if message["kind"] == "over":
                    raise RunOverError("the run ended before this replica had joined the others")
                if message["kind"] == "evicted":
                    raise EvictedError("the other replicas continue without this one")
            if wait([self.socket], POLL_S):
                self.read()
            else:
                idle()

    def read(self) -> None:
        """Read what has arrived."""
        try:
            self._messages += self._inbox.read(self.socket)
        except OSError as error:
            raise self._lost() from error

    def kinds(self) -> set[str]:
        """The kinds of messages that nobody has asked for yet."""
        return {str(message["kind"]) for message in self._messages}

    def _lost(self) -> Exception:
        """On another node the others may continue without this one, which has nothing that it may save."""
        if wire.is_network(self._coordinator):
            return EvictedError("no connection to the node that coordinates the replicas")
        return CoordinatorLostError()
