"""A tokenizer in GGUF metadata ↔ the files of a Hugging Face tokenizer.

llama.cpp knows the splitting of words by name only. A name or a tokenizer without an equivalent is refused: with other
tokens than in training, a model answers nonsense.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.errors import DataError, malformed_as
from keepstep.core.files import read_json_object
from keepstep.data import tokenization
from keepstep.data.chat.template import ChatTemplate, token_text

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens."""
_LONGEST_PIECE = 256
_OTHER_TOKENIZER = "give a folder with its tokenizer.json: --tokenizer FOLDER"
_NOT_AS_GGUF = "keepstep export RUN --hf OUT writes what transformers and vLLM read"
_SAMPLE = (
    "Hello  world\n\n it's I'M don'T 1234567 x_1  naïve e\u0301 日本語 😀 \t\r\n f_b(x=3.14)//\n  HTTPServer <a> ... "
)
"""A text that known splittings treat differently."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Their name of a special token → Hugging Face's."""
_SPACE = "\u2581"
"""A space in the pieces of SentencePiece."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


@dataclass(frozen=True)
class Splitting:
    """How a named pre-tokenizer of llama.cpp splits text, in the terms of a tokenizer.json."""

    steps: list[dict[str, Any]]
    whole_words: bool = False
    """Whether a word that is a token is taken without merging."""
    adds_bos: bool = False
    composes: bool = False
    """Whether the original tokenizer normalizes text to NFC; llama.cpp does not."""


SPLITTINGS = {
    "gpt-2": Splitting([_byte_level(use_regex=True)]),
    "smollm": Splitting([{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]),
    "llama-bpe": Splitting(
        _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST), whole_words=True, adds_bos=True
    ),
    "qwen2": Splitting(_split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST), composes=True),
}
"""By the value of tokenizer.ggml.pre."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """File name → content of the tokenizer in a GGUF file; empty where it has none."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return {}
    if kind not in ("gpt2", "llama"):
        raise DataError(f"tokenizer.ggml.model is {kind!r}; gpt2 and llama can be converted", _OTHER_TOKENIZER)
    with malformed_as(DataError, "the tokenizer in the GGUF file is damaged", _OTHER_TOKENIZER):
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
            raise ValueError("tokens occur twice or have no type")
        described = _sentencepiece(metadata) if kind == "llama" else _byte_bpe(metadata)
        used = {text: number for number, text in enumerate(tokens) if types[number] != _UNUSED}
        described["model"]["vocab"] = used
        described["added_tokens"] = [
            {"id": number, "content": text, "special": bool(types[number] != _USER_DEFINED), "normalized": False,
             "single_word": False, "lstrip": False, "rstrip": False}
            for text, number in used.items() if types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]  # fmt: skip
        named, ends = _special_tokens(metadata, tokens)
        first = named.get("bos_token") if named["add_bos_token"] else None
        described["post_processor"] = None if first is None else _prepending(first, used[first])
        text = json.dumps({"version": "1.0", "truncation": None, "padding": None} | described, ensure_ascii=False)
        tokenization.load_text(text, "the tokenizer in the GGUF file")
        files = {"tokenizer.json": text, "tokenizer_config.json": json.dumps(named, indent=2)}
        if ends:
            files["generation_config.json"] = json.dumps({"eos_token_id": ends})
        template = metadata.get("tokenizer.chat_template.tool_use") or metadata.get("tokenizer.chat_template")
        return files | ({"chat_template.jinja": str(template)} if template else {})


