"""Damaged files end in an error that says what is wrong: past failures one by one, and a short seeded run."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli import main as cli
from keepstep.core.errors import EXIT_FAILED, CheckpointError, DataError, KeepstepError
from keepstep.data.formats.megatron import MegatronReader
from keepstep.interop.safetensors_files import write_file
from keepstep.observe.access import Handler
from keepstep.observe.page.server import PageServer
from tests.fuzz.formats import FORMATS, Files, put, same_documents
from tests.fuzz.fuzz import hang
from tests.fuzz.http_api import ask, mutate_request
from tests.fuzz.mutators import mutate_bytes

Change = Callable[[Any], Any]


def _changed(name: str, change: Change) -> Change:
    """A change of one JSON file."""
    return lambda files: {**files, name: json.dumps(change(json.loads(files[name]))).encode()}


def _replaced(name: str, content: bytes) -> Change:
    return lambda files: {**files, name: content}


def _manifest(change: Change) -> Change:
    def apply(files: Files) -> Files:
        name = next(name for name in files if "manifest" in name)
        return FORMATS["checkpoint-signed"].sign(_changed(name, change)(files))

    return apply


def _marker(**values: Any) -> Change:
    name = "step_00000007/_SUCCESS"
    return lambda files: FORMATS["checkpoint-signed"].sign(_changed(name, lambda raw: {**raw, **values})(files))


def _first_piece(piece: list[Any]) -> Change:
    def apply(raw: Any) -> Any:
        raw["tensors"]["model.embed.weight"]["pieces"][0][: len(piece)] = piece
        return raw

    return _manifest(apply)


def _histogram_of_another_column(files: Files) -> Files:
    """A required column whose sizes are those of an optional one: asking for its metadata ends pyarrow's process."""
    data = files["d.parquet"]
    # In the schema, before the name: the repetition of the column, 2 (1 in zigzag) for optional and 0 for required.
    repetition = data.index(b"\x25\x02\x18\x04text") + 1
    return {"d.parquet": data[:repetition] + b"\x00" + data[repetition + 1 :]}


