"""A small tokenizer for generated function calls, made so that names and values can be copied token by token.

A call repeats names and values of its prompt. Requests put names in backticks and texts in quotes, so fixed parts of
JSON, punctuation and pairs of digits are tokens of their own, and a name or a value has the same tokens in both places.
Most words of the training split are one token; held-out ones are put together from parts, like any word never met.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from keepstep.core.files import write_atomic, write_json
from keepstep.data.chat_generate import generate_rows, split_functions, split_words
from keepstep.data.chat_template import BUILT_IN, SPECIAL_TOKENS, TURN_END, ChatTemplate
from keepstep.data.corpus import prepare_folder
from keepstep.data.tokenize import END_OF_TEXT

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
"""Parts that the template and JSON write the same way each time."""


def prepare_tokenizer(cache_dir: Path, seed: int) -> Path:
    """The tokenizer.json, with its chat template beside it, trained at first use on generated rows."""
    key = hashlib.sha256(f"{_VERSION} {sys.version} {seed} {BUILT_IN}".encode()).hexdigest()[:12]
    return prepare_folder(cache_dir / f"tokenizer-{key}", lambda folder: _build(folder, seed)) / "tokenizer.json"


def _build(folder: Path, seed: int) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps = [
        # Names stand in backticks or quotes and values after the same sign wherever they are, so a word keeps the
        # space before it and a part of a name its underscore.
        pre_tokenizers.Split(Regex("[ _]?[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9]+?(?=[ _]?[A-Za-z]|[0-9]|$)"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, *SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(_FIXED),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _FIXED])
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_atomic(folder / "chat_template.jinja", BUILT_IN)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "pad_token": END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", facts)


def _texts(seed: int) -> Iterator[str]:
    """Rows for how things are written, and every word of the training split for itself: most become one token."""
    template = ChatTemplate()
    fixed = re.compile("|".join(re.escape(text) for text in sorted(_FIXED, key=len, reverse=True)))
    for row in generate_rows(_SAMPLE_ROWS, seed, "train"):
        # What becomes a token as a whole must not use up merges of the BPE.
        yield from fixed.split(template.render(row.conversation).text)
    for function in split_functions("train"):
        for text in (function.name, *(item.name for item in function.parameters), f" {function.summary}"):
            yield from [text] * _WORD_WEIGHT
    for word in split_words("train"):
        yield from [word, f" {word}"] * _WORD_WEIGHT
    for pair in range(100):
        yield from [f"{pair:02}"] * _SAMPLE_ROWS


FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip
"""What may belong to a tokenizer."""


def keep_tokenizer(tokenizer: Path, folder: Path, template: str = "") -> None:
    """Copy a tokenizer's files beside a run, so that the run is whole without the data it came from."""
    for name in FILES:
        source = tokenizer if name == "tokenizer.json" else tokenizer.parent / name
        if source.resolve() == (folder / name).resolve():
            continue
        if source.is_file():
            write_atomic(folder / name, source.read_bytes())
        else:
            # What a tokenizer that was there before had beside it would be taken for this one's.
            (folder / name).unlink(missing_ok=True)
    if template:
        write_atomic(folder / "chat_template.jinja", Path(template).read_bytes())
