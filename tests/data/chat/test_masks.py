"""The loss mask covers what the assistant says, to the byte, in both ways of finding it."""

from __future__ import annotations

import json
import random
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from keepstep.core.errors import DataError
from keepstep.data import tokenization
from keepstep.data.chat.masks import LossOn, MaskedTokens, encode_all, render
from keepstep.data.chat.published_sets import convert
from keepstep.data.chat.rows import BadRow, Conversation, calls_of, canonical
from keepstep.data.chat.template import BUILT_IN, SPECIAL_TOKENS, TURN_END, ChatTemplate, Rendered, Span

UNMARKED = BUILT_IN.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
WORDS = [
    "alpha",
    "βeta",
    "\n",
    "  ",
    "<|im_end|",
    "{",
    '"quoted"',
    "日本語",
    "🙂",
    "\\n",
    "assistant",
    "</tool_call",
    "0",
    "a\u0301",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = [" ".join(WORDS) + f" some text {number}\n\n" for number in range(50)]
    tokenization.train_bpe(texts, 400, path, special=(tokenization.END_OF_TEXT, *SPECIAL_TOKENS))
    return tokenization.load(path)


def encode(
    conversation: Conversation, template: ChatTemplate, tokenizer: Any, loss_on: LossOn = "assistant"
) -> MaskedTokens:
    return encode_all([render(conversation, template, loss_on)], tokenizer)[0]


def random_text(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) + draw.choice(["", " ", "\n"]) for _ in range(draw.randint(1, 6)))


def random_conversation(seed: int) -> Conversation:
    draw = random.Random(seed)
    tools = [
        {"name": f"tool_{number}", "description": random_text(draw), "parameters": {"x": {"type": "string"}}}
        for number in range(draw.randint(0, 3))
    ]
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": random_text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": random_text(draw)})
        calls = [
            {"name": draw.choice(tools)["name"], "arguments": {"x": random_text(draw), "n": draw.randint(-5, 5)}}
            for _ in range(draw.randint(0, 3) if tools else 0)
        ]
        said = random_text(draw) if not calls or draw.random() < 0.3 else ""
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        if calls and draw.random() < 0.7:
            messages += [{"role": "tool", "content": random_text(draw)} for _ in calls]
            messages.append({"role": "assistant", "content": random_text(draw)})
    return canonical(messages, tools)


def spoken(conversation: Conversation) -> list[str]:
    """What the assistant says in each turn, written down without any template."""
    turns = []
    for message in conversation.messages:
        if message["role"] != "assistant":
            continue
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, '
            f'"arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
            for name, arguments in calls_of(message)
        ]
        turns.append("\n".join([*([message["content"]] if message["content"] else []), *calls]) + TURN_END)
    return turns


@pytest.mark.slow
def test_1000_random_conversations_mask_exactly_what_the_assistant_says_in_both_modes(tokenizer: Any) -> None:
    marked, unmarked = ChatTemplate(BUILT_IN), ChatTemplate(UNMARKED)
    assert marked.marks_turns
    assert not unmarked.marks_turns
    for seed in range(1000):
        conversation = random_conversation(seed)
        expected = spoken(conversation)
        by_marks, by_prefix = marked.render(conversation), unmarked.render(conversation)
        assert by_marks == by_prefix
        assert [by_marks.text[span.start : span.end] for span in by_marks.spans] == expected
        row = encode_all([by_marks], tokenizer)[0]
        learnt = row.tokens[row.loss].tolist()
        assert _bytes(tokenizer, learnt) == "".join(expected).encode()
        assert _bytes(tokenizer, row.tokens.tolist()) == by_marks.text.encode()


THOUGHT = "<think>\n\n</think>\n\n"
OPENS = "        {{- '<|im_start|>assistant\\n' }}\n"
THINKING = UNMARKED.replace(
    OPENS, OPENS + "        {%- if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}\n"
)
"""As Qwen3's does, this one puts an empty thought before a turn that nothing follows, and before no other."""