_INDEX = "model.safetensors.index.json"
_LATEST = "megatron/latest_checkpointed_iteration.txt"
_TASK = "text/.keepstep/task-00000.json"
PAST_FAILURES: dict[str, tuple[str, Change]] = {
    "a box of more dimensions": ("checkpoint-signed", _first_piece([[0, 0, 0], [15, 4, 1]])),
    "a box whose offset and shape differ": ("checkpoint-signed", _first_piece([[0, 0], [15]])),
    "a manifest with Infinity": ("checkpoint-signed", _manifest(lambda raw: {**raw, "step": float("inf")})),
    "a manifest of another kind": ("checkpoint-signed", _manifest(lambda raw: {**raw, "values": 3})),
    "a parity group without a name": ("checkpoint-signed", _manifest(lambda raw: {**raw, "parity": [{"bytes": 1}]})),
    "a marker whose size is text": ("checkpoint-signed", _marker(data_bytes="x")),
    "a marker at no time": ("checkpoint-signed", _marker(time=float("nan"))),
    "rope parameters as text": ("hf-llama", _changed("config.json", lambda raw: {**raw, "rope_parameters": "x"})),
    "a weight map to a number": ("hf-sharded", _changed(_INDEX, lambda raw: {"weight_map": {"a": 5}})),
    "a weight map to null": ("hf-sharded", _changed(_INDEX, lambda raw: {"weight_map": {"a": None}})),
    "a tensor in another shard": (
        "hf-sharded",
        _changed(
            _INDEX, lambda raw: {"weight_map": dict.fromkeys(raw["weight_map"], "model-00001-of-00002.safetensors")}
        ),
    ),
    "a shard without a header": (
        "hf-sharded",
        _replaced("model-00001-of-00002.safetensors", b"\x02" + bytes(7) + b"[]"),
    ),
    "a tokenizer's config as a list": ("tokenizer", _replaced("tokenizer_config.json", b"[]")),
    "half a character": ("tokenizer", _replaced("tokenizer_config.json", b'{"eos_token": "\\ud800"}')),
    "a template that is a number": ("tokenizer", _replaced("tokenizer_config.json", b'{"chat_template": 5}')),
    "an end token without an id": ("tokenizer", _replaced("generation_config.json", b'{"eos_token_id": [{}]}')),
    "a template that is not UTF-8": ("chat-template", _replaced("chat_template.jinja", b"\xff")),
    "an iteration that is not UTF-8": ("megatron-dist", _replaced(_LATEST, b"\xff")),
    "an iteration of a superscript digit": ("megatron-dist", _replaced(_LATEST, "²".encode())),
    "a plan without options": ("data-build", _replaced("text/.keepstep/plan.json", b"{}")),
    "a task without its shards": (
        "data-build",
        _changed("mds/.keepstep/task-00000.json", lambda raw: {key: raw[key] for key in raw if key != "shards"}),
    ),
    "a Parquet column that pyarrow aborts on": ("text", _histogram_of_another_column),
    "a task without counts": ("data-build", _changed(_TASK, lambda raw: {**raw, "rejects": {"empty": "x"}})),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", PAST_FAILURES)
def test_past_failures_are_refused(what: str, tmp_path: Path) -> None:
    name, change = PAST_FAILURES[what]
    form = FORMATS[name]
    put(tmp_path / "files", change(form.files()))
    refused = 0
    for number, reader in enumerate(form.readers):
        (tmp_path / str(number)).mkdir()
        try:
            refused += reader(tmp_path / "files", tmp_path / str(number)) != 0
        except KeepstepError as error:
            assert len(error.message) < 1000
            refused += 1
    assert refused


@pytest.mark.parametrize("time", [1e300, -1e300, 1e17, float("nan"), "x", None])
def test_a_log_line_and_an_event_of_any_time_are_printed(time: Any) -> None:
    from keepstep.observe.logs import format_line
    from keepstep.observe.run_folder import number
    from keepstep.observe.screen import clock

    assert format_line({"time": time, "text": "a text"}).startswith("?")
    assert clock(number(time)) == "?"


@pytest.mark.parametrize(("page_bytes", "word"), [(b"\xff" * 4 + b"\x0f", "damaged"), (b"", "damaged")])
def test_a_damaged_parquet_footer_is_a_value_error(page_bytes: bytes, word: str) -> None:
    from keepstep.data.prepare.parquet_rows import row_groups

    data = FORMATS["text"].files()["d.parquet"]
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - footer_bytes : -8]
    for at in range(footer_bytes):
        changed = footer[:at] + page_bytes + footer[at + 1 :]
        file = io.BytesIO(data[: -8 - footer_bytes] + changed + len(changed).to_bytes(4, "little") + b"PAR1")
        try:
            row_groups(file)
        except ValueError as error:
            assert word in str(error) or "footer" in str(error)
    with pytest.raises(ValueError, match="footer"):
        row_groups(io.BytesIO(b"PAR1"))


def test_a_parquet_footer_has_the_sizes_that_pyarrow_reads() -> None:
    import pyarrow.parquet as parquet

    from keepstep.data.prepare.parquet_rows import row_groups

    for name, file in (("text", "d.parquet"), ("chat-files", "rows.parquet")):
        data = FORMATS[name].files()[file]
        theirs, ours = parquet.ParquetFile(io.BytesIO(data)).metadata, row_groups(io.BytesIO(data))
        assert len(ours) == theirs.num_row_groups
        for number, group in enumerate(ours):
            row_group = theirs.row_group(number)
            columns = [row_group.column(place) for place in range(row_group.num_columns)]
            assert group.num_rows == row_group.num_rows
            assert {
                path: (sizes.compressed_bytes, sizes.uncompressed_bytes) for path, sizes in group.columns.items()
            } == {
                column.path_in_schema: (column.total_compressed_size, column.total_uncompressed_size)
                for column in columns
            }
            for column in columns:
                first = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
                sizes = group.columns[column.path_in_schema]
                dictionary = any("DICTIONARY" in encoding for encoding in column.encodings)
                assert (sizes.first_page, sizes.has_dictionary) == (first, dictionary)


