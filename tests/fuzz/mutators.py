"""Seeded damage to files: of single bytes, of the values in a JSON or YAML document, and of Python objects in a pickle.

A codec opens a file format up to the values inside, so that damage gets past its checksums and its syntax.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import pickle
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import torch
import yaml

Mutator = Callable[[bytes, random.Random], bytes]

_INTEGERS = (0, 1, -1, 2, 127, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30, -5)
_TEXTS = (
    "",
    "x",
    "../../x",
    "/etc/passwd",
    "a" * 3000,
    "\x00",
    "\ud800",
    "ä€𝄞",
    "nan",
    "1e999",
    "{{",
    "%s%n",
    "\n",
    ".",
)


def hostile_value(rng: random.Random) -> Any:
    """A value that a reader may not expect at its place."""
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice(_INTEGERS)
    if kind == 2:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.5, 5e-324, 1.5))
    if kind == 3:
        return rng.choice((None, True, False))
    if kind < 6:
        return rng.choice(_TEXTS)
    if kind == 6:
        return rng.choice(([], {}, [[]], {"": None}, [None], {"a": 5}, [1, "x", None], {"type": "x"}, [0] * 2000))
    nested: Any = 0
    for _ in range(rng.choice((20, 200, 900))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def _places(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> None:
    """Every (container, key) below `value`, also in the attributes of objects."""
    if depth > 40 or len(found) > 20_000:
        return
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    elif not isinstance(value, torch.Tensor) and isinstance(getattr(value, "__dict__", None), dict):
        items, value = vars(value).items(), vars(value)
    for key, item in items:
        found.append((value, key))
        _places(item, found, depth + 1)


def mutate_tree(value: Any, rng: random.Random) -> Any:
    """`value` with one to three of its parts replaced, removed, added, copied or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _places(value, places)
        if not places or rng.random() < 0.01:
            return hostile_value(rng)
        container, key = rng.choice(places)
        other, other_key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice((*_TEXTS, "x"))] = copy.deepcopy(container.pop(key))
            case 2 if isinstance(container, list):
                container.insert(rng.randrange(len(container) + 1), copy.deepcopy(container[key]))
            case 3:
                container[key] = copy.deepcopy(other[other_key])
            case 4 if isinstance(container[key], int | float):
                number = container[key]
                container[key] = rng.choice(
                    (number + 1, number - 1, -number, number * 2, number * 10**9, float(number))
                )
            case 5 if isinstance(container[key], str) and container[key]:
                text = container[key]
                at = rng.randrange(len(text))
                container[key] = text[:at] + rng.choice((*_TEXTS, "0", "9")) + text[at + rng.randrange(3) :]
            case _:
                container[key] = hostile_value(rng)
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to four places damaged."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        size = rng.choice((1, 2, 4, 8, 64, 1000))
        match rng.randrange(9):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = rng.randbytes(size)
            case 5:
                other = rng.randrange(len(out) + 1)
                out[at : at + size] = out[other : other + size]
            case 6:
                out[at : at + size] = bytes(len(out[at : at + size]))
            case 7:
                form = rng.choice(("<i", "<q", "<Q", "<I", "<H"))
                width = struct.calcsize(form)
                number = rng.choice(_INTEGERS) & (256**width - 1)
                if at + width <= len(out):
                    out[at : at + width] = number.to_bytes(width, "little")
            case _:
                numbers = list(re.finditer(rb"-?[0-9]+(\.[0-9]+)?", bytes(out[at : at + 500])))
                if numbers:
                    match = rng.choice(numbers)
                    new = rng.choice(
                        (*map(str, _INTEGERS), "NaN", "Infinity", "1e999", "null", '"x"', "[" * 2000, "9" * 5000)
                    )
                    out[at + match.start() : at + match.end()] = new.encode()
    return bytes(out)


def _some(*choices: Mutator) -> Mutator:
    return lambda data, rng: rng.choice(choices)(data, rng)


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _json(data: bytes, rng: random.Random) -> bytes:
    return _dumped(mutate_tree(json.loads(data), rng))


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def _yaml(data: bytes, rng: random.Random) -> bytes:
    tree = mutate_tree(yaml.safe_load(data), rng)
    return yaml.safe_dump(tree).encode(errors="surrogatepass")


def _yaml_words(data: bytes, rng: random.Random) -> bytes:
    """One value of the text replaced by other YAML."""
    words = (
        "${model.hidden}", "${", "${x}", "*a", "&a [*a]", "!!python/object:os.system x", "|", "? x", "[", "{a: 1}",
        "0x1F", "2024-01-01", "1_000", "~", "<<", ".inf", "1e400", "99999999999999999999", "- - -",
        "'", "\t", "=", "1:60",
        "10 GiB",
    )  # fmt: skip
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    key, colon, _ = lines[at].partition(b":")
    lines[at] = key + colon + b" " + rng.choice(words).encode()
    return b"\n".join(lines)


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header, with its length made right again."""
    size = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + size], rng)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _pickle(data: bytes, rng: random.Random) -> bytes:
    return pickle.dumps(mutate_tree(pickle.loads(data), rng))


def _torch(data: bytes, rng: random.Random) -> bytes:
    out = io.BytesIO()
    torch.save(mutate_tree(torch.load(io.BytesIO(data), weights_only=False), rng), out)
    return out.getvalue()


def _parquet(data: bytes, rng: random.Random) -> bytes:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    out = io.BytesIO()
    rows = mutate_tree(parquet.read_table(io.BytesIO(data)).to_pylist(), rng)
    parquet.write_table(arrow.Table.from_pylist(rows), out)
    return out.getvalue()


def _zstd(data: bytes, rng: random.Random) -> bytes:
    import zstandard

    return zstandard.compress(mutate_lines(zstandard.decompress(data), rng))


def _gzip(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(mutate_lines(gzip.decompress(data), rng), mtime=0)


mutate_json = _some(_json, _json, _json, mutate_bytes)
mutate_lines = _some(_lines, _lines, mutate_bytes)

BY_SUFFIX: dict[str, Mutator] = {
    ".json": mutate_json,
    "_SUCCESS": mutate_json,
    ".jsonl": mutate_lines,
    ".gz": _some(_gzip, mutate_bytes),
    ".zst": _some(_zstd, mutate_bytes),
    ".yaml": _some(_yaml, _yaml_words, mutate_bytes),
    ".safetensors": _some(_safetensors, mutate_bytes),
    ".metadata": _some(_pickle, mutate_bytes),
    ".pt": _some(_torch, mutate_bytes),
    ".parquet": _some(_parquet, mutate_bytes),
}


def mutate(name: str, data: bytes, rng: random.Random) -> bytes:
    """One damaged version of a file, in a way that its format suggests."""
    wanted = next((mutator for suffix, mutator in BY_SUFFIX.items() if name.endswith(suffix)), mutate_bytes)
    try:
        return wanted(data, rng)
    except Exception:
        # Not every object can be written in every format.
        return mutate_bytes(data, rng)
