"""Idle, slow and numerous clients of the page and the metrics port: honest ones are answered, files can be opened."""

import http.client
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from keepstep.observe.access import Access, AccessServer, Answer
from tests.observe.make_runs import Writer
from tests.patience import PATIENCE_S

IDLE, SLOW = 1024, 200
WAIT_S = PATIENCE_S
SERVER_FILES = 200
"""Open files that the server's process may have: far fewer than there are clients."""
METRICS = """
import sys
from pathlib import Path
from keepstep.config.schema import ObserveConfig
from keepstep.core.ranks import Ranks
from keepstep.observe.run_folder import RunFolder
from keepstep.observe.sinks.metric_sinks import build_sinks
folder = RunFolder(Path(sys.argv[1]))
sinks = build_sinks(folder, ObserveConfig(tensorboard=False, metrics_port=int(sys.argv[2])), Ranks())
print("open http://127.0.0.1:" + sys.argv[2], flush=True)
for line in sys.stdin:
    sinks.event("checkpoint_committed", step=1)
    with open(folder.root / "opened", "a") as file:
        print(file.write("saved"), flush=True)
"""


class Small(AccessServer):
    """Answers `/` with as many bytes as it is told, and `/work` when it is told."""

    most_clients = 4
    size = 10

    def __init__(self) -> None:
        super().__init__(Access())
        self.at_work, self.done = threading.Event(), threading.Event()

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        if path == "/work":
            self.at_work.set()
            assert self.done.wait(WAIT_S)
        return Answer(b"x" * self.size)


@pytest.fixture
def server() -> Iterator[Small]:
    made = Small()
    yield made
    made.done.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = IDLE + SLOW + 300
    if hard not in (-1, resource.RLIM_INFINITY) and hard < needed:
        pytest.skip(f"needs {needed} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.socket()
    # A client that does not read should fill its buffer soon.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    client.connect(("127.0.0.1", port))
    with suppress(ConnectionError):
        client.sendall(sent)
    return client


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("kind", ["page", "metrics"])
@pytest.mark.slow
def test_servers_answer_among_idle_and_slow_clients(kind: str, tmp_path: Path, many_files: None) -> None:
    writer = Writer(tmp_path / "runs" / "one")
    writer.start()
    writer.take(20)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ui = ["-m", "keepstep", "ui", str(tmp_path / "runs"), "--no-cache", "--port", str(port)]
    words, path = (
        (ui, "/api/runs") if kind == "page" else (["-c", METRICS, str(writer.folder.root), str(port)], "/metrics")
    )
    with ExitStack() as stack:
        served = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SERVER_FILES, SERVER_FILES)),
            )
        )
        stack.callback(served.kill)
        assert served.stdin
        assert served.stdout
        assert any(line.startswith("open ") for line in iter(served.stdout.readline, ""))
        half, unread = request(path)[:-2], request(path) * 4
        for number in range(IDLE + SLOW):
            sent = b"" if number < IDLE else half if number % 2 else unread
            stack.enter_context(connect(port, sent))
            if number % 200 == 0:
                assert get(port, path)[0] == 200
        for _ in range(5):
            status, body = get(port, path)
            assert status == 200
            assert b"one" in body
        if kind == "metrics":
            served.stdin.write("save\n")
            served.stdin.flush()
            assert served.stdout.readline() == "5\n", "a file can be opened"
            # Sinks write on a thread of their own.
            deadline_s = time.monotonic() + WAIT_S
            while "checkpoint_committed" not in writer.folder.events.read_text() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert "checkpoint_committed" in writer.folder.events.read_text()


def trickle(client: socket.socket, stopped: threading.Event) -> None:
    with suppress(OSError):
        while not stopped.wait(0.05):
            client.sendall(b"x")


def test_server_closes_idle_and_trickling_clients_in_time(server: Small) -> None:
    server.patience_s = 0.5
    server.start()
    stopped = threading.Event()
    with connect(server.server_address[1]) as idle, connect(server.server_address[1], request("/")[:-2]) as slow:
        sender = threading.Thread(target=trickle, args=(slow, stopped), daemon=True)
        sender.start()
        assert read_all(idle) == b""
        assert read_all(slow) == b""
        stopped.set()
        sender.join()


def test_server_closes_a_client_that_does_not_read(server: Small) -> None:
    server.patience_s, server.size = 0.5, 30_000_000
    server.start()
    with connect(server.server_address[1], request("/")) as client:
        until(lambda: server._waiting_since)
        until(lambda: not server._waiting_since)
        assert len(read_all(client)) < server.size


def test_server_never_closes_a_client_that_it_works_for(server: Small) -> None:
    server.patience_s = 0.2
    server.start()
    port = server.server_address[1]
    with connect(port, request("/work")) as working:
        assert server.at_work.wait(WAIT_S)
        with connect(port) as idle:
            assert read_all(idle) == b"", "closed, long after the other one came"
        with ExitStack() as stack:
            for _ in range(3 * server.most_clients):
                stack.enter_context(connect(port))
            assert get(port, "/")[0] == 200, "the newest gets in"
        server.done.set()
        assert b"200 OK" in read_all(working)


def test_server_takes_no_body_for_a_second_request(server: Small) -> None:
    server.start()
    for header in ("Content-Length: 40", "Transfer-Encoding: chunked"):
        sent = request("/")[:-2] + f"{header}\r\n\r\n".encode() + request("/")
        with connect(server.server_address[1], sent) as client:
            answer = read_all(client)
        assert answer.count(b"HTTP/1.1") == 1
        assert b" 400 " in answer


def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)
