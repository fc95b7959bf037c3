"""A Hugging Face model, in a folder or on the hub, or a GGUF file becomes a run that training can start from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from keepstep import __version__
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.check import broken_rules
from keepstep.config.dump import dump_config
from keepstep.config.layout import resolve_layout
from keepstep.config.schema import CheckpointConfig, RunConfig
from keepstep.core.errors import UsageError
from keepstep.core.files import write_atomic, write_json
from keepstep.core.ranks import from_environment
from keepstep.data.chat.tokenizer import copy_tokenizer
from keepstep.interop.hf_folder import is_gguf, is_hf_folder, load_hf, open_source, read_hf_shape, tokenizer_inside
from keepstep.interop.run_source import TOKENIZER_FOLDER, find_tokenizer
from keepstep.interop.safetensors_files import common_dtype
from keepstep.models.size import parameter_count
from keepstep.models.transformer import Transformer
from keepstep.observe.run_folder import RunFolder
from keepstep.parallel.apply import apply_parallel
from keepstep.parallel.mesh import build_mesh
from keepstep.parallel.world import choose_device, joined_world

PRECISION_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def import_model(source: Path, name: str, runs_dir: str, *, own_tokenizer: bool = False) -> RunConfig:
    """The configuration of the run that an import makes; `import_weights` then loads it.

    With `own_tokenizer`, the one in a GGUF file is not used.
    """
    if not is_gguf(source) and not is_hf_folder(source):
        remedy = "a run needs no import; of a repository with GGUF files name one: OWNER/NAME/FILE.gguf"
        raise UsageError(f"{source} is no Hugging Face model: it has no config.json", remedy)
    if not own_tokenizer:
        tokenizer_inside(source)  # an error before the weights are read
    shape = read_hf_shape(source)
    model = replace(shape, preset="custom", max_positions=max(shape.max_positions, shape.seq_len))
    config = replace(RunConfig(), name=name, runs_dir=runs_dir, model=model)
    # The run's own config.yaml must load again, so it has to pass every rule.
    for broken in broken_rules(config):
        hint = f"--{broken.hint.replace('=', ' ')}" if broken.fields[0] == "name" and broken.hint else broken.hint
        raise UsageError(broken.message, hint)
    return config


def import_weights(source: Path, config: RunConfig, tokenizer: Path | None = None) -> RunFolder:
    """Read weights straight into this process's shards and commit them as step 0 of a run. Every process calls it.

    `tokenizer` is a tokenizer.json to use instead of the source's own.
    """
    ranks = from_environment()
    device = choose_device("cpu", ranks.local_rank)
    folder = RunFolder(Path(config.runs_dir) / config.name)
    with joined_world(ranks, device) as world:
        mesh = build_mesh(resolve_layout(config.parallel, ranks.world_size), device.type)
        with torch.device("meta"):
            model = Transformer(config.model)
        apply_parallel(model, mesh, config.parallel, config.compute, torch.float32, ["none"] * config.model.layers)
        model.to_empty(device=device)
        load_hf(model, source)
        # Weights that do not load leave no folder behind.
        folder.create()
        if world.is_first and not folder.config.exists():
            # An import that was killed may have left its weights.
            shutil.rmtree(folder.checkpoints / "step_00000000", ignore_errors=True)
        checkpointer = Checkpointer(folder.checkpoints, CheckpointConfig())
        checkpointer.save(0, {"model": model.state_dict()}, {"keepstep": __version__})
        checkpointer.close()
        if world.is_first:
            dtype = PRECISION_NAMES.get(common_dtype(open_source(source)[1]), "fp32")
            facts = {"imported_from": str(source), "dtype": dtype, "parameters": parameter_count(config.model)}
            write_json(folder.facts, {"keepstep": __version__, **facts})
            _write_tokenizer(source, tokenizer, folder.root / TOKENIZER_FOLDER)
            # Last: config.yaml makes the folder a run, so an interrupted import can be started again.
            write_atomic(folder.config, dump_config(config))
    return folder


def _write_tokenizer(source: Path, tokenizer: Path | None, folder: Path) -> None:
    found = tokenizer or find_tokenizer(source)
    if found is not None:
        copy_tokenizer(found, folder)
    else:
        for name, text in tokenizer_inside(source).items():
            write_atomic(folder / name, text)