@pytest.mark.parametrize("name", ["http-page", "http-metrics"])
@pytest.mark.slow
def test_servers_answer_or_refuse_hostile_requests(name: str) -> None:
    form = FORMATS[name]
    request = form.files()["request.http"]
    kind = name.removeprefix("http-")
    assert ask(kind, request) == 0
    for number in range(150):
        ask(kind, mutate_request(request, random.Random(f"{name} {number}")))
    assert ask(kind, request) == 0


def test_fuzzer_notices_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    request = FORMATS["http-page"].files()["request.http"]
    monkeypatch.setattr(PageServer, "answer", fails)
    with pytest.raises(AssertionError, match="status 500"):
        ask("page", request)
    monkeypatch.setattr(Handler, "do_GET", fails)
    with pytest.raises(AssertionError, match="a handler raised"):
        ask("page", request)


def test_a_tokenizer_that_panics_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic in Rust is no Exception, and which files panic depends on the version of the library."""
    import tokenizers

    from keepstep.data import tokenization

    class PanicException(BaseException):
        pass

    class Panics:
        @staticmethod
        def from_file(_: str) -> None:
            raise PanicException("index out of bounds")

    monkeypatch.setattr(tokenizers, "Tokenizer", Panics)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="index out of bounds"):
        tokenization.load(tmp_path / "tokenizer.json")


@pytest.mark.slow
def test_every_accepted_index_gives_the_same_documents(tmp_path: Path) -> None:
    files = FORMATS["megatron-data"].files()
    accepted = 0
    for number in range(1500):
        put(
            tmp_path,
            {"set.idx": mutate_bytes(files["set.idx"], random.Random(f"index {number}")), "set.bin": files["set.bin"]},
        )
        try:
            MegatronReader(tmp_path / "set").check()
        except DataError:
            continue
        accepted += 1
        assert same_documents(tmp_path, files) == "", number
    # Some damage changes nothing, such as a copy of a byte onto itself.
    assert 0 < accepted < 400


def test_an_index_with_a_gap_is_refused_where_rows_are_cut(tmp_path: Path) -> None:
    files = FORMATS["megatron-data"].files()
    index = bytearray(files["set.idx"])
    third_pointer = 34 + 4 * 5 + 8 * 2
    index[third_pointer] += 2
    put(tmp_path, {**files, "set.idx": bytes(index)})
    reader = MegatronReader(tmp_path / "set")
    with pytest.raises(DataError, match="gaps or overlaps"):
        reader.starts_between(0, 20)
    assert reader.starts_between(24, 61).tolist() == [31]


def test_weights_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    """A limit on the size of files fails in the library where a full disk does."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            write_file({"a": torch.zeros(10_000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_an_input_output_error_has_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/model.safetensors")

    monkeypatch.setattr(cli, "_answer", fails)
    assert cli.main(["models"]) == EXIT_FAILED
    assert "error: /data/model.safetensors: Input/output error" in capsys.readouterr().err


def test_hang_is_measured_by_work_not_by_the_clock() -> None:
    assert hang(worked_s=0.4, waited_s=120) == "", "a loaded machine is no hang"
    assert hang(worked_s=5.1, waited_s=5.1) == "no end after 5 s of work"
    assert hang(worked_s=0.0, waited_s=601) == "no end after 600 s of waiting"


@pytest.mark.slow
def test_a_short_run_finds_no_failure(tmp_path: Path) -> None:
    words = ["-W", "ignore", "-m", "tests.fuzz.fuzz", "--cases", "1000", "--seed", "5", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *words, "--out", str(tmp_path / "failed")],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