@pytest.mark.slow
def test_a_template_that_writes_the_last_turn_in_another_way_masks_all_of_them_exactly() -> None:
    template = ChatTemplate(THINKING)
    for seed in range(300):
        conversation = random_conversation(seed)
        *earlier, last = spoken(conversation)
        rendered = template.render(conversation)
        said = [rendered.text[span.start : span.end] for span in rendered.spans]
        assert said == [*earlier, THOUGHT + last]
        # A turn that seems to end in its own words ends where the template ends it.
        messages = [*conversation.messages[:-1], {"role": "assistant", "content": f"a{TURN_END}\n<|im_start|>user\nb"}]
        followed = canonical([*messages, {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        rendered = template.render(followed)
        span = rendered.spans[-2]
        assert rendered.text[span.start : span.end] == f"a{TURN_END}\n<|im_start|>user\nb{TURN_END}"


def test_a_turn_of_which_a_template_leaves_something_out_later_is_refused() -> None:
    whole = "{{- message['content'] }}"
    assert THINKING.count(whole) == 1
    kept = "{{- message['content'] if loop.last else message['content'].split('</think>')[-1] }}"
    forgetful = THINKING.replace(whole, kept)
    turns = ["?", "<think>hard</think>yes", "?", "no"]
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    with pytest.raises(BadRow, match="message 1 differently"):
        ChatTemplate(forgetful).render(canonical(messages))


def _bytes(tokenizer: Any, ids: list[int]) -> bytes:
    """The very bytes that tokens stand for; decoding to text would hide a character cut in two."""
    table = _byte_table()
    special = set(SPECIAL_TOKENS) | {tokenization.END_OF_TEXT}
    pieces = [tokenizer.id_to_token(token) for token in ids]
    return b"".join(
        piece.encode() if piece in special else bytes(table[character] for character in piece) for piece in pieces
    )


def _byte_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses: a byte that can be printed stands for itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@settings(max_examples=60)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
@pytest.mark.slow
def test_any_text_at_all_is_masked_exactly(texts: list[str]) -> None:
    messages = [
        item for text in texts for item in ({"role": "user", "content": text}, {"role": "assistant", "content": text})
    ]
    conversation = canonical(messages)
    for template in (ChatTemplate(BUILT_IN), ChatTemplate(UNMARKED)):
        rendered = template.render(conversation)
        assert [rendered.text[span.start : span.end] for span in rendered.spans] == [text + TURN_END for text in texts]


def test_a_token_that_would_reach_across_the_edge_is_cut_there(tmp_path: Path) -> None:
    tokenization.train_bpe(["\n\n\n hello\n\n"] * 50, 270, tmp_path / "tokenizer.json")
    tokenizer = tokenization.load(tmp_path / "tokenizer.json")
    conversation = canonical([{"role": "user", "content": "x"}, {"role": "assistant", "content": "\n\n hello"}])
    template = ChatTemplate(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}\n{% generation %}{{ m['content'] }}"
        "{% endgeneration %}\n{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    row = encode(conversation, template, tokenizer)
    assert tokenizer.decode(row.tokens[row.loss].tolist()) == "\n\n hello"


def test_a_token_across_the_edge_is_cut_there_whatever_its_offsets_leave_out(tmp_path: Path) -> None:
    """As some byte-level tokenizers are published: the space before a word belongs to its token, not to its offsets."""
    tokenization.train_bpe(["assistant: yes it is.\n"] * 50, 300, tmp_path / "tokenizer.json")
    tokenizer = tokenization.load(tmp_path / "tokenizer.json")
    text = "assistant: yes it is.\n"
    for span in (Span(11, 21, 0), Span(10, 21, 0), Span(11, 22, 0)):
        for trims in (False, True):
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
            row = encode_all([Rendered(text, (span,))], tokenizer)[0]
            assert tokenizer.decode(row.tokens.tolist()) == text
            assert tokenizer.decode(row.tokens[row.loss].tolist()) == text[span.start : span.end]


def test_a_turn_that_says_nothing_gives_what_follows_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenization.train_bpe(["abcd"] * 100, tokenization.SMALLEST_VOCAB + 3, path)
    # One token covers abcd, so that the text is cut at both edges; the first turn is empty.
    row = encode_all([Rendered("wxyzabcd", (Span(2, 2, 0), Span(6, 8, 1)))], tokenization.load(path))[0]
    learnt = [int(number) for number, counted in zip(row.tokens, row.loss, strict=True) if counted]
    assert tokenization.load(path).decode(learnt) == "cd"


def test_loss_on_tool_calls_leaves_out_turns_that_only_talk(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "It is done."},
    ]
    row = encode(canonical(messages), ChatTemplate(), tokenizer, "tool_calls")
    text = tokenizer.decode(row.tokens[row.loss].tolist(), skip_special_tokens=False)
    assert "tool_call" in text
    assert "done" not in text


@pytest.mark.parametrize("source", [BUILT_IN, UNMARKED])
def test_a_turn_of_weight_0_is_read_and_not_learnt(source: str, tokenizer: Any) -> None:
    said = [("user", "Two?", None), ("assistant", "Wrong: five", 0), ("user", "No.", None), ("assistant", "It is 2", 1)]
    openai = {"messages": [{"role": role, "content": text, "weight": weight} for role, text, weight in said]}
    turns = {"conversations": [{"from": role, "value": text, "weight": weight} for role, text, weight in said]}
    for conversation in (convert(openai), convert(turns), convert(convert(openai).row())):
        row = encode(conversation, ChatTemplate(source), tokenizer)
        assert tokenizer.decode(row.tokens[row.loss].tolist(), skip_special_tokens=False) == f"It is 2{TURN_END}"
        assert "five" in tokenizer.decode(row.tokens.tolist())
    openai["messages"][1]["weight"] = 0.5
    with pytest.raises(BadRow, match=r"message 1 has the weight 0\.5"):
        convert(openai)


def test_loss_on_all_learns_the_whole_text(tokenizer: Any) -> None:
    row = encode(random_conversation(3), ChatTemplate(), tokenizer, "all")
    assert row.loss.all()


def test_a_template_that_rewrites_earlier_turns_is_refused_rather_than_masked_wrongly() -> None:
    rewriting = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] if loop.last else '…' }}{% endfor %}"
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(BadRow, match="differently"):
        ChatTemplate(rewriting).render(canonical(messages))