def _byte_bpe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise DataError(f"tokenizer.ggml.pre is {name!r}; {known} can be converted", _OTHER_TOKENIZER)
    splitting = SPLITTINGS[name]
    # The space that separates the two parts is never the first character.
    pairs = [(text[:1] + text[1:].partition(" ")[0], text[1:].partition(" ")[2])
             for text in metadata["tokenizer.ggml.merges"]]  # fmt: skip
    return {
        "normalizer": {"type": "NFC"} if splitting.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitting.steps},
        "decoder": _byte_level(use_regex=True),
        "model": {"type": "BPE", "merges": pairs, "ignore_merges": splitting.whole_words},
    }


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Its scores order merges: the pair with the highest score of the joined piece is merged first."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        text: float(score)
        for text, kind, score in zip(tokens, types, metadata["tokenizer.ggml.scores"], strict=True)
        if kind == _NORMAL
    }
    if max(map(len, scores), default=0) > _LONGEST_PIECE:
        raise ValueError("it has a piece of thousands of characters")
    pairs = [
        (-score, -at, at - len(text), text[:at], text[at:])
        for text, score in scores.items()
        for at in range(1, len(text))
        if text[:at] in scores and text[at:] in scores
    ]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    back = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {"type": "BPE", "merges": [pair[3:] for pair in sorted(pairs)], "unk_token": unknown,
                  "fuse_unk": True, "byte_fallback": True},
    }  # fmt: skip


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[dict[str, Any], list[int]]:
    """tokenizer_config.json, and the ids that end an answer."""
    ids = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {names[name]: tokens[number] for name, number in ids.items() if name in names and number is not None}
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    usual = is_sentencepiece or SPLITTINGS[metadata["tokenizer.ggml.pre"]].adds_bos
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
    ends = {int(number) for name, number in ids.items() if name in ("eos", "eot", "eom") and number is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    return config | named, sorted(ends)


def _prepending(text: str, number: int) -> dict[str, Any]:
    first, sequence = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [first, sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {text: {"id": text, "ids": [number], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": [first, sequence], "pair": pair, "special_tokens": special}


def tokenizer_metadata(path: Path, vocab: int, template: ChatTemplate) -> dict[str, Any]:
    """Metadata of a tokenizer.json and its chat template, proven to give the same tokens when it is read again."""
    raw, loaded = read_json_object(path), tokenization.load(path)
    with malformed_as(DataError, f"{path} cannot be written as GGUF", _NOT_AS_GGUF):
        model, texts = raw["model"], {number: text for text, number in loaded.get_vocab().items()}
        if model["type"] != "BPE" or max(texts) >= vocab:
            raise ValueError("it is no BPE, or has more tokens than the model")
        added = {item["id"]: _CONTROL if item["special"] else _USER_DEFINED for item in raw["added_tokens"]}
        types = [added.get(number, _NORMAL if number in texts else _UNUSED) for number in range(vocab)]
        tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
        pairs = [item.split(" ") if isinstance(item, str) else item for item in model["merges"]]
        found: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
        found |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs]}
        if model.get("byte_fallback"):
            found |= _piece_metadata(found, pairs, loaded, model.get("unk_token"))
        found |= _special_metadata(path, loaded, template)
        for name in SPLITTINGS:
            found["tokenizer.ggml.pre"] = "default" if model.get("byte_fallback") else name
            if _same_tokens(loaded, tokenization.load_text(tokenizer_files(found)["tokenizer.json"], "GGUF")):
                return found
    known = ", ".join(SPLITTINGS)
    raise DataError(f"{path} splits words in a way that llama.cpp does not know ({known})", _NOT_AS_GGUF)


def _piece_metadata(found: dict[str, Any], pairs: list[Any], loaded: Any, unknown: str | None) -> dict[str, Any]:
    """Scores in the order of the merges, and the kinds of pieces that only SentencePiece has."""
    order = {text: float(-rank) for rank, text in reversed(list(enumerate("".join(pair) for pair in pairs)))}
    tokens, types = found["tokenizer.ggml.tokens"], list(found["tokenizer.ggml.token_type"])
    for number, text in enumerate(tokens):
        if text == unknown:
            types[number] = _UNKNOWN
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            types[number] = _BYTE
    prefix = bool(loaded.encode("a", add_special_tokens=False).tokens[0].startswith(_SPACE))
    scores = [order.get(text, float(-len(pairs))) for text in tokens]
    found.pop("tokenizer.ggml.merges")
    values = {"model": "llama", "scores": scores, "token_type": types, "add_space_prefix": prefix}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _special_metadata(path: Path, loaded: Any, template: ChatTemplate) -> dict[str, Any]:
    config = path.parent / "tokenizer_config.json"
    known = read_json_object(config) if config.is_file() else {}
    texts = {name: token_text(known.get(f"{key}_token")) for name, key in _SPECIAL.items()} | {
        "eot": template.turn_end()
    }
    # Every reader stops at eos; the file of a base model may lack the token that ends a turn.
    texts["eos"] = texts["eos"] or texts["eot"] or tokenization.END_OF_TEXT
    ids = {name: loaded.token_to_id(text) for name, text in texts.items() if text}
    starts = loaded.encode("a").ids[:1] == [ids.get("bos")]
    found = {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None}
    return {**found, "tokenizer.ggml.add_bos_token": starts, "tokenizer.chat_template": template.source}


def _same_tokens(one: Any, other: Any) -> bool:
    special = " a".join(token.content for token in one.get_added_tokens_decoder().values())
    texts = [_SAMPLE, f"{special}\n{special[::-1]}"]
    return all(one.encode(text).ids == other.encode(text).ids for text in texts) and _words(one) == _words(other)


def _words(tokenizer: Any) -> Any:
    """How a text is split, and whether words that are tokens are merged: a small vocabulary may hide either."""
    model = json.loads(tokenizer.to_str())["model"]
    split = tokenizer.pre_tokenizer
    if model.get("byte_fallback"):
        return None
    return split and split.pre_tokenize_str(_SAMPLE), bool(model.get("ignore_merges"))
