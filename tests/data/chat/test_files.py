"""Files of conversations: damaged ones are named, odd rows are refused one by one, and what is read is never lost."""

from __future__ import annotations

import gzip
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.config.schema import ChatConfig, DataConfig
from keepstep.core.errors import EXIT_CONFIG, DataError
from keepstep.data.chat.files import NumberedRow, RejectedRow, read_conversations, write_canonical
from keepstep.data.chat.loader import ChatSource, build_chat_loaders
from keepstep.data.chat.rows import calls_of
from keepstep.data.chat.tokenizer import copy_tokenizer
from keepstep.data.tokenization import load


def row(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": answer}]}


def kept(path: Path) -> list[str]:
    found = [item for item in read_conversations(path) if isinstance(item, NumberedRow)]
    return [item.conversation.messages[-1]["content"] for item in found]


def reasons(path: Path) -> list[str]:
    return [item.reason for item in read_conversations(path) if isinstance(item, RejectedRow)]


def test_converting_a_file_onto_itself_is_refused_and_the_rows_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(row("Yes.")) + "\n")
    before = path.read_bytes()
    places = [(path, path), (path.parent, path), (path.parent, path.parent / "new.jsonl")]
    for source, out in places:
        assert main(["data", "chat", str(source), "--out", str(out)]) == EXIT_CONFIG
        assert "name another place" in capsys.readouterr().err
    same = str(tmp_path / "out.jsonl")
    assert main(["data", "chat", str(path), "--out", same, "--valid-out", same]) == EXIT_CONFIG
    assert path.read_bytes() == before


def test_a_conversion_that_fails_leaves_the_old_files_as_they_were(tmp_path: Path) -> None:
    out, valid = tmp_path / "out.jsonl", tmp_path / "valid.jsonl"
    out.write_text("old\n")
    valid.write_text("old\n")
    cut = tmp_path / "in" / "rows.jsonl.gz"
    cut.parent.mkdir()
    lines = "".join(json.dumps(row(f"{number} " * 50)) + "\n" for number in range(2000)).encode()
    cut.write_bytes(gzip.compress(lines)[:-1000])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be read"):
        write_canonical(read_conversations(cut), out, valid, 0.5, 0)
    assert (out.read_text(), valid.read_text()) == ("old\n", "old\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.jsonl", "valid.jsonl"]


def test_a_conversion_that_keeps_no_row_is_an_error_and_leaves_the_old_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, texts, empty = (tmp_path / f"{name}.jsonl" for name in ("good", "texts", "empty"))
    good.write_text(json.dumps(row("Yes.")) + "\n")
    texts.write_text('{"text": "no conversation"}\n' * 3)
    empty.write_text("")
    out, held = tmp_path / "new" / "out.jsonl", tmp_path / "other" / "held.jsonl"
    words = ["--out", str(out), "--valid-out", str(held), "--valid-share", "0"]
    assert main(["data", "chat", str(good), *words]) == 0
    before = out.read_bytes()
    rejects = out.parent / "out.rejects.jsonl"
    for path, told in ((texts, f"3 rows were rejected: {rejects} says why"), (empty, "0 rows were rejected\n")):
        assert main(["data", "chat", str(path), *words]) == 4
        assert told in capsys.readouterr().err
        assert rejects.is_file() is (path == texts)
        assert out.read_bytes() == before
    assert held.is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--valid-share", "1.5", "--valid-out", "held.jsonl"], "--valid-share is 1.5"),
        (["--valid-share=-1", "--valid-out", "held.jsonl"], "--valid-share is -1.0"),
        (["--valid-share", "1", "--valid-out", "held.jsonl"], "below 1"),
        (["--valid-share", "0.3"], "name one with --valid-out"),
        (["--count", "0"], "--count is 0"),
        (["--categories", "parallel,hard"], "no category 'hard'"),
    ],
)
def test_a_split_that_means_nothing_is_refused_before_anything_is_written(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "chat", "toolcalls", "--out", "out.jsonl", *words]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--first", "3"], "has 2 rows"),
        (["--first", "0"], "--first is 0"),
        (["--rows=-1"], "--rows is -1"),
    ],
)
def test_rows_that_are_not_there_are_not_shown_as_nothing(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row("Yes.")) + "\n") * 2)
    assert main(["data", "show", str(path), *words]) == 2
    assert told in capsys.readouterr().err
    assert main(["data", "show", str(path), "--first", "2"]) == 0
    assert "Yes." in capsys.readouterr().out


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    call = {"name": "f", "arguments": '{"x": NaN}'}
    said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    messages = [{"role": "user", "content": "?"}, said]
    path.write_text(json.dumps(row("sound")) + "\n" + json.dumps({"messages": messages}) + "\n")
    assert kept(path) == ["sound"]
    assert "cannot be written as JSON" in reasons(path)[0]