def test_rows_are_the_same_on_any_day_and_an_answer_knows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    conversation = canonical([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    template = ChatTemplate(source)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(2031, 5, 17, tzinfo=tz)

    first = template.render(conversation)
    monkeypatch.setattr("keepstep.data.chat.template.datetime", Clock)
    assert template.prompt(conversation.messages[:1]) == "17 May 2031x<|im_end|>"
    assert template.render(conversation) == ChatTemplate(source).render(conversation) == first
    assert "2031" not in first.text


def test_templates_run_in_a_sandbox() -> None:
    conversation = canonical([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    with pytest.raises(BadRow, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(conversation)
    with pytest.raises(BadRow, match="not like this"):
        ChatTemplate("{{ raise_exception('not like this') }}").render(conversation)


def test_rendering_equals_transformers(tmp_path: Path, tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END)
    theirs.chat_template = BUILT_IN
    for seed in range(20):
        conversation = random_conversation(seed)
        made = theirs.apply_chat_template(
            list(conversation.messages),
            tools=list(conversation.tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        rendered = ChatTemplate(BUILT_IN).render(conversation)
        assert theirs.decode(made["input_ids"]) == rendered.text


def test_tokenizer_with_an_impossible_id_is_refused() -> None:
    damaged = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"},
    }
    tokenizer = tokenization.load_text(json.dumps(damaged), "tokenizer.json")
    with pytest.raises(DataError, match="the tokenizer has the id 4,294,967,295"):
        encode_all([Rendered("a", ())], tokenizer)[0]
