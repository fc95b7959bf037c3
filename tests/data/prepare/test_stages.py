"""The staged pipeline and the Hub, against a server that speaks the Hub's protocol on loopback."""

from __future__ import annotations

import gzip
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import zstandard

from keepstep.cli.main import main
from keepstep.config.load import load_config
from keepstep.core.errors import DataError, HardwareError
from keepstep.data.formats.megatron import MegatronReader, find_prefixes
from keepstep.data.prepare.build import Share
from keepstep.data.prepare.sources import find_files
from keepstep.data.prepare.stages import SLIMPAJAMA, Pipeline
from keepstep.data.remote.files import Retry
from keepstep.data.remote.hub import HubAddress, RateLimit, fetch, list_files
from keepstep.train.trainer import train
from tests.patience import PATIENCE_S
from tests.train.tiny_runs import TINY


class Hub:
    """Files of one data set; the first `faults` requests for content fail; the first `silences` about it get none."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.faults = 0
        self.silences = 0
        self.later = ""
        """The newest commit, once there is one after `commit`; its files are the same."""
        self.requests: list[str] = []

    def serve(self) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Stay quiet."""

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = self.path.split("?")[0]
                hub.requests.append(path)
                if "/resolve/" in path and not body and hub.silences > 0:
                    hub.silences -= 1
                    self.send_error(520, "the server behind gave no answer")
                elif "/tree/" in path:
                    listed: list[dict[str, Any]] = [
                        {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                        for name, raw in hub.files.items()
                    ]
                    self.send(json.dumps(listed).encode(), "application/json", body=body)
                elif path.startswith(("/api/datasets/", "/api/models/")):
                    facts = {
                        "id": "owner/name",
                        "sha": hub.later or hub.commit,
                        "siblings": [{"rfilename": name} for name in hub.files],
                        "private": False,
                        "tags": [],
                    }
                    self.send(json.dumps(facts).encode(), "application/json", body=body)
                else:
                    name = path.partition(f"/resolve/{hub.commit}/")[2]
                    if hub.faults > 0 and body:
                        hub.faults -= 1
                        self.send_error(503)
                    elif name in hub.files:
                        self.send(hub.files[name], "application/octet-stream", body=body)
                    else:
                        self.send_response(404)
                        self.send_header("X-Error-Code", "EntryNotFound")
                        self.send_header("Content-Length", "0")
                        self.end_headers()

            def send(self, raw: bytes, kind: str, *, body: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(raw)))
                self.send_header("ETag", f'"{hashlib.sha1(raw).hexdigest()}"')
                self.send_header("X-Repo-Commit", hub.commit)
                self.end_headers()
                if body:
                    self.wfile.write(raw)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    files = {
        f"train/chunk{chunk}/example_train_{shard}.jsonl.zst": zstandard.compress(
            "".join(json.dumps({"text": f"document {chunk} {shard} {line} " * 9}) + "\n" for line in range(20)).encode()
        )
        for chunk in (1, 2)
        for shard in range(4)
    }
    served = Hub({**files, "README.md": b"# a data set\n"})
    server = served.serve()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield served
    server.shutdown()
    server.server_close()


ADDRESS = "hf://datasets/owner/name/train/chunk*/*.jsonl.zst"


def test_slimpajama_is_asked_for_by_the_names_that_its_files_have_on_the_hub(hub: Hub) -> None:
    hub.files["validation/chunk1/example_holdout_0.jsonl.zst"] = hub.files["README.md"]
    assert len(list(list_files(SLIMPAJAMA))) == 8


def test_files_on_the_hub_are_listed_at_one_commit_and_fetched_through_faults(hub: Hub, tmp_path: Path) -> None:
    listed = list(list_files(ADDRESS))
    assert len(listed) == 8
    assert all(hub.commit in address for address, _ in listed)
    hub.faults = 2
    path = fetch(listed[0][0], tmp_path / "copy", Retry(timeout_s=60, first_wait_s=0.01))
    assert Path(path).read_bytes() == hub.files[HubAddress.parse(listed[0][0]).pattern]


def test_a_hub_that_does_not_answer_is_waited_for_and_is_no_missing_file(hub: Hub, tmp_path: Path) -> None:
    address = next(iter(list_files(ADDRESS)))[0]
    hub.silences = 3
    path = fetch(address, tmp_path / "copy", Retry(timeout_s=60, first_wait_s=0.01))
    assert Path(path).read_bytes() == hub.files[HubAddress.parse(address).pattern]
    hub.silences = 1 << 20
    with pytest.raises(HardwareError, match="could not be read"):
        fetch(address, tmp_path / "other", Retry(timeout_s=0.05, first_wait_s=0.01))


