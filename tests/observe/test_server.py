import base64
import gzip
import hashlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from keepstep.core.errors import HardwareError, UsageError
from keepstep.observe.access import Access, new_token
from keepstep.observe.columns import Columns, FloatArray
from keepstep.observe.page.server import PageServer
from keepstep.observe.run_folder import JsonLines, RunFolder
from tests.observe.make_runs import Writer, write_long
from tests.patience import PATIENCE_S

TOKEN = "a-token-for-the-test-of-tokens"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("one", "two")):
        writer = Writer(tmp_path / "runs" / name, seed=number, lr=1e-3 * (number + 1))
        writer.start()
        writer.take(300)
    (tmp_path / "secret.txt").write_text("not yours")
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def server(runs: Path) -> Iterator[PageServer]:
    made = PageServer(runs, Access())
    made.start()
    yield made
    made.shutdown()
    made.server_close()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def ask(server: PageServer, path: str) -> dict:
    status, _, body = get(server, path)
    assert status == 200, body
    return json.loads(body, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_server_page_allows_only_its_own_script(server: PageServer) -> None:
    status, headers, body = get(server, "/")
    text = body.decode()
    assert status == 200
    assert not re.search(r"""(src|href)=["'](https?:)?//""", text), "nothing is fetched from elsewhere"
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_server_lists_runs_with_state_and_loss(server: PageServer) -> None:
    rows = ask(server, "/api/runs")["runs"]
    assert {row["name"] for row in rows} == {"one", "two"}
    assert all(row["step"] == 300 and row["loss"] > 1 for row in rows)


def test_server_view_holds_all_panels(server: PageServer) -> None:
    answer = ask(server, "/api/view?run=one&overlay=two&points=50")
    assert set(answer["series"]) == {"one", "two"}
    loss = answer["series"]["one"]["loss"]
    assert len(loss["steps"]) == 50
    assert loss["steps"][-1] == 300
    assert all(low <= high for low, high in zip(loss["low"], loss["high"], strict=True))
    assert {"split.data", "split.compute", "split.communication"} <= set(answer["series"]["one"])
    run = answer["run"]
    assert run["verdict"]["checkpoint_step"] == 200
    assert run["sources"]["c4"]["samples"] == 300 * 192
    assert len(run["ranks"]["step_s"]) == 8
    assert run["samples"][0]["prompt"] == "The sea was"
    assert run["evaluations"][0]["step"] == 200
    assert sum(run["goodput"]["seconds"].values()) == pytest.approx(run["goodput"]["wall_s"])


def test_server_sends_curves_only_after_a_change(server: PageServer, runs: Path) -> None:
    first = ask(server, "/api/view?run=one")
    version = first["version"].replace(" ", "%20")
    assert ask(server, f"/api/view?run=one&version={version}")["series"] is None
    JsonLines(RunFolder(runs / "one").metrics).append({"step": 301, "loss": 1.0})
    again = ask(server, f"/api/view?run=one&version={version}")
    assert again["series"]["one"]["loss"]["steps"][-1] == 301


def test_server_sends_more_detail_for_a_window(server: PageServer) -> None:
    loss = ask(server, "/api/view?run=one&points=1000&from=100&to=120")["series"]["one"]["loss"]
    assert loss["steps"][0] == 99
    assert loss["steps"][-1] == 121


@pytest.mark.slow
def test_server_curves_keep_a_spike(tmp_path: Path) -> None:
    write_long(tmp_path / "runs" / "long", 20_000, 3)
    made = PageServer(tmp_path / "runs", Access())
    made.start()
    loss = ask(made, "/api/view?run=long&points=200")["series"]["long"]["loss"]
    made.shutdown()
    made.server_close()
    assert max(loss["high"]) == 99


def test_server_compares_the_configs_of_two_runs(server: PageServer) -> None:
    answer = ask(server, "/api/config?run=two&against=one")
    assert {"key": "optimizer.lr", "left": 0.001, "right": 0.002} in answer["difference"]
    assert "llama-1b" in answer["text"]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/api/../../secret.txt",
        "/api/view?run=..",
        "/api/view?run=../secret.txt",
        "/api/view?run=one/../../secret.txt",
        "/api/view?run=link",
        "/api/view?run=/etc",
        "/api/view?run=",
        "/api/view",
        "/api/config?run=..%2f..%2fetc%2fpasswd",
        "/api/logs?run=%2e%2e",
        "/api/config?run=one%00",
        "/runs/one/config.yaml",
    ],
)
def test_server_serves_nothing_outside_the_run_folders(server: PageServer, path: str) -> None:
    status, _, body = get(server, path)
    assert status == 404
    assert b"not yours" not in body
    assert b"root:" not in body


def test_server_ignores_unknown_overlay_names(server: PageServer) -> None:
    assert set(ask(server, "/api/view?run=one&overlay=../two/link/..")["series"]) == {"one", "two"} - {"link"}


def test_server_replaces_invalid_numbers_with_defaults(server: PageServer) -> None:
    assert ask(server, "/api/view?run=one&points=nan&smooth=x&from=y&to=inf")["series"]["one"]["loss"]["steps"]


def test_server_allows_reading_only(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=PATIENCE_S)
    for method in ("POST", "PUT", "DELETE"):
        connection.request(method, "/api/runs")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 501
        connection.close()


def test_server_refuses_a_foreign_host_name(server: PageServer) -> None:
    port = server.server_address[1]
    assert get(server, "/api/runs", Host=f"evil.example:{port}")[0] == 403
    assert get(server, "/api/runs", Host=f"localhost:{port}")[0] == 200


