"""Hostile requests to the page and to the metrics port: each gets an answer or a refusal, never an error of ours."""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keepstep.observe.access import Access, AccessServer
from keepstep.observe.page.server import PageServer
from keepstep.observe.run_folder import RunFolder
from keepstep.observe.sinks.prometheus import Exporter, PrometheusSink
from tests.fuzz.mutators import hostile_value, mutate_bytes
from tests.observe.make_runs import Writer

TOKEN = "a-token-of-the-fuzzer-0123"
PAGE_REQUEST = (
    b"GET /api/view?run=one&overlay=two&points=50&smooth=0.5&from=0&to=90&version=x HTTP/1.1\r\n"
    b"Host: 127.0.0.1\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
)
METRICS_REQUEST = (
    b"GET /metrics HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\nConnection: close\r\n\r\n"
)
_ANSWER_S = 25.0
"""Long, because a loaded machine is no hang; the verdict about a hang is the fuzzer's, by processor time."""
_STANDARD_REFUSALS = (501, 505)
"""What HTTP has for a method and for a version that a server does not know."""
_METHODS = (*["GET"] * 20, "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "", "G\x00T", "é")
_PATHS = (
    *["/", "/api/runs", "/api/view", "/api/view", "/api/config", "/api/logs", "/metrics"] * 4,
    "//",
    "/../../etc/passwd",
    "*",
    "http://x/",
    "/%00",
    "/api/view/",
    "/api/view;x",
    "//[",
    "http://[::1",
    "/\x7f",
    "/api/../api/runs",
    "?",
    "#",
)
_KEYS = ("run", "overlay", "points", "smooth", "from", "to", "version", "against", "token", "", "run[]", "x" * 300)
_VALUES = (
    "one",
    "two",
    "one/two/" * 40,
    "..",
    "%2e%2e%2f",
    "nan",
    "-inf",
    "1e999",
    "-1",
    "9" * 400,
    "0x10",
    "%",
    "%ff%fe",
    "%00",
    "<script>",
    "",
    TOKEN,
)
_HEADERS = (
    "Host",
    "Host",
    "Cookie",
    "Authorization",
    "Accept-Encoding",
    "Content-Length",
    "Transfer-Encoding",
    "Expect",
    "Connection",
    "Range",
    "If-None-Match",
    "Upgrade",
    "X-Forwarded-For",
    "Content-Type",
    "",
    "A b",
)
_CONTENTS = (
    "127.0.0.1",
    "localhost:99999",
    "[::1",
    "[::1]:80",
    "evil.example",
    "",
    "gzip",
    "-1",
    "99999999999999999999",
    "chunked",
    "100-continue",
    "keep-alive",
    "close",
    'keepstep_token=x; a="',
    "Bearer",
    f"Bearer {TOKEN}",
    "Basic eDp5",
    "bytes=0-",
    "h2c",
    "x" * 70_000,
    "\xff",
    "a\r\n b",
    "é",
    "\x00",
    "0, 0",
)


def mutate_request(data: bytes, rng: random.Random) -> bytes:
    """A request with damaged bytes, or one of hostile parts; now and then two after each other."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    out = b"".join(_request(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    return mutate_bytes(out, rng) if rng.random() < 0.1 else out


def _request(rng: random.Random) -> bytes:
    query = "&".join(f"{rng.choice(_KEYS)}={_value(rng)}" for _ in range(rng.choice((0, 1, 2, 5, 5, 200))))
    target = rng.choice(_PATHS) + ("?" + query if query else "")
    version = rng.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2.0", "HTTP/1.1.1", "HTTP/x", "", "HTTP/99999999999.1"))
    lines = [f"{rng.choice(_METHODS)} {target} {version}", *_credentials(rng)]
    for _ in range(rng.choice((0, 1, 2, 3, 150))):
        lines.append(f"{rng.choice(_HEADERS)}: {rng.choice(_CONTENTS)}")
    body = rng.choice((b"", b"", b"", b"x" * 5000, b"5\r\nhello\r\n0\r\n\r\n", b"\x00" * 20))
    return rng.choice(("\r\n", "\r\n", "\n")).join([*lines, "", ""]).encode("latin-1", errors="replace") + body


def _credentials(rng: random.Random) -> list[str]:
    """Most requests are let in, or all of them would end at the door."""
    return ["Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}"] if rng.random() < 0.8 else []


def _value(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(_VALUES)
    return quote(str(hostile_value(rng))[:500].encode(errors="replace"))


class Failures:
    """Keeps what a handler raised; the parent class would print a traceback and go on."""

    def __init__(self, server: AccessServer) -> None:
        import sys

        self.raised: list[BaseException | None] = []
        server.handle_error = lambda *_: self.raised.append(sys.exception())  # type: ignore[method-assign]


@cache
def _runs() -> tempfile.TemporaryDirectory[str]:
    """Two runs, written once before the workers start."""
    root = tempfile.TemporaryDirectory()
    for number, name in enumerate(("one", "two")):
        writer = Writer(Path(root.name) / name, seed=number, ranks=2)
        writer.start()
        writer.take(100)
    return root


@cache
def _server(kind: str, process: int) -> tuple[AccessServer, Failures]:
    root = Path(_runs().name)
    server: AccessServer
    if kind == "page":
        server = PageServer(root, Access())
        server.start()
    else:
        exporter = Exporter(RunFolder(root / "one"), job=True, node="node", local_ranks=range(2))
        server = PrometheusSink(exporter, Access(token=TOKEN))
    return server, Failures(server)


def ask_page(folder: Path, _: Path) -> int:
    return ask("page", (folder / "request.http").read_bytes())


def ask_metrics(folder: Path, _: Path) -> int:
    return ask("metrics", (folder / "request.http").read_bytes())


def ask(kind: str, request: bytes) -> int:
    """0 for an answer, 2 for a refusal; AssertionError for anything that a server must not do."""
    server, failures = _server(kind, os.getpid())
    answer = _exchange(server.server_address[1], request)
    assert not failures.raised, f"a handler raised {failures.raised.pop()!r}"
    if not answer.startswith(b"HTTP/"):
        # HTTP/0.9 has no status; a request that is none is not answered.
        assert b"Traceback" not in answer
        return 2
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500 or status in _STANDARD_REFUSALS, f"status {status}: {body[:200]!r}"
    # What follows the answer to HEAD is the answer to the next request.
    has_body = body and not request.lstrip().startswith(b"HEAD")
    if status == 200 and b"application/json" in head and b"Content-Encoding" not in head and has_body:
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        json.loads(body[:length], parse_constant=_no_constant)
    return 0 if status < 400 else 2


def _no_constant(text: str) -> Any:
    raise AssertionError(f"{text} is not JSON")


def _exchange(port: int, request: bytes) -> bytes:
    """All that the server sends until it closes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as client:
        try:
            with suppress(OSError):  # the server may have refused before it had read everything
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                received += part
        except TimeoutError:
            raise AssertionError("no answer, and the connection stays open") from None
        except ConnectionError:
            pass
    return received
