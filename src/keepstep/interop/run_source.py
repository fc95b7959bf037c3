"""What a run's folder offers other runs, exports and evaluations: shape, configuration, facts, tokenizer, template."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.config.check import broken_rules
from keepstep.config.hf_config import DEFAULT_SEQ_LEN
from keepstep.config.load import LoadedConfig, load_config
from keepstep.config.schema import RunConfig
from keepstep.core.errors import ConfigError, KeepstepError, UsageError
from keepstep.data.remote.hub import is_model_name
from keepstep.interop.hf_folder import fetch_source, is_hf_folder, read_hf_shape
from keepstep.observe.run_folder import RunFolder

BEST_FOLDER = "best"
"""Folder inside a run with the weights of its best validation."""
TOKENIZER_FOLDER = "tokenizer"
"""Folder inside a run with the files of its tokenizer."""


def adopt_initial_shape(loaded: LoadedConfig) -> RunConfig:
    """The configuration with the shape of the model in `finetune.start_from`; fields that the user set stay."""
    config = loaded.config
    if not config.finetune.start_from:
        return config
    # A model on the Hub is downloaded once; the run then refers to that copy.
    start = config.finetune.start_from
    if not Path(start).exists() and is_model_name(start):
        start = str(fetch_source(start))
        config = replace(config, finetune=replace(config.finetune, start_from=start))
    shape = read_hf_shape(Path(start)) if is_hf_folder(Path(start)) else read_run_config(Path(start)).model
    given = [path for path, origin in loaded.origins.items() if origin.kind not in ("default", "preset")]
    set_by_user = _values_in(config.model, "model", given)
    set_by_user["experts"] = replace(shape.experts, **_values_in(config.model.experts, "model.experts", given))
    longest = max(shape.max_positions, shape.seq_len)
    shape = replace(shape, preset="custom", max_positions=longest, seq_len=min(longest, DEFAULT_SEQ_LEN))
    adopted = replace(config, model=replace(shape, **set_by_user))
    # The configuration was checked with its default shape before; this one is what is split and trained.
    problems = [KeepstepError(broken.message, broken.hint) for broken in broken_rules(adopted)]
    if problems:
        raise ConfigError(problems)
    return adopted


def _values_in(section: Any, prefix: str, paths: list[str]) -> dict[str, Any]:
    """The section's own fields among dotted paths, by name."""
    names = [name for outer, _, name in (path.rpartition(".") for path in paths) if outer == prefix]
    return {name: getattr(section, name) for name in names}


def read_run_config(where: Path) -> RunConfig:
    """The configuration that the run was started with, its relative paths resolved."""
    folder = RunFolder(where)
    if not folder.config.is_file():
        hint = f"keepstep import {where}" if where.suffix == ".gguf" else "it needs a config.yaml or a config.json"
        raise UsageError(f"{where} is neither a run's folder nor a Hugging Face model", hint)
    return _resolve_paths(load_config(folder.config).config, where)


def _resolve_paths(config: RunConfig, where: Path) -> RunConfig:
    """The configuration with its relative paths resolved from the folder that the run was started in.

    Without this, a folder of the same name below the caller's working directory would be taken for the one meant.
    """
    inside = Path(config.runs_dir) / config.name
    # The caller is in the folder that the run was started in, perhaps through a link: paths work as they are.
    if inside.is_absolute() or inside.resolve() == where.resolve():
        return config
    # Links are kept first: where `runs` links to a scratch disk, the other paths are next to the link, not its target.
    named = (Path(os.path.abspath(where)), where.resolve())  # noqa: PTH100 - Path.absolute() keeps `..`
    here = next((path for path in named if path.parts[-len(inside.parts) :] == inside.parts), None)
    if here is None:
        return config
    started_in = Path(*here.parts[: -len(inside.parts)])

    def resolved(path: str) -> str:
        return str(started_in / path) if path and "://" not in path and not Path(path).is_absolute() else path

    def resolved_if_there(path: str) -> str:
        # `demo` and other built-in names are no paths.
        return resolved(path) if path and (started_in / path).exists() else path

    data = config.data
    paths: dict[str, Any] = {
        name: resolved_if_there(getattr(data, name)) for name in ("path", "valid_path", "test_path", "tokenizer")
    }
    blend = {resolved_if_there(path): weight for path, weight in data.blend.items()}
    return replace(
        config,
        runs_dir=str(started_in / config.runs_dir),
        data=replace(data, **paths, blend=blend),
        chat=replace(config.chat, template=resolved(config.chat.template)),
        finetune=replace(config.finetune, start_from=resolved(config.finetune.start_from)),
        checkpoint=replace(config.checkpoint, folder=resolved(config.checkpoint.folder)),
    )


def read_run_facts(where: Path) -> dict[str, Any]:
    """What the run recorded about itself: versions, data, where its weights were imported from."""
    path = RunFolder(where).facts
    facts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return facts


def find_tokenizer(where: Path) -> Path | None:
    """The tokenizer.json that belongs to a run or a Hugging Face folder."""
    candidates = [where / "tokenizer.json", where / TOKENIZER_FOLDER / "tokenizer.json"]
    if not is_hf_folder(where) and RunFolder(where).config.is_file():
        named = read_run_config(where).data.tokenizer
        candidates += [Path(named)] if named else []
    return next((path for path in candidates if path.is_file()), None)


def find_chat_template(where: Path, config: RunConfig) -> str:
    """The file that `chat.template` named when the run was trained; empty where the tokenizer's own was used."""
    if not config.chat.template:
        return ""
    # The run's copy first: the named file may have been edited or deleted since.
    copy = where / TOKENIZER_FOLDER / "chat_template.jinja"
    return str(copy) if copy.is_file() else config.chat.template if Path(config.chat.template).is_file() else ""
