"""Proof of a shared secret: an HMAC over the fresh random numbers of both ends. The secret itself is never sent."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

NONCE_BYTES = 32
PROOF_BYTES = 32
PROOF_TIMEOUT_S = 10.0
"""From the connection to the proof; strangers get no more time, however slowly they send."""

T = TypeVar("T")


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """What one end sends. `role` differs between the ends, so that nobody can send a proof back."""
    return hmac.digest(secret, role + nonces, "sha256")


def oldest_of_most_frequent(unproven: Mapping[T, str]) -> T:
    """Which connection to give up, given all in order of arrival with their addresses: strangers block each other."""
    [(crowded, _)] = Counter(unproven.values()).most_common(1)
    return next(connection for connection, address in unproven.items() if address == crowded)


def admit(connection: socket.socket, secret: bytes) -> bool:
    """Whether the one who connected knows the secret; we prove it in turn."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    answer = _receive(connection, NONCE_BYTES + PROOF_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], proof(secret, b"sender", nonces)):
        return False
    connection.sendall(proof(secret, b"receiver", nonces))
    return True


def introduce(connection: socket.socket, secret: bytes) -> None:
    """Prove to the other end that we know the secret; ConnectionRefusedError where it does not know ours."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = _receive(connection, NONCE_BYTES) + nonce
    connection.sendall(nonce + proof(secret, b"sender", nonces))
    if not hmac.compare_digest(_receive(connection, PROOF_BYTES), proof(secret, b"receiver", nonces)):
        raise ConnectionRefusedError("it does not have the secret of this job")


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes; ConnectionError where the other end closes, TimeoutError after the limit."""
    deadline, received = time.monotonic() + PROOF_TIMEOUT_S, b""
    while len(received) < size_bytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (more := connection.recv(size_bytes - len(received))):
            raise ConnectionAbortedError("it closed the connection")
        received += more
    return received
