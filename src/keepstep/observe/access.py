"""Who may look: loopback by default, a token anywhere else, and a small HTTP handler that holds to it."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import ipaddress
import secrets
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from keepstep.core.errors import HardwareError, UsageError

_COOKIE = "keepstep_token"
_GZIP_BYTES = 4096
_MIN_TOKEN = 16


@dataclass(frozen=True)
class Access:
    """Where to listen and what a visitor must know."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    token: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"the port is {self.port}, but it must be 0 to 65535", "0 takes a free one")
        if not is_loopback(self.host) and not self.token:
            raise UsageError(
                f"host is {self.host}, which others can reach, but there is no token",
                "give a token of your own, or `--token auto` for a new one",
            )
        if self.token and len(self.token) < _MIN_TOKEN:
            raise UsageError(
                f"the token has {len(self.token)} characters, but needs {_MIN_TOKEN}", "`--token auto` makes a good one"
            )

    @property
    def cookie(self) -> str:
        """The cookie that holds the token.

        A browser keeps one set of cookies for all ports of a host: pages with tokens of their own need names of their
        own, or opening one would shut the other.
        """
        return f"{_COOKIE}_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    def admits(self, host_header: str, offered: list[str]) -> bool:
        """Whether a request may be answered, by the Host it named and the tokens it offered."""
        if self.token:
            return any(hmac.compare_digest(self.token.encode(), token.encode()) for token in offered)
        # A page on another site can point its own name at 127.0.0.1; the browser still sends that name.
        return is_loopback(urlsplit(f"//{host_header}").hostname or "")


def new_token() -> str:
    """A token nobody guesses."""
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
    """What a route gives back."""

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
        try:
            parts = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            admitted = self.server.access.admits(self.headers.get("Host", ""), self._offered(query))
        except ValueError:
            self._send(Answer(b"this is not an address\n", status=HTTPStatus.BAD_REQUEST))
            return
        if not admitted:
            self._send(Answer(b"a token is needed: open the link that keepstep printed\n", status=HTTPStatus.FORBIDDEN))
            return
        if "token" in query and not parts.path.startswith("/api"):
            self._keep_token()
            return
        try:
            answer = self.server.answer(parts.path, query)
        except Exception as error:  # one bad request or one damaged run must not end the server
            text = f"{type(error).__name__}: {error}\n".encode()
            answer = Answer(text, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)

    def do_HEAD(self) -> None:
        """The same without the body."""
        self.do_GET()

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

    def _keep_token(self) -> None:
        """Move the token from the address, where it is copied and logged, into a cookie."""
        self.send_response(HTTPStatus.SEE_OTHER)
        # Nothing that the request said goes into a header: a link could write headers, and a page, of its own there.
        if self.server.access.token:
            kept = quote(self.server.access.token, safe="")
            self.send_header("Set-Cookie", f"{self.server.access.cookie}={kept}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, answer: Answer) -> None:
        body = answer.body
        squeeze = len(body) > _GZIP_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        if squeeze:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(body)))
        if squeeze:
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
        """Stay quiet: a page that polls would fill the terminal."""

    def handle(self) -> None:
        """Serve; a visitor that goes away in the middle is no error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True


class AccessServer(ThreadingHTTPServer):
    """A threaded HTTP server with an access rule. A subclass says what to answer."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, access: Access) -> None:
        self.access = access
        try:
            if ":" in access.host:
                import socket

                self.address_family = socket.AF_INET6
            super().__init__((access.host, access.port), Handler)
        except OSError as error:
            raise HardwareError(
                f"cannot listen on {access.host}:{access.port}: {error.strerror}", "choose another --port; 0 takes any"
            ) from None

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """What to send for a path."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it, with the token when there is one."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.access.host, self.access.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        # A token of `openssl rand -base64` has a plus, which means a space in an address.
        suffix = f"?token={quote(self.access.token, safe='')}" if self.access.token else ""
        return f"http://{host}:{self.server_address[1]}/{suffix}"

    def start(self) -> threading.Thread:
        """Serve on a thread of its own that never keeps the process alive."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        return thread


def not_found(what: str) -> Answer:
    """The answer for what is not there."""
    return Answer(f"no such {what}\n".encode(), status=HTTPStatus.NOT_FOUND)