def test_half_a_character_and_bad_utf8_cost_their_own_row_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row(answer)).encode() for answer in ("first", "cut \ud83d", "paired \U0001f600")]
    path.write_bytes(b"\n".join([*lines, b'{"messages": "\xff"}', json.dumps(row("last")).encode()]))
    assert kept(path) == ["first", "paired \U0001f600", "last"]
    assert ["surrogate" in reason or "not JSON" in reason for reason in reasons(path)] == [True, True]
    counts, rejects = write_canonical(read_conversations(path), tmp_path / "out.jsonl", None, 0.0, 0)
    assert (counts["kept"], counts["rejected"]) == (3, 2)
    assert rejects is not None
    refused = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert refused[0]["source"]["messages"][1]["content"] == "cut \ud83d"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_a_byte_order_mark_costs_no_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    raw = json.dumps(row("Yes.")).encode("utf-8-sig")
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert kept(path) == ["Yes."]


def test_a_path_that_is_not_there_is_told_from_one_without_conversations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"there is no file or folder {tmp_path / 'missing.jsonl'}")):
        list(read_conversations(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match="holds no conversations"):
        list(read_conversations(tmp_path))
    with pytest.raises(DataError, match="there is no file or folder") as caught:
        list(read_conversations(Path("toolcalls-domain")))
    assert caught.value.hint == "did you mean toolcalls-domains?"


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 64 + b"PAR1")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        list(read_conversations(path))


def test_a_table_gives_no_call_and_no_tool_what_belongs_to_others(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def called(name: str, arguments: dict[str, Any], kind: str) -> dict[str, Any]:
        properties = {key: {"type": kind} for key in arguments}
        schema = {"type": "object", "properties": properties, "required": list(arguments)}
        return {
            "messages": [
                {"role": "user", "content": "Do it."},
                {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            ],
            "tools": [{"type": "function", "function": {"name": name, "description": "", "parameters": schema}}],
        }

    rows = [called("weather", {"city": "Oslo"}, "string"), called("sleep", {"seconds": 3}, "integer")]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = [item.conversation for item in read_conversations(path) if isinstance(item, NumberedRow)]
    assert [calls_of(one.messages[1]) for one in found] == [
        [("weather", {"city": "Oslo"})],
        [("sleep", {"seconds": 3})],
    ]
    properties = [one.tools[0]["function"]["parameters"]["properties"] for one in found]
    assert properties == [{"city": {"type": "string"}}, {"seconds": {"type": "integer"}}]


def test_a_refused_row_may_hold_anything(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": None, "made": datetime(2026, 1, 2, tzinfo=UTC)}]), path)
    _, rejects = write_canonical(read_conversations(path), tmp_path / "out.jsonl", None, 0.0, 0)
    assert rejects is not None
    assert "2026-01-02" in rejects.read_text()


def test_prepared_rows_follow_the_tokens_that_the_tokenizers_folder_names(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("Yes.")) + "\n")
    source = ChatSource(
        DataConfig(path=str(rows), tokenizer=str(folder / "tokenizer.json"), valid_share=0.0), ChatConfig(), 64, 500, 0
    )
    for end in ("<|endoftext|>", "!"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        batch = build_chat_loaders(source, tmp_path / "cache").train.rows(0, 1)
        known = load(tokenizer)
        assert known.decode(batch.inputs[0][:40].tolist(), skip_special_tokens=False).startswith(f"Hello?Yes.{end}")


def test_every_start_tells_how_many_rows_were_refused_and_where_it_says_why(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row("Yes.")) + "\n" + json.dumps(row("much too long " * 99)) + "\n")
    source = ChatSource(
        DataConfig(path=str(rows), tokenizer=str(tokenizer), valid_share=0.0), ChatConfig(), 256, 500, 0
    )
    for _ in range(2):
        build_chat_loaders(source, tmp_path / "cache")
        told = re.search(r"1 rows rejected, with reasons: (\S+)", capsys.readouterr().err)
        assert told is not None
        assert "do not fit a row of 257" in Path(told[1]).read_text()


def test_a_tokenizer_that_takes_anothers_place_gets_none_of_its_files(tmp_path: Path) -> None:
    for name, files in (("first", ("tokenizer.json", "chat_template.jinja")), ("second", ("tokenizer.json",))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(name)
    kept = tmp_path / "run"
    copy_tokenizer(tmp_path / "first" / "tokenizer.json", kept)
    assert (kept / "chat_template.jinja").read_text() == "first"
    copy_tokenizer(tmp_path / "second" / "tokenizer.json", kept)
    assert [path.name for path in kept.iterdir()] == ["tokenizer.json"]
    copy_tokenizer(kept / "tokenizer.json", kept)
    assert (kept / "tokenizer.json").read_text() == "second"
    (tmp_path / "named.jinja").write_text("named")
    copy_tokenizer(tmp_path / "second" / "tokenizer.json", kept, str(tmp_path / "named.jinja"))
    assert (kept / "chat_template.jinja").read_text() == "named"


def test_generated_rows_of_some_categories(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["toolcalls-domains", "--count", "20", "--categories", "parallel,irrelevance"]
    assert main(["data", "chat", *words, "--out", str(out)]) == 0
    answers = [json.loads(line)["messages"][-1] for line in out.read_text().splitlines()]
    assert {len(answer.get("tool_calls", ())) for answer in answers} >= {0, 2}
    assert len(answers) == 20
    assert 1 not in {len(answer.get("tool_calls", ())) for answer in answers}