def test_nobody_waits_for_a_hub_that_is_switched_off(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    address = next(iter(list_files(ADDRESS)))[0]
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE"):
        fetch(address, tmp_path / "copy", Retry(timeout_s=60, first_wait_s=0.01))


def test_a_build_goes_on_at_the_commit_it_began_with(hub: Hub, tmp_path: Path, tokenizer: Path) -> None:
    command = ["data", "build", ADDRESS, "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    command += ["--task-bytes", "500B", "--workers", "1"]
    assert main([*command, "--task", "0/2"]) == 0
    began_with, hub.later = hub.commit, "f" * 40
    before = len(hub.requests)
    assert main(command) == 0
    resolved = [request for request in hub.requests[before:] if "/resolve/" in request]
    assert resolved
    assert all(began_with in request for request in resolved)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["documents"] == 160


def test_a_tokenizer_on_the_hub_is_downloaded_by_its_name(hub: Hub, tmp_path: Path, tokenizer: Path) -> None:
    hub.files |= {"tokenizer.json": tokenizer.read_bytes(), "model.safetensors": b"large", "config.json": b"{}"}
    write_rows(tmp_path / "raw" / "0.jsonl", "0")
    words = ["data", "build", str(tmp_path / "raw"), "--workers", "1", "--out"]
    assert main([*words, str(tmp_path / "named"), "--tokenizer", "owner/name"]) == 0
    assert main([*words, str(tmp_path / "given"), "--tokenizer", str(tokenizer)]) == 0
    assert main([*words, str(tmp_path / "folder"), "--tokenizer", str(tokenizer.parent)]) == 0
    named, given, folder = (
        json.loads((tmp_path / out / "dataset.json").read_text()) for out in ("named", "given", "folder")
    )
    assert named == given == folder
    assert not [request for request in hub.requests if request.endswith("model.safetensors")]


def test_a_tokenizer_that_nobody_has_is_reported_with_its_name(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    write_rows(tmp_path / "raw" / "0.jsonl", "0")
    words = ["data", "build", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--tokenizer"]
    assert main([*words, "owner/name"]) == 2
    assert "--tokenizer owner/name has no tokenizer.json" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*words, "owner/other"]) == 2
    assert "owner/other is no local path and cannot be downloaded" in capsys.readouterr().err
    requests = len(hub.requests)
    assert main([*words, "missing/tokenizer.json"]) == 2
    assert "--tokenizer missing/tokenizer.json is missing" in capsys.readouterr().err
    assert len(hub.requests) == requests, "a path is not looked for on the Hub"


@pytest.mark.slow
def test_perplexity_of_a_c4_split_is_that_of_its_first_documents(
    hub: Hub, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": f"document {line} of many"}) + "\n" for line in range(150)]
    hub.files["en/c4-validation.00000-of-00008.json.gz"] = gzip.compress("".join(rows).encode())
    hub.files["en/c4-train.00000-of-01024.json.gz"] = b"not asked for"
    (tmp_path / "first.jsonl").write_text("".join(rows[:100]))
    shape = [word for word in TINY if not word.startswith("model.vocab")]
    train(load_config(None, [*shape, "model.vocab=500", f"runs_dir={tmp_path}", "name=run", "max_duration=1ba"]).config)
    losses = []
    for data in ("c4:val_xxsmall", str(tmp_path / "first.jsonl")):
        command = ["eval", "ppl", str(tmp_path / "run"), "--windows", "999", "--tokenizer", str(tokenizer), "--json"]
        capsys.readouterr()
        assert main([*command, "--data", data]) == 0
        losses.append(json.loads(capsys.readouterr().out))
    assert losses[0] == losses[1]
    assert main([*command, "--data", "c4:none"]) == 2
    assert "C4 has no split 'none'" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_an_error_at_once(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not on the Hub"):
        fetch(f"hf://datasets/owner/name@{hub.commit}/none.jsonl", tmp_path)


def test_all_stages_give_exactly_n_files_and_resume(
    hub: Hub, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "pipeline", ADDRESS, "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    command += ["--into", "3", "--eos", "<|endoftext|>", "--workers", "1"]
    assert main([*command, "--stage", "download", "--task", "0/2"]) == 0
    assert "other shares are not" in capsys.readouterr().out
    assert main([*command, "--stage", "extract"]) == 4
    assert "download is not complete" in capsys.readouterr().err
    assert main(command) == 0
    prefixes = find_prefixes(tmp_path / "out" / "4-tokenise")
    assert len(prefixes) == 3
    assert sum(MegatronReader(prefix).documents for prefix in prefixes) == 160
    before = len(hub.requests)
    assert main(command) == 0
    assert not any("/resolve/" in request for request in hub.requests[before:])


def test_a_sample_is_spread_over_all_files(hub: Hub, tmp_path: Path) -> None:
    work = Pipeline(tmp_path, (ADDRESS,), 2, 1, Share(), 1, RateLimit(0))
    assert work.run("download")
    names = sorted(path.name for path in work.folder("download").glob("*.zst"))
    assert ["chunk1" in name for name in names] == [True, False]


def test_a_build_straight_from_the_hub(hub: Hub, tmp_path: Path, tokenizer: Path) -> None:
    command = [
        "data",
        "build",
        ADDRESS,
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        str(tokenizer),
        "--workers",
        "1",
    ]
    assert main(command) == 0
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["documents"] == 160


@pytest.mark.parametrize("address", ["hf://datasets/owner/name", "hf://datasets/owner/name/**"])
def test_the_card_of_a_data_set_is_no_document(address: str, hub: Hub, tmp_path: Path, tokenizer: Path) -> None:
    words = ["data", "build", address, "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*words, "--workers", "1"]) == 0
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["documents"] == 160
    assert pipeline(tmp_path / "staged", address).run("download")


def pipeline(out: Path, *inputs: Path | str, files: int = 0, into: int = 1, share: Share | None = None) -> Pipeline:
    return Pipeline(out, tuple(map(str, inputs)), files, into, share or Share(), 1, RateLimit(0))


def write_rows(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def joined(work: Pipeline) -> list[str]:
    for stage in ("download", "extract", "concatenate"):
        assert work.run(stage)
    files = sorted(work.folder("concatenate").glob("*.jsonl"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    return sorted(json.loads(line)["text"] for line in lines)


def test_files_of_one_name_in_different_places_are_all_taken(tmp_path: Path) -> None:
    for year in ("2023", "2024"):
        write_rows(tmp_path / year / "crawl" / "en" / "0.jsonl", year)
    packed = tmp_path / "2024" / "crawl" / "en" / "0.jsonl.zst"
    packed.write_bytes(zstandard.compress(b'{"text": "packed"}\n'))
    assert joined(pipeline(tmp_path / "out", tmp_path / "2023", tmp_path / "2024")) == ["2023", "2024", "packed"]


def test_a_pipeline_with_other_inputs_or_options_than_it_began_with_is_refused(tmp_path: Path) -> None:
    for number in range(4):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", str(number))
    write_rows(tmp_path / "other" / "0.jsonl", "other")
    raw, out = tmp_path / "raw", tmp_path / "out"
    assert not pipeline(out, raw, files=2, share=Share(0, 2)).run("download")
    for changed in (pipeline(out, raw, files=3), pipeline(out, tmp_path / "other", files=2)):
        with pytest.raises(DataError, match="was started with other"):
            changed.run("download")
    assert joined(pipeline(out, raw, files=2, into=2)) == ["0", "2"]
    with pytest.raises(DataError, match="other into: 2 then, 1 now"):
        pipeline(out, raw, files=2, into=1).run("concatenate")
    with pytest.raises(DataError, match="other files: 2 then, 0 now"):
        pipeline(out, raw, into=2).run("download")
    # What came after the download began is for another one.
    write_rows(tmp_path / "raw" / "4.jsonl", "4")
    assert joined(pipeline(out, raw, files=2, into=2)) == ["0", "2"]


def damaged_and_mended(folder: Path, again: list[str], after: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Lose one of a stage's files, then the end of one: the next stage names it, and its remedy makes it anew."""
    victim = min(folder.glob("*.jsonl"))
    whole = victim.read_bytes()
    for raw, what in ((None, "is missing"), (whole[:-3], f"is {len(whole) - 3} bytes long instead of {len(whole)}")):
        victim.unlink()
        if raw is not None:
            victim.write_bytes(raw)
        assert main(after) == 4
        assert f"{victim} {what}" in capsys.readouterr().err
        victim.unlink(missing_ok=True)
        (folder / "done.json").unlink()
        assert main(again) == 0
        assert victim.read_bytes() == whole


def test_a_stage_does_not_start_on_files_that_are_no_longer_whole(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", f"text {number}")
    out = tmp_path / "out"
    words = ["data", "pipeline", str(tmp_path / "raw"), "--out", str(out), "--tokenizer", str(tokenizer), "--into", "2"]
    words += ["--workers", "1", "--stage"]
    for stage, after in (("1-download", "extract"), ("2-extract", "concatenate"), ("3-concatenate", "tokenise")):
        assert main([*words, stage[2:]]) == 0
        damaged_and_mended(out / stage, [*words, stage[2:]], [*words, after], capsys)
    assert main([*words, "tokenise"]) == 0
    assert sum(MegatronReader(prefix).documents for prefix in find_prefixes(out / "4-tokenise")) == 3


def test_a_mark_of_an_earlier_keepstep_still_counts_files_and_bytes(tmp_path: Path) -> None:
    for number in range(3):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", f"text {number}")
    work = pipeline(tmp_path / "out", tmp_path / "raw")
    assert work.run("download")
    mark = work.folder("download") / "done.json"
    facts = json.loads(mark.read_text())
    del facts["sizes"]
    mark.write_text(json.dumps(facts))
    lost = min(work.folder("download").glob("*.jsonl"))
    raw = lost.read_bytes()
    lost.unlink()
    with pytest.raises(DataError, match="holds 2 files"):
        work.run("extract")
    lost.write_bytes(raw)
    assert work.run("extract")


def test_a_stage_is_an_input_like_any_folder_once_it_is_whole(tmp_path: Path, tokenizer: Path) -> None:
    """As the chart dataset-preprocessing does it, whose output lies beside the stages and not among them."""
    for number in range(3):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", f"text {number}")
    work = pipeline(tmp_path / "staged", tmp_path / "raw", into=2)
    assert joined(work) == ["text 0", "text 1", "text 2"]
    folder = work.folder("concatenate")
    for number, inputs in enumerate((str(folder), f"{folder}/*", f"file://{folder}")):
        out = tmp_path / f"out-{number}"
        words = ["data", "build", inputs, "--out", str(out), "--tokenizer", str(tokenizer), "--workers", "1"]
        assert main([*words, "--task-per-file"]) == 0
        assert len(find_prefixes(out)) == 2
        assert json.loads((out / "dataset.json").read_text())["rejects"] == {}
    (folder / "done.json").unlink()
    with pytest.raises(DataError, match="a stage that is not complete"):
        find_files([str(folder)])


@pytest.mark.parametrize("option", ["--into", "--files", "--workers"])
def test_a_negative_number_is_refused_before_anything_is_marked(
    option: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "raw" / "0.jsonl", "0")
    words = ["data", "pipeline", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*words, f"{option}=-1"]) == 2
    assert f"{option} is -1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokenizer", "none.json"], "--tokenizer none.json is missing"),
        (["--eos", "<none>"], "has no token '<none>'"),
    ],
)
def test_a_tokenizer_that_will_not_do_is_told_before_anything_is_fetched(
    words: list[str], told: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "raw" / "0.jsonl", "0")
    command = ["data", "pipeline", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert main([*command, *words]) != 0
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # Machines that only fetch may have none.
    assert main([*command, *words, "--stage", "download"]) == 0


def test_too_few_files_to_join_may_be_joined_into_fewer(tmp_path: Path) -> None:
    write_rows(tmp_path / "raw" / "0.jsonl", "0")
    with pytest.raises(DataError, match="cannot be joined into 2"):
        joined(pipeline(tmp_path / "out", tmp_path / "raw", into=2))
    assert joined(pipeline(tmp_path / "out", tmp_path / "raw", into=1)) == ["0"]


def test_without_a_number_files_are_joined_into_as_many_as_there_are(tmp_path: Path) -> None:
    for number in range(3):
        write_rows(tmp_path / "raw" / f"{number}.jsonl", str(number))
    work = pipeline(tmp_path / "out", tmp_path / "raw", into=0)
    assert joined(work) == joined(work) == ["0", "1", "2"]
    assert len(list(work.folder("concatenate").glob("*.jsonl"))) == 3


def test_what_is_no_lines_of_json_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a text\n")
    with pytest.raises(DataError, match="not JSON lines"):
        pipeline(tmp_path / "out", tmp_path / "notes.txt").run("download")


class _NeverDone(BaseHTTPRequestHandler):
    """Promises a file, and sends it so slowly that nobody lives to see its end."""

    asked = threading.Event()

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.asked.set()
        with suppress(OSError):
            while True:
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_download(tmp_path: Path, tokenizer: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _NeverDone)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/far.jsonl"
    words = ["data", "pipeline", address, "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert _NeverDone.asked.wait(PATIENCE_S)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            server.shutdown()
            server.server_close()
    assert (process.returncode, said) == (128 + signal.SIGINT, "stage download\ninterrupted\n")


def test_upper_case_endings_are_unpacked(tmp_path: Path) -> None:
    source = tmp_path / "A.JSONL.GZ"
    source.write_bytes(gzip.compress(b'{"text": "words"}\n'))
    work = Pipeline(tmp_path / "out", (str(source),), 0, 0, Share(), 1, RateLimit(0))
    assert work.run("download")
    assert work.run("extract")
    (unpacked,) = [path for path in work.folder("extract").iterdir() if path.suffix.lower() == ".jsonl"]
    assert unpacked.read_bytes() == b'{"text": "words"}\n'
