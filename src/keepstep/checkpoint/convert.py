"""From one checkpoint form to another: ours (sharded or full), DCP, and safetensors as Hugging Face tools read them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from keepstep.checkpoint import commit
from keepstep.checkpoint.foreign import DCP_METADATA, read_dcp, read_safetensors
from keepstep.checkpoint.manifest import parse_folder_name
from keepstep.checkpoint.offline import Content, read_content, write_content
from keepstep.checkpoint.retention import reading
from keepstep.checkpoint.store import open_store
from keepstep.core.errors import CheckpointError

Form = Literal["sharded", "full", "safetensors", "dcp"]
FORMS: tuple[str, ...] = get_args(Form)


def read_any(source: str, step: int = 0) -> Content:
    """Whatever `source` is: a committed step folder of ours, a DCP folder, a safetensors file or a folder of them.

    Foreign forms know no step; `step` says which one they are.
    """
    path = Path(source)
    if (path / DCP_METADATA).is_file():
        return read_dcp(path, step)
    if path.suffix == ".safetensors" and path.is_file():
        return read_safetensors(path, step)
    parent, _, name = source.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
    if parse_folder_name(name) is not None:
        try:
            where = commit.read_step(store, name)
        except FileNotFoundError as error:
            raise CheckpointError(f"{source} is not committed: it has no marker") from error
        with reading(store, name):
            return read_content(store, where)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return read_safetensors(path, step)
    raise CheckpointError(
        f"{source} is no checkpoint that we can read",
        "give a step folder, a DCP folder (with .metadata), or a safetensors file or folder",
    )


def write_any(content: Content, target: str, form: Form, shards: int = 1, with_parity: bool = False) -> str:
    """Write `content` into the folder `target`; returns what was written."""
    match form:
        case "sharded" | "full":
            store = open_store(target)
            written = write_content(store, content, shards if form == "sharded" else 1, with_parity)
            return store.locate(written.name)
        case "safetensors":
            return _write_safetensors(content, Path(target))
        case "dcp":
            return _write_dcp(content, Path(target))


def _write_safetensors(content: Content, folder: Path) -> str:
    """The weights alone, under their own names, in one file."""
    from safetensors.torch import save_file

    weights = {name.removeprefix("model."): t for name, t in content.tensors.items() if name.startswith("model.")}
    if not weights:
        raise CheckpointError("this checkpoint holds no weights (no tensor below `model`)")
    path = folder / "model.safetensors"
    if path.exists():
        raise CheckpointError(f"{path} exists already", "choose another folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})
    return str(path)


def _write_dcp(content: Content, folder: Path) -> str:
    import warnings

    from torch.distributed.checkpoint.state_dict_saver import save

    if (folder / DCP_METADATA).exists():
        raise CheckpointError(
            f"{folder} holds a DCP checkpoint already", "choose another folder: nothing is overwritten"
        )
    with warnings.catch_warnings():
        # DCP remarks that there is no process group; there is not meant to be one.
        warnings.simplefilter("ignore")
        save(dict(content.tensors), checkpoint_id=str(folder), no_dist=True)
    return str(folder)
