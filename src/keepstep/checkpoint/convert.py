"""From one checkpoint form to another: ours (sharded or full), DCP, and safetensors under our own names.

One tensor is in memory at a time, but for DCP, whose writer keeps all. Names and layouts of other trainers' models are
`train.convert`'s business.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from keepstep.checkpoint import commit
from keepstep.checkpoint.boxes import whole
from keepstep.checkpoint.direct import write_durable
from keepstep.checkpoint.foreign import DCP_METADATA, read_dcp, read_safetensors
from keepstep.checkpoint.layout import DTYPE_NAMES
from keepstep.checkpoint.manifest import parse_folder_name
from keepstep.checkpoint.offline import Content, Tensors, read_content, write_content
from keepstep.checkpoint.restore import bytes_of
from keepstep.checkpoint.retention import reading
from keepstep.checkpoint.shards import lay_out
from keepstep.checkpoint.store import open_store
from keepstep.core.errors import CheckpointError
from keepstep.core.files import sync_folder

Form = Literal["sharded", "full", "safetensors", "dcp"]
FORMS: tuple[str, ...] = get_args(Form)


@contextmanager
def open_any(source: str, step: int = 0) -> Iterator[Content]:
    """Whatever `source` is: a committed step folder of ours, a DCP folder, a safetensors file or a folder of them.

    Foreign forms know no step; `step` says which one they are. Tensors are read while the source is open, and a step of
    ours is not deleted meanwhile.
    """
    path = Path(source)
    parent, _, name = source.rstrip("/").rpartition("/")
    if (path / DCP_METADATA).is_file():
        yield read_dcp(path, step)
    elif path.suffix == ".safetensors" and path.is_file():
        yield read_safetensors(path, step)
    elif parse_folder_name(name) is not None:
        store = open_store(parent or ".")
        try:
            where = commit.read_step(store, name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{source} is not committed: it has no marker") from error
        with reading(store, name):
            yield read_content(store, where)
    elif path.is_dir() and any(path.glob("*.safetensors")):
        yield read_safetensors(path, step)
    else:
        raise CheckpointError(
            f"{source} is no checkpoint that we can read",
            "give a step folder, a DCP folder (with .metadata), a safetensors file or folder, or one of Megatron's",
        )


def write_any(content: Content, target: str, form: Form, shards: int = 1, with_parity: bool = False) -> str:
    """Write `content` into the folder `target`; returns what was written."""
    match form:
        case "sharded" | "full":
            store = open_store(target)
            written = write_content(store, content, shards if form == "sharded" else 1, with_parity)
            return store.locate(written.name)
        case "safetensors":
            return _write_safetensors(content.tensors, Path(target))
        case "dcp":
            return _write_dcp(content.tensors, Path(target))


def _write_safetensors(tensors: Tensors, folder: Path) -> str:
    """The weights alone, under their own names, in one file."""
    weights = {name: kind for name, kind in tensors.kinds.items() if name.startswith("model.")}
    if not weights:
        raise CheckpointError("this checkpoint holds no weights (no tensor below `model`)")
    path = folder / "model.safetensors"
    if path.exists():
        raise CheckpointError(f"{path} exists already", "choose another folder: nothing is overwritten")
    specs, _ = lay_out([(name, DTYPE_NAMES[dtype], shape, whole(shape)) for name, (dtype, shape) in weights.items()])
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec in specs:
        span = [spec.begin, spec.begin + spec.size_bytes]
        table[spec.tensor.removeprefix("model.")] = {
            "dtype": spec.dtype, "shape": spec.tensor_shape, "data_offsets": span,
        }  # fmt: skip
    text = json.dumps(table, separators=(",", ":")).encode()
    header = text.ljust(-(-len(text) // 8) * 8)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(struct.pack("<Q", len(header)) + header)
        for spec in specs:
            yield bytes_of(tensors[spec.tensor].contiguous())

    folder.mkdir(parents=True, exist_ok=True)
    # Under its name only when it is whole, and nothing of it where that is not to be.
    aside = folder / f".{path.name}.unfinished"
    aside.unlink(missing_ok=True)
    try:
        write_durable(aside, pieces())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(folder)
    return str(path)


def _write_dcp(tensors: Tensors, folder: Path) -> str:
    from torch.distributed.checkpoint.state_dict_saver import save

    if (folder / DCP_METADATA).exists():
        raise CheckpointError(
            f"{folder} holds a DCP checkpoint already", "choose another folder: nothing is overwritten"
        )
    with warnings.catch_warnings():
        # DCP remarks that there is no process group; there is not meant to be one.
        warnings.simplefilter("ignore")
        save(dict(tensors), checkpoint_id=str(folder), no_dist=True)
    return str(folder)
