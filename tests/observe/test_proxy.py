"""The nginx example of docs/security.md serves the page to those who know the password, and nobody else."""

import base64
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.observe.access import Access
from keepstep.observe.page.server import PageServer
from tests.doc_blocks import blocks
from tests.observe.make_runs import Writer
from tests.patience import PATIENCE_S

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(not (NGINX and shutil.which("openssl")), reason="needs Debian's nginx and openssl")
TOKEN = "a-token-for-the-test-of-tokens"


def nginx_config(folder: Path, port: int, page_port: int) -> str:
    (server,) = blocks("docs/security.md", "nginx")
    for before, after in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "127.0.0.1:8080": f"127.0.0.1:{page_port}",
        "/etc/nginx/": f"{folder}/",
        'Authorization ""': f'Authorization "Bearer {TOKEN}"',
    }.items():
        assert before in server
        server = server.replace(before, after)
    paths = [f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    http = "\n".join(["access_log off;", *paths, server])
    user = "user root;\n" if os.getuid() == 0 else ""
    return f"{user}daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\n{http}\n}}\n"


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """The address of nginx in front of a page that needs a token."""
    writer = Writer(tmp_path / "runs" / "one")
    writer.start()
    writer.take(5)
    page = PageServer(tmp_path / "runs", Access(token=TOKEN))
    page.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=runs.example.com", "-days", "2"]
    files = ["-keyout", str(tmp_path / "runs.key"), "-out", str(tmp_path / "runs.crt")]
    subprocess.run([*words, *files], check=True, capture_output=True)
    digest = subprocess.run(["openssl", "passwd", "-apr1", "sesame"], check=True, capture_output=True, text=True).stdout
    (tmp_path / "runs.htpasswd").write_text(f"ada:{digest}")
    (tmp_path / "nginx.conf").write_text(nginx_config(tmp_path, port, page.server_address[1]))
    assert NGINX
    with subprocess.Popen([NGINX, "-p", str(tmp_path), "-e", "stderr", "-c", str(tmp_path / "nginx.conf")]) as started:
        while started.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield f"https://127.0.0.1:{port}"
        started.terminate()
    page.shutdown()
    page.server_close()


def status(url: str, password: str = "", body: bytes | None = None) -> tuple[int, bytes]:
    credentials = base64.b64encode(f"ada:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {credentials}"} if password else {}
    asked = urllib.request.Request(url, headers=headers, data=body, method="GET")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S, context=ssl._create_unverified_context()) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_proxy_serves_the_page_for_a_password(proxy: str) -> None:
    assert status(f"{proxy}/api/runs")[0] == 401
    assert status(f"{proxy}/api/runs", "wrong")[0] == 401
    assert b"one" in status(f"{proxy}/api/runs", "sesame")[1]
    assert status(f"{proxy}/", "sesame")[0] == 200
    assert status(f"{proxy}/api/runs", "sesame", body=b"left out")[0] == 200
