"""States, steps and damage for the checkpoint tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint.offline import Content, Tensors, write_content
from keepstep.checkpoint.protocol import commit
from keepstep.checkpoint.protocol.layout import rank_name, split_state
from keepstep.checkpoint.protocol.manifest import Algorithm, CommittedCheckpoint
from keepstep.checkpoint.protocol.restore import restore
from keepstep.checkpoint.storage.store import Store


def example_state(seed: int) -> dict[str, Any]:
    """A little of everything a state may hold."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "embed.weight": torch.randn(300, 64, generator=generator),
            "half": torch.randn(33, 7, generator=generator).bfloat16(),
            "empty": torch.zeros(0, 4),
            "flag": torch.tensor(bool(seed)),
        },
        "optimizer": {
            "embed.weight": {"exp_avg": torch.randn(300, 64, generator=generator), "step": torch.tensor(3.0)}
        },
        "progress": {"samples": 640 + seed, "lr": 0.1, "note": "plain", "betas": [0.9, 0.95]},
        "rank": {"random": torch.arange(16, dtype=torch.uint8) + seed},
    }


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, all zero."""
    return {
        key: zeroed(value)
        if isinstance(value, dict)
        else torch.zeros_like(value)
        if isinstance(value, torch.Tensor)
        else None
        for key, value in state.items()
    }


def same_tensors(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether every tensor of `left` is in `right`, bit for bit."""
    first, second = split_state(left)[0], split_state(right)[0]
    return all(name in second and torch.equal(tensor, second[name]) for name, tensor in first.items())


def write_step(
    store: Store,
    step: int,
    state: dict[str, Any],
    ranks: int = 3,
    with_parity: bool = False,
    algorithm: Algorithm = "xxh3_64",
) -> CommittedCheckpoint:
    """Commit a step as `ranks` processes would, each with its rows of every tensor, without starting any."""
    named, values = split_state(state)
    tensors = {rank_name(name, 0) if name.startswith("rank.") else name: tensor for name, tensor in named.items()}
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    content = Content(step, Tensors(kinds, tensors.__getitem__), values, {"loss": 1.0 / step}, {})
    return write_content(store, content, ranks, with_parity, algorithm)


def load_step(store: Store, name: str, into: dict[str, Any]) -> None:
    """Load one step folder, in one process."""
    step = commit.read_step(store, name)
    restore(store, name, commit.read_manifest(store, step), into, 0, 1)


class Damage:
    """One random corruption of a folder's files, and the way back."""

    KINDS = ("flip", "flip_many", "truncate", "extend", "zero_page", "garbage", "delete", "swap", "stale", "move_block")

    def __init__(self, rng: random.Random, folder: Path, older: Path) -> None:
        self.files = sorted(path for path in folder.iterdir() if path.is_file())
        self.kind = rng.choice(self.KINDS)
        self.path = rng.choice(self.files)
        self.before = {path: path.read_bytes() for path in self.files}
        content = bytearray(self.before[self.path])
        at = rng.randrange(len(content))
        match self.kind:
            case "flip":
                content[at] ^= 1 << rng.randrange(8)
            case "flip_many":
                for _ in range(rng.randrange(2, 40)):
                    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case "truncate":
                content = content[:at]
            case "extend":
                content += rng.randbytes(rng.randrange(1, 5000))
            case "zero_page":
                start = at // 4096 * 4096
                content[start : start + 4096] = bytes(len(content[start : start + 4096]))
            case "garbage":
                length = rng.randrange(1, 2000)
                content[at : at + length] = rng.randbytes(len(content[at : at + length]))
            case "swap":
                other = rng.choice(self.files)
                content = bytearray(self.before[other])
                other.write_bytes(self.before[self.path])
            case "stale":
                twins = [path for path in older.iterdir() if path.name[:8] == self.path.name[:8]]
                content = bytearray(rng.choice(twins).read_bytes())
            case "move_block":
                length = min(rng.randrange(1, 70000), len(content) - at)
                source = rng.randrange(len(content) - length + 1)
                content[at : at + length] = content[source : source + length]
        if self.kind == "delete":
            self.path.unlink()
        else:
            self.path.write_bytes(content)

    def undo(self) -> None:
        """Put everything back."""
        for path, content in self.before.items():
            path.write_bytes(content)
