"""An HTTP server for the page and for metrics: open on loopback only, with a token everywhere else."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import ipaddress
import math
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from keepstep.core.errors import HardwareError, UsageError
from keepstep.core.messages import invalid_value

_COOKIE = "keepstep_token"
_GZIP_BYTES = 4096
_MIN_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Where to listen, and the token that a visitor needs."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 chooses a free port."""
    token: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(invalid_value("the port", self.port, "must be 0 to 65535"), "0 chooses a free one")
        if not is_loopback(self.host) and not self.token:
            message = f"host is {self.host}, which others can reach, but there is no token"
            raise UsageError(message, "`--token auto` creates one, or set KEEPSTEP_UI_TOKEN")
        if self.token and len(self.token) < _MIN_TOKEN:
            message = f"the token has {len(self.token)} characters, but it needs {_MIN_TOKEN}"
            raise UsageError(message, "`--token auto` creates one")

    @property
    def cookie(self) -> str:
        """The name of the cookie that holds the token.

        A browser shares cookies between all ports of a host. Two pages with different tokens need different names,
        or opening one would lock the other.
        """
        return f"{_COOKIE}_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    def admits(self, host_header: str, offered: list[str]) -> bool:
        """Whether a request may be answered, by its Host header and the tokens it offers."""
        if self.token:
            return any(hmac.compare_digest(self.token.encode(), token.encode()) for token in offered)
        # Another site can point its own name at 127.0.0.1 (DNS rebinding); the Host header reveals it.
        return is_loopback(urlsplit(f"//{host_header}").hostname or "")


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    policy: str = "default-src 'none'"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD through `self.server.answer(path, query)` after the access check."""

    server: AccessServer
    protocol_version = "HTTP/1.1"
    server_version = "keepstep"
    sys_version = ""

    def do_GET(self) -> None:
        """Check, answer, send."""
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            # A body that nobody reads would be taken for the next request; this also closes the connection.
            self.send_error(HTTPStatus.BAD_REQUEST, "a request must not have a body")
            return
        if (asked := self._admitted()) is None:
            return
        parts, query = asked
        if "token" in query and not parts.path.startswith("/api"):
            self._store_token()
            return
        self.server.waits_for(self.connection, False)
        try:
            answer = self.server.answer(parts.path, query)
        except Exception as error:  # one bad request or damaged run must not stop the server
            text = f"{type(error).__name__}: {error}\n".encode()
            answer = Answer(text, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)

    def _admitted(self) -> tuple[SplitResult, dict[str, str]] | None:
        """Address and query of a request that may be answered; None if it was refused, with an answer."""
        try:
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            admitted = self.server.access.admits(self.headers.get("Host", ""), self._offered(query))
        except ValueError:
            self._send(Answer(b"the address is not valid\n", status=HTTPStatus.BAD_REQUEST))
            return None
        if not admitted:
            self._send(self.server.refusal)
            return None
        return parts, query

    do_HEAD = do_GET  # noqa: N815 - the name that the parent calls; `_send` leaves the body out

    def _offered(self, query: dict[str, str]) -> list[str]:
        offered = [query["token"]] if "token" in query else []
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            offered.append(bearer.strip())
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.access.cookie)
        except CookieError:
            cookie = None
        return [*offered, unquote(cookie.value)] if cookie else offered

    def _store_token(self) -> None:
        """Move the token from the address, where it gets copied and logged, into a cookie."""
        self.send_response(HTTPStatus.SEE_OTHER)
        # Nothing from the request goes into a header: a crafted link could inject headers and a page.
        if self.server.access.token:
            value = quote(self.server.access.token, safe="")
            self.send_header("Set-Cookie", f"{self.server.access.cookie}={value}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, answer: Answer) -> None:
        body = answer.body
        compress = len(body) > _GZIP_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        if compress:
            body = gzip.compress(body, compresslevel=1)
        self.server.waits_for(self.connection)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(body)))
        if compress:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", answer.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's name
        """Log nothing: a page that polls would fill the terminal."""

    def handle_one_request(self) -> None:
        """Wait for a request and answer it; a visitor that disconnects is no error."""
        self.server.waits_for(self.connection)
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True


class AccessServer(ThreadingTCPServer):
    """An HTTP server with an access rule. A subclass implements `answer`.

    A client has `patience_s` to send a request, and again to read the answer. From half of `most_clients` on, each new
    client closes the one that has kept the server waiting longest. The other half is for those that are still closing.
    """

    daemon_threads = allow_reuse_address = True
    block_on_close = False
    request_queue_size = 1024
    most_clients = 128
    patience_s = 30.0
    handler: type[Handler] = Handler
    refusal = Answer(b"a token is needed: open the link that keepstep printed\n", status=HTTPStatus.FORBIDDEN)
    """The answer for a client without the right token."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._waiting_since: dict[socket.socket, float] = {}
        self._client_left = threading.Condition()
        try:
            if ":" in access.host:
                self.address_family = socket.AF_INET6
            super().__init__((access.host, access.port), self.handler)
        except OSError as error:
            message = f"cannot listen on {access.host}:{access.port}: {error.strerror}"
            raise HardwareError(message, "another --port, or 0 for a free one") from None

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """The answer for a path."""
        raise NotImplementedError

    def waits_for(self, client: socket.socket, waits: bool = True) -> None:
        """Set whether the server waits for this client. A client that it works for is never closed."""
        self._waiting_since[client] = time.monotonic() if waits else math.inf

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the parent's signature
        """Make room for a new client; False when all others are being served."""
        with self._client_left:
            if len(self._waiting_since) >= self.most_clients // 2:
                self._close(min(self._waiting_since, key=self._waiting_since.__getitem__), before=math.inf)
            if self._client_left.wait_for(lambda: len(self._waiting_since) < self.most_clients, timeout=1.0):
                self._waiting_since[request] = time.monotonic()
            return request in self._waiting_since

    def service_actions(self) -> None:
        """Close the clients that took too long; the parent calls this several times a second."""
        with self._client_left:
            for client in self._waiting_since:
                self._close(client, before=time.monotonic() - self.patience_s)

    def _close(self, client: socket.socket, before: float) -> None:
        if self._waiting_since[client] < before:
            self._waiting_since[client] = math.inf
            # This wakes the client's thread, which then closes the socket.
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; the parent calls this when its thread is done."""
        super().shutdown_request(request)
        with self._client_left:
            self._waiting_since.pop(request, None)
            self._client_left.notify_all()

    @property
    def url(self) -> str:
        """The address for a browser on this machine, with the token if there is one."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.access.host, self.access.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        # A base64 token may contain a plus, which means a space in an address.
        suffix = f"?token={quote(self.access.token, safe='')}" if self.access.token else ""
        return f"http://{host}:{self.server_address[1]}/{suffix}"

    def start(self) -> None:
        """Serve on a daemon thread."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()


def not_found(what: str) -> Answer:
    """The answer for a path that does not exist."""
    return Answer(f"no such {what}\n".encode(), status=HTTPStatus.NOT_FOUND)
