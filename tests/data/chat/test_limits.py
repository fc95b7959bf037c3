"""Hostile rows and templates: an endless line, an endless loop or gigabytes of text cost little, and are named."""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.schema import ChatConfig, DataConfig
from keepstep.core.errors import DataError
from keepstep.data.chat import files, template
from keepstep.data.chat.files import NumberedRow, RejectedRow, read_conversations
from keepstep.data.chat.loader import ChatSource, build_chat_loaders
from keepstep.data.chat.rows import BadRow, canonical
from keepstep.data.chat.template import BUILT_IN, ChatTemplate, ConfinedTemplate, find_template
from tests.patience import PATIENCE_S

ROW = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}
CONVERSATION = canonical(ROW["messages"])
BY_PREFIX = BUILT_IN.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "CPU_S", 0.3)
    monkeypatch.setattr(template, "MEMORY_BYTES", 2**28)


def test_a_gzip_line_without_an_end_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2**16)
    path = tmp_path / "rows.jsonl.gz"
    good = json.dumps(ROW).encode() + b"\n"
    with gzip.open(path, "wb") as file:
        file.write(good + b'{"messages": "' + b" " * 2**25 + b'"}\n' + b" " * 2**17 + b"\n" + good)
    tracemalloc.start()
    first, *long, last = read_conversations(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**22
    assert isinstance(first, NumberedRow)
    assert isinstance(last, NumberedRow)
    assert ["65,536 bytes" in item.reason for item in long if isinstance(item, RejectedRow)] == [True, True]


@pytest.mark.parametrize("depth", [300, 600, 100_000])
def test_deeply_nested_rows_are_rejected_one_by_one(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    call = {"function": {"name": "f", "arguments": f'{{"x": {deep}}}'}}
    asked = {"messages": [ROW["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    inline = f'{{"messages": [{{"role": "user", "content": {deep}}}], "tools": {deep}}}'
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([inline, json.dumps(asked), deep, json.dumps(ROW)]) + "\n")
    *_, last = rows = list(read_conversations(path))
    assert (len(rows), isinstance(last, NumberedRow)) == (4, True)
    assert all(item.line() for item in rows if isinstance(item, RejectedRow))


def test_a_json_file_nested_too_deeply_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match="is not JSON"):
        list(read_conversations(tmp_path / "rows.json"))


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    "source",
    ["{{ 'a' * 3000000000 }}", "{{ 10 ** 30000000 }}", NESTED, DOUBLING, "{{ 'a'.center(2000000000) }}"],
    ids=["repetition", "power", "ranges", "doubling", "padding"],
)
def test_a_template_cannot_use_up_time_or_memory(source: str) -> None:
    with pytest.raises((BadRow, DataError), match="chat template"):
        ConfinedTemplate(source).render(CONVERSATION)


def test_an_endless_template_ends_the_preparation(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "CPU_S", 0.3)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "endless.jinja").write_text(NESTED)
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), tokenizer=str(tokenizer))
    source = ChatSource(data, ChatConfig(template=str(tmp_path / "endless.jinja")), 128, 1 << 16, 0)
    with pytest.raises(DataError, match=r"was stopped .* 0\.3 s") as caught:
        build_chat_loaders(source, tmp_path / "cache")
    assert "chat.template" in str(caught.value.hint)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_template_that_raises_refuses_the_row(source: str) -> None:
    with pytest.raises(BadRow, match="the chat template refuses it"):
        ChatTemplate(source).render(CONVERSATION)


def test_a_template_that_writes_too_much_refuses_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_CHARACTERS", 10)
    with pytest.raises(BadRow, match="renders 11 characters, more than 10"):
        ChatTemplate("{{ 'a' * 11 }}").render(CONVERSATION)


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000 + " }}", "{{ " + "9" * 5000 + " }}"])
def test_a_template_that_cannot_be_parsed_is_a_data_error(source: str) -> None:
    with pytest.raises(DataError, match="not valid jinja2"):
        ChatTemplate(source)


@pytest.mark.parametrize("source", [BUILT_IN, BY_PREFIX], ids=["markers", "prefix"])
def test_a_confined_template_renders_the_same(source: str) -> None:
    plain, confined = ChatTemplate(source), ConfinedTemplate(source)
    odd = [{**ROW["messages"][0], "content": "é\ud83d\n"}, *ROW["messages"][1:]]
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, 0.5]}}]}
    tools = [{"name": "f", "parameters": {"x": {"type": "int"}}}]
    conversations = [canonical(odd), canonical([*ROW["messages"], *odd, odd[0], call], tools), CONVERSATION]
    confined.render_ahead(conversations[:2])
    for conversation in conversations:
        assert confined.render(conversation) == plain.render(conversation)
    asked: Any = conversations[1].messages[:1]
    assert confined.prompt(asked, conversations[1].tools) == plain.prompt(asked, conversations[1].tools)
    assert confined.turn_end() == plain.turn_end() == "<|im_end|>"
    process = confined._process
    del confined
    gc.collect()
    assert process.returncode == 0, "the process ends with its template"


def test_only_templates_from_files_are_confined(tmp_path: Path) -> None:
    assert type(find_template(None)) is ChatTemplate
    (tmp_path / "x.jinja").write_text("x")
    assert type(find_template(None, str(tmp_path / "x.jinja"))) is ConfinedTemplate


def test_a_forked_process_leaves_its_parents_template_alone() -> None:
    """A worker that was forked drops its copy: it must not wait for a process that only the parent can end."""
    question = [{"role": "user", "content": "words"}]
    used = [ConfinedTemplate("{{ messages[0]['content'] }}")]
    assert used[0].prompt(question) == "words"
    pid = os.fork()
    if not pid:
        used.clear()
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + PATIENCE_S
    while not (ended := os.waitpid(pid, os.WNOHANG)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended == pid
    assert used[0].prompt(question) == "words"


@pytest.mark.parametrize("named", [False, True])
def test_an_empty_template_is_refused(tmp_path: Path, tokenizer: Path, named: bool) -> None:
    empty = tmp_path / "chat_template.jinja"
    shutil.copy(tokenizer, tmp_path / "tokenizer.json")
    empty.write_text(" \n")
    with pytest.raises(DataError, match=r"chat_template\.jinja is empty") as caught:
        template.find_template(tmp_path / "tokenizer.json", str(empty) if named else "")
    assert "chat.template" in str(caught.value.hint)
