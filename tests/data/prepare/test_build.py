"""A build: the same bytes for any number of workers, shares and kills; damage is found and named."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from keepstep.cli.main import main
from keepstep.config.schema import DataConfig
from keepstep.core.errors import EXIT_CONFIG, EXIT_DATA, DataError, HardwareError
from keepstep.core.files import write_once
from keepstep.data.datasets import MegatronSet
from keepstep.data.fast_tokenizer import FastLoad
from keepstep.data.formats import mds_reader
from keepstep.data.formats.megatron import DTYPES, HEADER, MegatronReader, MegatronWriter, find_prefixes, idx_path
from keepstep.data.open_dataset import open_data
from keepstep.data.prepare.build import Share, build, verify
from keepstep.data.prepare.filters import FilterOptions
from keepstep.data.prepare.plan import BuildOptions, make_plan, sha256_file
from keepstep.data.prepare.records import RecordOptions
from keepstep.data.prepare.sources import find_files
from keepstep.data.prepare.task import TaskRun, proof_sample
from keepstep.data.prepare.worker_pool import Progress
from keepstep.data.tokenization import Encoder, load, train_bpe
from tests.patience import PATIENCE_S

SMALL_TASK = 40_000


def options(corpus: Path | str, tokenizer: Path, **changes: object) -> BuildOptions:
    values: dict[str, object] = {"eos": "<|endoftext|>", "task_bytes": SMALL_TASK, **changes}
    return BuildOptions(inputs=(str(corpus),), tokenizer_sha256=sha256_file(tokenizer), **values)  # type: ignore[arg-type]


def run(folder: Path, chosen: BuildOptions, tokenizer: Path, workers: int = 1, share: Share | None = None) -> None:
    build(folder, make_plan(chosen), tokenizer, workers=workers, share=share or Share())


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def expected_documents(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    known = load(tokenizer)
    return [[*known.encode(text, add_special_tokens=False).ids, known.token_to_id("<|endoftext|>")] for text in texts]


def test_documents_are_what_hugging_face_tokenizers_gives(
    tmp_path: Path, corpus: Path, tokenizer: Path, texts: list[str]
) -> None:
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer)
    readers = [MegatronReader(prefix) for prefix in find_prefixes(tmp_path / "out")]
    assert len(readers) > 5
    found = [reader.document(number).tolist() for reader in readers for number in range(reader.documents)]
    assert found == expected_documents(tokenizer, texts)


def test_mds_joins_documents_and_cuts_every_n_tokens(
    tmp_path: Path, corpus: Path, tokenizer: Path, texts: list[str]
) -> None:
    run(tmp_path / "out", options(corpus, tokenizer, format="mds", concat=64, task_bytes=0), tokenizer)
    entries = mds_reader.parse_index((tmp_path / "out" / "index.json").read_bytes(), "index")
    stream = [one for document in expected_documents(tokenizer, texts) for one in document]
    found = []
    for entry in entries:
        shard = mds_reader.TokenShard(tmp_path / "out" / entry.basename, entry, "tokens")
        found += shard.table.ravel().tolist()
    assert found == stream[: len(stream) // 64 * 64]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"format": "mds", "concat": 32}, {"format": "mds"}], ids=["bin", "joined", "mds"]
)
def test_workers_and_shares_change_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Path, changes: dict[str, object]
) -> None:
    chosen = options(corpus, tokenizer, **changes)
    run(tmp_path / "one", chosen, tokenizer)
    run(tmp_path / "three", chosen, tokenizer, workers=3)
    for number in (2, 0, 1):
        run(tmp_path / "shares", chosen, tokenizer, share=Share(number, 3))
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "shares")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_and_started_again_the_bytes_are_the_same(
    tmp_path: Path, corpus: Path, tokenizer: Path, workers: int
) -> None:
    run(tmp_path / "whole", options(corpus, tokenizer), tokenizer)
    command = [sys.executable, "-m", "keepstep", "data", "build", str(corpus), "--out", str(tmp_path / "killed")]
    command += ["--tokenizer", str(tokenizer), "--eos", "<|endoftext|>", "--task-bytes", f"{SMALL_TASK}B"]
    command += ["--workers", str(workers)]
    generator = random.Random(workers)
    for _ in range(6):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(generator.uniform(0.2, 0.9))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, capture_output=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_what_a_kill_left_half_written_is_gone_when_the_build_is_whole(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    chosen = options(corpus, tokenizer)
    run(tmp_path / "whole", chosen, tokenizer)
    expected = contents(tmp_path / "whole")
    # Killed between writing aside and renaming, once in a marker and once in the last file of all.
    (tmp_path / "whole" / "dataset.json").unlink()
    (tmp_path / "whole" / ".dataset.json.4711.tmp").write_text("{")
    (tmp_path / "whole" / ".keepstep" / ".task-00001.json.4711.tmp").write_text("{")
    run(tmp_path / "whole", chosen, tokenizer)
    assert contents(tmp_path / "whole") == expected


def test_two_who_finish_the_same_build_do_not_trip_over_each_other(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(corpus, tokenizer)
    run(tmp_path / "whole", chosen, tokenizer)
    expected = contents(tmp_path / "whole")

    def cleared(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "the other one cleared it")

    monkeypatch.setattr("keepstep.data.prepare.build.write_json", cleared)
    run(tmp_path / "whole", chosen, tokenizer)
    assert contents(tmp_path / "whole") == expected
    (tmp_path / "whole" / "dataset.json").unlink()
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "whole", chosen, tokenizer)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_says_that_finished_tasks_are_kept(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    words = ["data", "build", str(corpus), "--out", str(tmp_path / "set"), "--tokenizer", str(tokenizer)]
    words += ["--eos", "<|endoftext|>", "--task-bytes", f"{SMALL_TASK}B", "--workers", str(workers)]
    with monkeypatch.context() as patched:
        patched.setattr("keepstep.data.prepare.worker_pool.Progress.done", interrupt)
        assert main(words) == 130
    assert "finished tasks are kept" in capsys.readouterr().err
    assert list((tmp_path / "set" / ".keepstep").glob("task-*.json"))
    assert main(words) == 0
    run(tmp_path / "whole", options(corpus, tokenizer), tokenizer)
    assert contents(tmp_path / "set") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["write", "publish"])
def test_a_worker_that_dies_is_replaced_and_the_bytes_are_the_same(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: str,
) -> None:
    run(tmp_path / "whole", options(corpus, tokenizer), tokenizer)
    died = tmp_path / "died"
    real = getattr(TaskRun, step)

    def die_once(self: TaskRun, *arguments: object) -> None:
        if self.task == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, *arguments)

    monkeypatch.setattr(TaskRun, step, die_once)
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer, workers=2)
    assert "a worker died on task" in capsys.readouterr().err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_in_a_worker_is_one_clear_error_and_the_build_goes_on_after_it(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run(tmp_path / "whole", options(corpus, tokenizer), tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("keepstep.data.prepare.task.sync_folder", full)
        with pytest.raises(DataError, match=r"cannot be written .* No space left"):
            run(tmp_path / "out", options(corpus, tokenizer), tokenizer, workers=2)
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer, workers=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_plan_in_the_same_folder_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer)
    with pytest.raises(DataError, match=r"options\.eos was '<\|endoftext\|>', now it is ''"):
        run(tmp_path / "out", options(corpus, tokenizer, eos=""), tokenizer)


def test_a_mistake_in_the_first_command_leaves_the_folder_to_the_next(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    (tmp_path / "none.json").write_text("{")
    for chosen, given in (
        (options(corpus, tokenizer, eos="<nope>"), tokenizer),
        (options(corpus, tmp_path / "none.json"), tmp_path / "none.json"),
    ):
        with pytest.raises(DataError, match=r"has no token|is not a tokenizer"):
            run(tmp_path / "out", chosen, given)
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer)
    assert verify(tmp_path / "out")[1] == []


def test_of_two_builds_that_begin_at_once_in_one_folder_one_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.json"
    train_bpe(["another one"], 300, other)

    def be_second(path: Path, content: str) -> bool:
        monkeypatch.undo()
        run(tmp_path / "out", options(corpus, other), other, share=Share(0, 2))
        return write_once(path, content)

    monkeypatch.setattr("keepstep.data.prepare.plan.write_once", be_second)
    with pytest.raises(DataError, match=r"other inputs or options: .*tokenizer_sha256"):
        run(tmp_path / "out", options(corpus, tokenizer), tokenizer)
    run(tmp_path / "out", options(corpus, other), other)
    assert verify(tmp_path / "out")[1] == []


def test_an_input_of_the_same_length_with_other_content_is_refused_and_a_copy_is_not(
    tmp_path: Path, tokenizer: Path, texts: list[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chosen, raw = options(path, tokenizer), path.read_bytes()
    run(tmp_path / "out", chosen, tokenizer, share=Share(0, 2))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in reversed(texts)))
    assert path.stat().st_size == len(raw)
    with pytest.raises(DataError, match=r"other inputs .*in\.jsonl has changed"):
        run(tmp_path / "out", chosen, tokenizer)
    path.unlink()
    path.write_bytes(raw)
    run(tmp_path / "out", chosen, tokenizer)
    assert (tmp_path / "out" / "dataset.json").is_file()


def test_a_plan_of_an_earlier_version_is_gone_on_with(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    chosen, plan = options(corpus, tokenizer), tmp_path / ".keepstep" / "plan.json"
    run(tmp_path, chosen, tokenizer, share=Share(0, 2))
    known = json.loads(plan.read_text())
    del known["versions"]
    plan.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    run(tmp_path, chosen, tokenizer)
    assert (tmp_path / "dataset.json").is_file()


def test_raw_text_that_changed_is_tokenised_anew(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "in.txt"
    found = []
    for text in ("a" * 400_000, "a" * 100_000 + "b" * 10 + "a" * 299_990):
        path.write_text(text)
        config = DataConfig(path=str(path), tokenizer=str(tokenizer))
        data = open_data(str(path), config, tmp_path / "cache")
        assert isinstance(data, MegatronSet)
        found.append(load(tokenizer).decode(data.readers[0].tokens.tolist(), skip_special_tokens=True))
    assert found == ["a" * 400_000, text]


def test_one_process_of_a_node_tokenises_raw_text_and_the_others_wait(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = threading.Lock()
    builds: list[Path] = []

    def build_alone(folder: Path, *arguments: Any, **options: Any) -> Any:
        assert at_work.acquire(blocking=False), "two build at once, each with all cores"
        builds.append(folder)
        try:
            return build(folder, *arguments, **{**options, "workers": 1})
        finally:
            at_work.release()

    monkeypatch.setattr("keepstep.data.prepare.build.build", build_alone)
    config = DataConfig(path=str(corpus), tokenizer=str(tokenizer))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: open_data(str(corpus), config, tmp_path).facts, range(4)))
    assert [facts["documents"] for facts in found] == [400] * 4
    assert len(builds) == 1


def test_a_build_into_a_folder_of_its_inputs_does_not_read_itself(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(corpus.read_bytes())
    chosen = options(tmp_path, tokenizer)
    run(tmp_path / "out", chosen, tokenizer, share=Share(0, 2))
    run(tmp_path / "out", chosen, tokenizer)
    run(tmp_path / "out", chosen, tokenizer)
    assert verify(tmp_path / "out")[1] == []


def test_a_flipped_byte_and_a_cut_file_are_found_and_mended(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(out, options(corpus, tokenizer), tokenizer)
    before = contents(out)
    assert verify(out)[1] == []
    flipped = out / "part-00002_text_document.bin"
    raw = bytearray(flipped.read_bytes())
    raw[len(raw) // 2] ^= 1
    flipped.write_bytes(raw)
    (out / "part-00004_text_document.idx").write_bytes(b"MMIDIDX")
    (out / "part-00005_text_document.bin").unlink()
    assert main(["data", "verify", str(out)]) == 4
    printed = capsys.readouterr().out
    assert "task 2  part-00002_text_document.bin has other bytes" in printed
    assert "task 4  part-00004_text_document.idx is 7 bytes long" in printed
    assert "redoes task 2, 4, 5" in printed
    assert main(["data", "verify", str(out), "--mend"]) == 4
    run(out, options(corpus, tokenizer), tokenizer)
    assert contents(out) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "index.json", "dataset.json", "rejects.jsonl"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_the_files_of_the_build_itself_are_verified_and_mended_too(
    tmp_path: Path, corpus: Path, tokenizer: Path, name: str, is_gone: bool
) -> None:
    chosen = options(corpus, tokenizer, format="mds", concat=64, task_bytes=0)
    run(tmp_path, chosen, tokenizer)
    expected = contents(tmp_path)
    if is_gone:
        (tmp_path / name).unlink()
    else:
        raw = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(raw.replace(b"5", b"6", 1) or b"no reject")
    damages = verify(tmp_path, repair=True)[1]
    assert [(damage.file, damage.task) for damage in damages] == [(name, None)]
    run(tmp_path, chosen, tokenizer)
    assert contents(tmp_path) == expected
    assert verify(tmp_path)[1] == []


def test_a_build_that_goes_on_with_a_damaged_tokenizer_takes_the_one_it_is_given(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    chosen = options(corpus, tokenizer)
    run(tmp_path / "whole", chosen, tokenizer)
    run(tmp_path / "out", chosen, tokenizer, share=Share(0, 2))
    (tmp_path / "out" / "tokenizer.json").write_text("{")
    run(tmp_path / "out", chosen, tokenizer, share=Share(1, 2))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_data_of_a_build_that_has_not_finished_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    chosen, folder = options(corpus, tokenizer), tmp_path / "out"
    run(folder, chosen, tokenizer, share=Share(0, 2))
    assert find_prefixes(folder)
    for path in (str(folder), f"file://{folder}"):
        with pytest.raises(DataError, match="has not finished"):
            open_data(path, DataConfig(path=path), tmp_path / "cache")
    assert main(["data", "merge", str(folder), "--out", str(tmp_path / "merged" / "all")]) == EXIT_DATA
    run(folder, chosen, tokenizer, share=Share(1, 2))
    for path in (str(folder), f"file://{folder}"):
        assert open_data(path, DataConfig(path=path), tmp_path / "cache").facts["documents"] == 400


def test_a_merge_into_its_own_folder_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "out", options(corpus, tokenizer), tokenizer)
    assert main(["data", "merge", str(tmp_path / "out"), "--out", str(tmp_path / "out" / "all")]) == EXIT_CONFIG
    assert "twice" in capsys.readouterr().err
    assert not (tmp_path / "out" / "all.bin").exists()


def test_a_merge_of_a_pair_that_does_not_add_up_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "set" / "pair"
    with MegatronWriter(prefix, DTYPES[4]) as writer:
        for length in (3, 4, 5):
            writer.add(np.arange(length, dtype=np.int32))
    index = bytearray(idx_path(prefix).read_bytes())
    struct.pack_into("<i", index, HEADER.size, 2)
    idx_path(prefix).write_bytes(index)
    assert main(["data", "merge", str(prefix.parent), "--out", str(tmp_path / "merged" / "all")]) == EXIT_DATA
    assert "has documents of 11 tokens, but its .bin file holds 12" in capsys.readouterr().err
    assert not list((tmp_path / "merged").iterdir())


@pytest.mark.slow
def test_workers_end_when_whoever_started_them_is_killed(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_bytes(corpus.read_bytes() * 40)
    command = [sys.executable, "-m", "keepstep", "data", "build", str(many), "--out", str(tmp_path / "out")]
    command += ["--tokenizer", str(tokenizer), "--task-bytes", "1MB", "--workers", "2"]
    reader, writer = os.pipe()
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(command, pass_fds=[writer], stderr=file)
    os.close(writer)
    try:
        while not list(tmp_path.glob("out/.keepstep/task-*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        # Each worker has the other end open: it closes with the last of them.
        assert select.select([reader], [], [], PATIENCE_S)[0], "workers are still there"
        assert os.read(reader, 1) == b""
        assert "Traceback" not in said.read_text()
    finally:
        os.close(reader)
        process.kill()
        process.wait()


@pytest.mark.slow
def test_what_a_worker_cannot_mend_comes_through_as_it_is(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise HardwareError("the store could not be read for 600 s", "start the same command again when it is back")

    monkeypatch.setattr("keepstep.data.prepare.task.read_documents", away)
    with pytest.raises(HardwareError, match="could not be read") as caught:
        run(tmp_path / "out", options(corpus, tokenizer), tokenizer, workers=2)
    assert caught.value.hint == "start the same command again when it is back"


def test_what_a_filter_drops_makes_bad_records_no_larger_share(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "short"}\n' * 990 + '{"text": "long enough to stay"}\n' * 5 + "{\n" * 5)
    chosen = options(path, tokenizer, filters=FilterOptions(min_chars=10), max_reject_share=0.01)
    facts = build(tmp_path / "out", make_plan(chosen), tokenizer, workers=1)
    assert facts is not None
    assert (facts["documents"], facts["rejects"], facts["dropped"]) == (5, {"broken JSON": 5}, {"min_chars": 990})


def test_a_folder_above_or_below_a_hidden_one_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (".cache/raw", ".cache/raw/.hidden", "here"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../.cache/raw", str(tmp_path / ".cache" / "raw"), "../here", "."):
        assert [Path(file.path).name for file in find_files([name])] == ["a.jsonl"]


def test_bad_records_are_counted_and_sampled_and_stop_only_above_the_threshold(
    tmp_path: Path, tokenizer: Path, texts: list[str]
) -> None:
    lines = [json.dumps({"text": text}).encode() for text in texts]
    bad = [
        b"{broken",
        b'{"other": 1}',
        b'{"text": 5}',
        b'\xff\xfe{"text"',
        b'{"text": ""}',
        b'{"text": "%s"}' % (b"x" * 9000),
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*lines[:200], *bad, *lines[200:]]) + b"\n")
    records = RecordOptions(max_document_bytes=8000)
    run(tmp_path / "out", options(path, tokenizer, max_reject_share=0.5, records=records), tokenizer)
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["documents"] == len(texts)
    assert facts["rejects"] == {
        "bad UTF-8": 1,
        "broken JSON": 1,
        "empty": 1,
        "field is not text": 1,
        "giant document": 1,
        "missing field": 1,
    }
    samples = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert {sample["reason"] for sample in samples} == set(facts["rejects"])
    with pytest.raises(DataError, match="rejected 6 of") as caught:
        run(
            tmp_path / "strict",
            options(path, tokenizer, max_reject_share=0.001, task_bytes=0, records=records),
            tokenizer,
        )
    assert "--max-reject-share" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "txt"])
@pytest.mark.slow
def test_every_kind_of_input_gives_the_same_documents(
    tmp_path: Path, tokenizer: Path, texts: list[str], kind: str
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    match kind:
        case "jsonl.gz":
            (source / "a.jsonl.gz").write_bytes(gzip.compress(raw[:50_000]) + gzip.compress(raw[50_000:]))
        case "jsonl.zst":
            (source / "a.jsonl.zst").write_bytes(zstandard.compress(raw))
        case "parquet":
            import pyarrow
            from pyarrow import parquet

            table = pyarrow.table({"text": texts, "number": range(len(texts))})
            parquet.write_table(table, source / "a.parquet", row_group_size=64)
        case "txt":
            for number, text in enumerate(texts):
                (source / f"{number:04d}.txt").write_text(text, newline="")
    run(tmp_path / "out", options(source, tokenizer), tokenizer)
    readers = [MegatronReader(prefix) for prefix in find_prefixes(tmp_path / "out")]
    found = [reader.document(number).tolist() for reader in readers for number in range(reader.documents)]
    assert found == expected_documents(tokenizer, texts)


def test_a_bomb_is_rejected_without_being_unpacked_into_memory(tmp_path: Path, tokenizer: Path) -> None:
    import tracemalloc

    block = zstandard.compress(b" " * (64 << 20))
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(
        zstandard.compress(b'{"text": "good"}\n') + block * 8 + zstandard.compress(b'\n{"text": "good"}\n')
    )
    tracemalloc.start()
    chosen = options(path, tokenizer, max_reject_share=0.5, records=RecordOptions(max_document_bytes=1 << 22))
    run(tmp_path / "out", chosen, tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["rejects"] == {"giant document": 1}
    assert facts["documents"] == 2
    assert peak < 60 << 20


def test_a_truncated_gzip_is_named(tmp_path: Path, tokenizer: Path, texts: list[str]) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"text": texts[0]}).encode() * 50)[:-40])
    with pytest.raises(DataError, match=r"in\.jsonl\.gz (ends in the middle|cannot be unpacked)"):
        run(tmp_path / "out", options(path, tokenizer), tokenizer)


def test_a_tokenizer_saved_with_a_length_cuts_and_fills_no_document(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    saved = load(tokenizer)
    saved.enable_truncation(16)
    saved.enable_padding(length=16)
    saved.save(str(tmp_path / "tokenizer.json"))
    run(tmp_path / "plain", options(corpus, tokenizer, task_bytes=0), tokenizer)
    run(tmp_path / "saved", options(corpus, tmp_path / "tokenizer.json", task_bytes=0), tmp_path / "tokenizer.json")
    (plain,), (found,) = (find_prefixes(tmp_path / name) for name in ("plain", "saved"))
    assert MegatronReader(found).tokens.tolist() == MegatronReader(plain).tokens.tolist()


def test_a_limit_cuts_the_output_exactly(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    run(tmp_path / "rows", options(corpus, tokenizer, format="mds", concat=32, limit=100), tokenizer)
    run(tmp_path / "documents", options(corpus, tokenizer, limit=33), tokenizer)
    assert json.loads((tmp_path / "rows" / "dataset.json").read_text())["samples"] == 100
    assert json.loads((tmp_path / "documents" / "dataset.json").read_text())["documents"] == 33


def test_a_tokenizer_that_disagrees_falls_back_with_a_notice(tokenizer: Path, texts: list[str]) -> None:
    encoder = Encoder(tokenizer)
    exact = encoder._encode_exact(texts)
    encoder._fast = _Wrong()
    assert not encoder.prove(texts[:5])
    assert "other ids" in encoder.notice
    assert not encoder.is_fast
    assert np.array_equal(encoder.encode(texts)[0], exact[0])


@pytest.mark.parametrize("documents", [1, 3, 8, 500])
def test_a_proof_is_as_long_as_was_asked_and_hears_several_documents(documents: int) -> None:
    sample = proof_sample(["x" * 5000] * documents, 4096)
    assert sum(map(len, sample)) in range(4090, 4097)
    assert len(sample) >= min(documents, 8)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False], ids=["disagrees", "refuses"])
def test_workers_fall_back_with_a_notice_and_the_bytes_stay_exact(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: bool,
) -> None:
    run(tmp_path / "fast", options(corpus, tokenizer), tokenizer, workers=2)
    assert "notice" not in capsys.readouterr().err
    monkeypatch.setattr(FastLoad, "result", lambda _: _Wrong() if wrong else None)
    run(tmp_path / "exact", options(corpus, tokenizer), tokenizer, workers=2)
    notice = "fastokens gave other ids" if wrong else "fastokens cannot be used"
    assert capsys.readouterr().err.count(f"notice: {notice}") == 1
    assert contents(tmp_path / "fast") == contents(tmp_path / "exact")


class _Wrong:
    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        ids = np.arange(len(texts), dtype=np.uint32)
        return ids.tobytes(), np.arange(len(texts) + 1, dtype=np.uint64).tobytes()


def test_filters_drop_and_count(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    good = "A sentence of plain words that any filter would keep. "
    rows = [good * 4, "short", "#$%&*" * 50, "one line\n" * 60]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    code = main(
        [
            *("data", "build", str(path), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)),
            *("--workers", "1", "--json"),
            *("--filter", "min_chars=20", "max_symbol_share=0.3", "max_repeated_lines=0.5"),
        ]
    )
    assert code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 1
    assert facts["dropped"] == {"max_repeated_lines": 1, "max_symbol_share": 1, "min_chars": 1}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "txt.gz"])
@pytest.mark.slow
def test_progress_counts_input_as_it_lies_on_the_disk(
    kind: str, workers: int, tmp_path: Path, texts: list[str], tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is told from it: text unpacks to several times the bytes of its file."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path = tmp_path / "in" / f"{number}.{kind}"
        match kind.split(".")[-1]:
            case "parquet":
                pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
                parquet.write_table(pyarrow.table({"text": texts * 3}), path, row_group_size=100)
            case "gz":
                path.write_bytes(gzip.compress(raw * 3))
            case "zst":
                path.write_bytes(zstandard.compress(raw * 3))
            case _:
                path.write_bytes(raw)
    read: list[int] = []
    monkeypatch.setattr(Progress, "add", lambda _, read_bytes, tokens: read.append(read_bytes))
    options = BuildOptions((str(tmp_path / "in"),), sha256_file(tokenizer), task_bytes=100_000)
    plan = make_plan(options)
    build(tmp_path / "out", plan, tokenizer, workers=workers)
    # The end of a piece's last line lies in the next piece, and is read twice.
    assert 0.95 * plan.input_bytes <= sum(read) <= plan.input_bytes + len(plan.tasks) * (1 << 16)
    if kind != "jsonl":
        assert sum(read) <= 1.01 * plan.input_bytes


def test_time_left_is_told_from_the_input_and_is_a_bound_where_a_limit_ends_a_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("keepstep.data.prepare.worker_pool.time.monotonic", lambda: clock[0])
    for at_most, eta in ((False, "  eta 3m00s"), (True, "  eta at most 3m00s")):
        clock[0] = 0.0
        progress = Progress([4_000_000] * 2, [0, 1], at_most=at_most)
        clock[0] = 60.0
        progress.add(2_000_000, 6_000_000)
        said = capsys.readouterr().err
        assert said.startswith("0/2 tasks  0.0 MB/s  0.10 M tokens/s")
        assert eta in said