def test_access_needs_a_token_beyond_loopback() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "trainer.example"):
        with pytest.raises(UsageError, match="there is no token"):
            Access(host)
    with pytest.raises(UsageError, match="needs 16"):
        Access("0.0.0.0", token="short")
    assert Access("0.0.0.0", token=new_token())


def test_access_admits_only_the_right_token(runs: Path) -> None:
    made = PageServer(runs, Access(token=TOKEN))
    made.start()
    try:
        assert made.url.endswith(f"?token={TOKEN}")
        assert get(made, "/api/runs")[0] == 403
        assert get(made, "/")[0] == 403
        assert get(made, "/api/runs?token=wrong-wrong-wrong-wrong")[0] == 403
        assert get(made, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = get(made, f"/?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "/")
        assert "HttpOnly" in headers["Set-Cookie"]
        assert get(made, "/api/runs", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
        assert urlsplit(get(made, f"//evil.example/?token={TOKEN}")[1]["Location"]).netloc == ""
    finally:
        made.shutdown()
        made.server_close()


def test_access_cookies_differ_by_token(runs: Path) -> None:
    """Browsers keep cookies by host, whatever the port: what the second page sets must leave the first one's."""
    pages = [PageServer(runs, Access(token=token)) for token in (TOKEN, new_token())]
    jar: dict[str, str] = {}
    try:
        for made in pages:
            made.start()
            name, _, value = get(made, f"/?token={made.access.token}")[1]["Set-Cookie"].partition(";")[0].partition("=")
            jar[name] = value
        for made in pages:
            cookies = "; ".join(f"{name}={value}" for name, value in jar.items())
            assert get(made, "/api/runs", Cookie=cookies)[0] == 200
    finally:
        for made in pages:
            made.shutdown()
            made.server_close()


@pytest.mark.parametrize("token", ["k3+Yt/0u9Q==base64 of openssl", 'semi;colon, "quote" & köln%41'])
def test_access_link_and_cookie_carry_any_token(runs: Path, token: str) -> None:
    made = PageServer(runs, Access(token=token))
    made.start()
    try:
        link = urlsplit(made.url)
        status, headers, _ = get(made, f"{link.path}?{link.query}")
        assert status == 303
        assert get(made, "/api/runs", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
    finally:
        made.shutdown()
        made.server_close()


def test_server_skips_an_unreadable_run(server: PageServer, runs: Path) -> None:
    broken = RunFolder(runs / "broken").create()
    broken.config.write_text("")
    broken.metrics.mkdir()
    assert {row["name"] for row in ask(server, "/api/runs")["runs"]} == {"one", "two"}
    server.warm()


@pytest.mark.parametrize("port", [-1, 65536])
def test_access_refuses_an_invalid_port(port: int) -> None:
    with pytest.raises(UsageError, match="must be 0 to 65535"):
        Access(port=port)


@pytest.mark.parametrize("token", ["", TOKEN], ids=["loopback", "token"])
def test_access_link_cannot_inject_headers(runs: Path, token: str) -> None:
    made = PageServer(runs, Access(token=token))
    made.start()
    try:
        link = "/%5Cevil.example/?token=x%0d%0aX-Evil:%20yes%0d%0a%0d%0a<script>alert(1)</script>"
        status, headers, body = get(made, link, Cookie=f"{made.access.cookie}={token}")
        assert (status, headers["Location"], body) == (303, "/", b"")
        assert "X-Evil" not in headers
        assert "script" not in headers.get("Set-Cookie", "")
        assert get(made, "/", Host="[nonsense")[0] in (400, 403)
    finally:
        made.shutdown()
        made.server_close()


def test_server_handles_parallel_requests_for_a_growing_run(
    server: PageServer, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Columns.column
    others: list[threading.Thread] = []

    def column_while_another_looks(table: Columns, name: str) -> FloatArray:
        # In the middle of a sum over several columns.
        if name == "comm_s" and not others:
            JsonLines(runs / "one" / "metrics.jsonl").append({"step": 301, "loss": 1.0, "time": 1.0})
            others.append(threading.Thread(target=server._histories["one"].refresh))
            others[0].start()
            others[0].join(0.3)
        return column(table, name)

    monkeypatch.setattr(Columns, "column", column_while_another_looks)
    assert ask(server, "/api/view?run=one")["series"]["one"]["loss"]["steps"][-1] == 300
    others[0].join()
    assert ask(server, "/api/view?run=one")["series"]["one"]["loss"]["steps"][-1] == 301


def test_server_reports_a_taken_port(server: PageServer, runs: Path) -> None:
    with pytest.raises(HardwareError, match="cannot listen") as caught:
        PageServer(runs, Access(port=server.server_address[1]))
    assert "--port" in str(caught.value.hint)


def test_server_compresses_long_answers(server: PageServer) -> None:
    _, headers, body = get(server, "/api/view?run=one", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["run"]["name"] == "one"


def test_server_survives_a_damaged_run(server: PageServer, runs: Path) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "metrics.jsonl").write_bytes(b'{"step": "x"}\n{"step": 1, "time": null, "loss": []}\n\xff\n')
    (runs / "bad" / "events.jsonl").write_text('{"kind": 7, "time": "never"}\n')
    assert len(ask(server, "/api/runs")["runs"]) == 3
    assert get(server, "/api/view?run=bad")[0] == 200
    assert get(server, "/api/view?run=one")[0] == 200
