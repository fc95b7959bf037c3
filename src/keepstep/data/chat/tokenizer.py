"""The files of a tokenizer, and a small one for generated function calls: names and values are copied token by token.

A call repeats names and values of its prompt. Requests put names in backticks and texts in quotes. Fixed parts of JSON,
punctuation and pairs of digits are tokens of their own, so a name or a value has the same tokens in both places. Most
words of the training split are one token; held-out words consist of several, like any unknown word.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, malformed_as
from keepstep.core.files import read_json_object, write_atomic, write_json
from keepstep.data.cache_folder import prepare_folder
from keepstep.data.chat.generate import split_functions, split_words
from keepstep.data.chat.generated import SMALL, generate_rows
from keepstep.data.chat.template import BUILT_IN, SPECIAL_TOKENS, TURN_END, ChatTemplate, token_text
from keepstep.data.tokenization import END_OF_TEXT, FILES, trained_bpe

VOCAB = 2048
_SAMPLE_ROWS = 1000
_WORD_WEIGHT = 20
_VERSION = 8

_TYPES = [
    f'": {{"type": "{kind}"}}{after}'
    for kind in ("string", "integer", "number", "boolean")
    for after in (', "', '}, "required": ["', '}, "required": []}}}')
]
_FIXED = (
    '\n{"type": "function", "function": {"name": "', '", "description": "',
    '.", "parameters": {"type": "object", "properties": {"',
    *_TYPES,
    '"]}}}', '\n{"name": "', '", "arguments": {"', '"}}\n', "}}\n", '": "', '": ', '", "', ', "',
    "system\nTools:\n", '\nTo call one: ', '\n{"name": ..., "arguments": {...}}\n', "user\n", "assistant\n",
)  # fmt: skip
"""Texts that the template and JSON always write the same way."""


def prepare_tokenizer(cache_dir: Path, seed: int) -> Path:
    """The tokenizer.json, next to its chat template, trained at first use on generated rows."""
    key = hashlib.sha256(f"{_VERSION} {sys.version} {seed} {BUILT_IN}".encode()).hexdigest()[:12]
    return prepare_folder(cache_dir / f"tokenizer-{key}", lambda folder: _build(folder, seed)) / "tokenizer.json"


def _build(folder: Path, seed: int) -> None:
    from tokenizers import AddedToken, Regex, pre_tokenizers

    steps = [
        # The character before a name or a value is the same wherever it occurs, so a word keeps the space before it
        # and a part of a name its underscore.
        pre_tokenizers.Split(Regex("[ _]?[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9]+?(?=[ _]?[A-Za-z]|[0-9]|$)"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    special = (END_OF_TEXT, *SPECIAL_TOKENS)
    tokenizer = trained_bpe(_texts(seed), VOCAB - len(_FIXED), special, pre_tokenizers.Sequence(steps))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _FIXED])
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_atomic(folder / "chat_template.jinja", BUILT_IN)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "pad_token": END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", facts)


def _texts(seed: int) -> Iterator[str]:
    """Rendered rows, and every word of the training split on its own, so that most become one token."""
    template = ChatTemplate()
    fixed = re.compile("|".join(re.escape(text) for text in sorted(_FIXED, key=len, reverse=True)))
    for row in generate_rows(SMALL, _SAMPLE_ROWS, seed, "train"):
        # Texts that become single tokens must not use up merges of the BPE.
        yield from fixed.split(template.render(row.conversation).text)
    for function in split_functions("train"):
        for text in (function.name, *(item.name for item in function.parameters), f" {function.summary}"):
            yield from [text] * _WORD_WEIGHT
    for word in split_words("train"):
        yield from [word, f" {word}"] * _WORD_WEIGHT
    for pair in range(100):
        yield from [f"{pair:02}"] * _SAMPLE_ROWS


def copy_tokenizer(tokenizer: Path, folder: Path, template: str = "") -> None:
    """Copy a tokenizer's files into a run's folder, so that the run does not depend on the data's folder."""
    for name in FILES:
        source = tokenizer if name == "tokenizer.json" else tokenizer.parent / name
        if source.resolve() == (folder / name).resolve():
            continue
        if source.is_file():
            write_atomic(folder / name, source.read_bytes())
        else:
            # A file left by an earlier tokenizer would be taken for this one's.
            (folder / name).unlink(missing_ok=True)
    if template:
        write_atomic(folder / "chat_template.jinja", Path(template).read_bytes())


def end_tokens(path: Path, tokenizer: Any, template: ChatTemplate) -> frozenset[int]:
    """Tokens that end an answer: those in the folder's files, the one that the template ends a turn with, and the
    usual ones if the tokenizer has them."""
    # The files of a base model name only the end of a text; the token that ends a turn is in the template.
    texts = [template.turn_end(), TURN_END, END_OF_TEXT]
    ids: set[int] = set()
    for name in ("generation_config.json", "tokenizer_config.json"):
        file = path.parent / name
        if file.is_file():
            config = read_json_object(file)
            listed = config.get("eos_token_id")
            with malformed_as(DataError, f"eos_token_id in {file} is damaged", "download the file again"):
                ids.update(map(index, listed if isinstance(listed, list) else [] if listed is None else [listed]))
            texts.append(token_text(config.get("eos_token")))
    known = (tokenizer.token_to_id(text) for text in texts if text)
    return frozenset(ids | {number for number in known if number is not None})
