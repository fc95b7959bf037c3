"""Authenticated joins: only a node that knows the run's secret reaches the store of the rendezvous.

torch's store has no passwords, and its clients unpickle what they find in it. So the store listens on the loopback
interface only. The host's gate admits nodes to it, and every other node reaches the gate through a tunnel of its own.
Both ends prove by an HMAC over fresh random numbers that they know the secret, which is never sent.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import secrets
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from keepstep.core.proof import NONCE_BYTES, PROOF_BYTES, PROOF_TIMEOUT_S, oldest_of_most_frequent, proof

MAX_UNPROVEN = 256
"""Connections that have not proven anything yet. A further one replaces the oldest of the address that has most of
them, so that strangers block only each other."""
OPEN_FILES = 8192
"""The gate of a large run needs more than the usual limit of 1,024."""
CHUNK_BYTES = 64 * 1024

_Streams = tuple[StreamReader, StreamWriter]
_LOST = (OSError, EOFError, TimeoutError)


class _Relay:
    """Connects each connection to a local port with one elsewhere, in a thread of its own."""

    def __init__(self, listener: socket.socket, connect: Callable[[StreamReader, StreamWriter], Awaitable[_Streams]]):
        self.port = int(listener.getsockname()[1])
        self._connect = connect
        self._unproven: dict[asyncio.Task[None] | None, str] = {}
        self._loop = asyncio.new_event_loop()
        # Strangers must not fill the log.
        self._loop.set_exception_handler(lambda *_: None)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=listener))
        threading.Thread(target=self._loop.run_forever, name="rendezvous-gate", daemon=True).start()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        self._unproven[task] = str((writer.get_extra_info("peername") or [""])[0])
        if len(self._unproven) > MAX_UNPROVEN:
            oldest = oldest_of_most_frequent(self._unproven)
            del self._unproven[oldest]
            if oldest is not None:
                oldest.cancel()
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                other_reader, other_writer = await self._connect(reader, writer)
            self._unproven.pop(task, None)
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        except _LOST:
            return
        finally:
            self._unproven.pop(task, None)
            writer.close()


class Gate(_Relay):
    """On the host: admits nodes that know the secret to the store at a port of the loopback interface."""

    def __init__(self, port: int, secret: bytes, store_port: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
        # Accepted connections inherit it: a node that lost its power says nothing more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

        async def admit(reader: StreamReader, writer: StreamWriter) -> _Streams:
            nonce = secrets.token_bytes(NONCE_BYTES)
            writer.write(nonce)
            answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
            nonces = nonce + answer[:NONCE_BYTES]
            if not hmac.compare_digest(answer[NONCE_BYTES:], proof(secret, b"node", nonces)):
                raise ConnectionRefusedError
            writer.write(proof(secret, b"host", nonces))
            return await asyncio.open_connection("127.0.0.1", store_port)

        super().__init__(listener, admit)


class Tunnel(_Relay):
    """On a node: a port of the loopback interface that leads through the gate of the endpoint."""

    def __init__(self, endpoint: tuple[str, int], secret: bytes) -> None:
        async def join(*_: StreamReader | StreamWriter) -> _Streams:
            reader, writer = await asyncio.open_connection(*endpoint)
            try:
                nonce = secrets.token_bytes(NONCE_BYTES)
                nonces = await reader.readexactly(NONCE_BYTES) + nonce
                writer.write(nonce + proof(secret, b"node", nonces))
                answer = await reader.readexactly(PROOF_BYTES)
                if not hmac.compare_digest(answer, proof(secret, b"host", nonces)):
                    raise EOFError
            except EOFError:
                writer.close()
                raise ConnectionRefusedError("it does not have the secret of this node") from None
            return reader, writer

        self._join = join
        super().__init__(socket.create_server(("127.0.0.1", 0)), join)

    def check(self) -> None:
        """Raise an OSError unless the endpoint can be reached and has the same secret. Signals end the wait."""

        async def attempt() -> None:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                _, writer = await self._join()
            writer.close()

        asyncio.run_coroutine_threadsafe(attempt(), self._loop).result()


async def _copy(reader: StreamReader, writer: StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        # The other direction ends with it.
        writer.close()
