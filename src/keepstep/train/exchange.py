"""Hugging Face in and out: a folder becomes a run, and a run becomes a folder that `transformers` and vLLM load.

Every export reads itself back and compares logits before it is called done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep import __version__
from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.config.check import broken_rules
from keepstep.config.dump import dump_config
from keepstep.config.fields import value_at
from keepstep.config.layout import resolve_layout
from keepstep.config.schema import CheckpointConfig, ModelConfig, RunConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import finished_in, is_vacant, write_atomic, write_json
from keepstep.core.ranks import from_environment
from keepstep.core.units import format_count
from keepstep.data import tokenize
from keepstep.data.chat_template import ChatTemplate, find_template
from keepstep.data.chat_tokenizer import FILES, keep_tokenizer
from keepstep.models.hf_config import model_config_from_hf
from keepstep.models.hf_describe import describe_hf, export_family
from keepstep.models.hf_folder import HfTensors, is_hf_folder, load_hf, read_hf_config, save_hf
from keepstep.models.peft import save_adapter
from keepstep.models.size import parameter_count
from keepstep.models.transformer import Transformer
from keepstep.observe.folder import RunFolder
from keepstep.parallel.apply import apply_parallel
from keepstep.parallel.mesh import build_grid
from keepstep.parallel.world import choose_device, joined_world
from keepstep.train.speaker import end_tokens
from keepstep.train.start import (
    TOKENIZER,
    describe_start,
    find_chat_template,
    find_tokenizer,
    run_config,
    run_facts,
    start_shape,
    whole_model,
)

TOLERANCE = 1e-5
"""Largest difference of logits that a reloaded export may have, relative to the largest logit where that is above 1."""
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECK_TOKENS = 24


def fetch_source(source: str) -> Path:
    """A local folder as it is; anything else is taken as a repository on the Hugging Face hub and downloaded."""
    path = Path(source)
    if path.is_dir():
        return path
    if source.startswith((".", "/")) or source.count("/") != 1:
        raise UsageError(f"{source} is no folder", "give a folder with config.json, or OWNER/NAME on the hub")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *FILES]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # whatever the hub's client raises, the user can only mend name, network or access
        raise UsageError(
            f"{source} cannot be fetched: {error}", "check the name, the network and your access"
        ) from None


def import_model(source: Path, name: str, runs_dir: str, processes: int) -> RunConfig:
    """The configuration of the run that an import makes; `import_weights` fills it, in as many processes as wanted."""
    if not is_hf_folder(source):
        raise UsageError(f"{source} is no Hugging Face model: it has no config.json", "a run needs no import")
    if processes < 1:
        raise UsageError(f"--procs is {processes}, but it must be 1 or more", "--procs 1")
    shape = start_shape(source)
    model = replace(shape, preset="custom", max_positions=max(shape.max_positions, shape.seq_len))
    config = replace(RunConfig(), name=name, runs_dir=runs_dir, model=model)
    # What the run's own config.yaml could not say again must not become a run.
    for broken in broken_rules(config):
        hint = f"--{broken.hint.replace('=', ' ')}" if broken.fields[0] == "name" and broken.hint else broken.hint
        raise UsageError(f"{broken.fields[0]} is {value_at(config, broken.fields[0])!r}, but it {broken.rule}", hint)
    return config


def import_weights(source: Path, config: RunConfig) -> RunFolder:
    """Read weights straight into this process's shards and commit them as step 0 of a run. Every process calls it."""
    ranks = from_environment()
    device = choose_device("cpu", ranks.local_rank)
    folder = RunFolder(Path(config.runs_dir) / config.name).create()
    with joined_world(ranks, device) as world:
        grid = build_grid(resolve_layout(config.parallel, ranks.world_size), device.type)
        with torch.device("meta"):
            model = Transformer(config.model)
        apply_parallel(model, grid, config.parallel, config.compute, torch.float32, ["none"] * config.model.layers)
        model.to_empty(device=device)
        load_hf(model, source)
        checkpointer = Checkpointer(folder.checkpoints, CheckpointConfig())
        checkpointer.save(0, {"model": dict(model.named_parameters())}, {"keepstep": __version__})
        checkpointer.close()
        if world.is_first:
            facts = {"imported_from": str(source), "dtype": _short_name(HfTensors(source).dtype())}
            write_json(folder.facts, {"keepstep": __version__, **facts, "parameters": parameter_count(config.model)})
            tokenizer = find_tokenizer(source)
            if tokenizer is not None:
                keep_tokenizer(tokenizer, folder.root / TOKENIZER)
            # Last: with it the folder is a run, and an import that was cut short can be started again.
            write_atomic(folder.config, dump_config(config))
    return folder


@dataclass(frozen=True)
class Exported:
    """What an export wrote and how well it reads back."""

    folder: Path
    family: str
    dtype: str
    parameters: int
    weight_bytes: int
    difference: float
    """Largest difference of logits to our own model with the same rounding."""
    difference_transformers: float | None
    """The same for `transformers`; None where it is not installed."""


def export_model(where: Path, out: Path, dtype: str = "auto") -> Exported:
    """Write a Hugging Face folder from a run (adapters are merged), read it back and compare."""
    check_vacant(out)
    model, config, step = whole_model(where)
    facts = run_facts(where)
    chosen = dtype if dtype != "auto" else str(facts.get("dtype", "fp32"))
    tokenizer = find_tokenizer(where)
    template = find_template(tokenizer, find_chat_template(where, config)) if tokenizer else None
    described = describe_hf(config.model, _long_name(chosen), _token_ids(tokenizer, template))
    with finished_in(out) as aside:
        size = save_hf(dict(model.named_parameters()), config.model, described, aside, _NAMES[chosen])
        _write_tokenizer(tokenizer, template, config, described, aside)
        difference, theirs = check_export(model, aside, _NAMES[chosen])
        exported = Exported(
            folder=out,
            family=str(described["model_type"]),
            dtype=chosen,
            parameters=parameter_count(config.model),
            weight_bytes=size,
            difference=difference,
            difference_transformers=theirs,
        )
        write_atomic(aside / "README.md", model_card(exported, config, step, facts))
    return exported


def check_vacant(out: Path) -> None:
    """Raise where something lies that an export would mix with; what an export left that was cut short does not."""
    if not is_vacant(out):
        raise UsageError(f"{out} is not empty", "choose another folder, or remove it")


def export_adapter(where: Path, out: Path) -> Path:
    """Write a LoRA run's adapters as PEFT files."""
    check_vacant(out)
    config = run_config(where)
    if not config.lora.rank:
        raise UsageError(f"{where} has no adapters: all its weights were trained", "keepstep export RUN --hf OUT")
    model, _, _ = whole_model(where, merge=False)
    family, base = export_family(config.model), config.finetune.start_from or "unknown"
    with finished_in(out) as aside:
        save_adapter(model, config.lora, family, base, aside)
    return out


@torch.no_grad()
def check_export(model: Transformer, out: Path, dtype: torch.dtype) -> tuple[float, float | None]:
    """Differences of our own reading of the folder, and of transformers'. Raises above the tolerance."""
    generator = torch.Generator().manual_seed(0)
    length = min(_CHECK_TOKENS, model.config.seq_len)
    tokens_bt = torch.randint(0, model.config.vocab, (2, length), generator=generator)
    expected = _rounded(model, dtype)(tokens_bt)[..., : model.config.vocab]
    reloaded = Transformer(ModelConfig(**model_config_from_hf(read_hf_config(out))))
    load_hf(reloaded, out)
    difference = _difference(reloaded.eval()(tokens_bt)[..., : model.config.vocab], expected)
    theirs = _transformers_logits(out, tokens_bt)
    difference_theirs = None if theirs is None else _difference(theirs, expected)
    for reader, value in (("keepstep", difference), ("transformers", difference_theirs)):
        if value is not None and not value <= TOLERANCE:
            raise CheckpointError(
                f"the export {out} is wrong: read back by {reader}, its logits differ by {value:.2e} "
                f"(at most {TOLERANCE:.0e} is rounding)",
                "do not use it, and please report this with the model's config.yaml",
            )
    return difference, difference_theirs


def _rounded(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The model with its weights rounded as the export rounds them, computing in fp32."""
    if dtype == torch.float32:
        return model
    copy = Transformer(model.config)
    copy.load_state_dict({name: item.detach().to(dtype).float() for name, item in model.named_parameters()})
    return copy.eval()


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def _transformers_logits(out: Path, tokens_bt: Tensor) -> Tensor | None:
    if find_spec("transformers") is None:
        return None
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    model = loaded.eval()
    logits: Tensor = model(tokens_bt).logits
    return logits


def _write_tokenizer(
    tokenizer: Path | None, template: ChatTemplate | None, config: RunConfig, described: dict[str, Any], out: Path
) -> None:
    ids = {
        key: described[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if described.get(key) is not None
    }
    generation = out / "generation_config.json"
    if tokenizer is not None:
        keep_tokenizer(tokenizer, out)
    kept = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    # Readers stop at what stands here, whatever config.json says: what the imported model stopped at is not enough.
    ends = {key: value for key, value in ids.items() if key == "eos_token_id"}
    write_json(generation, {"_from_model_config": False, **ids, **kept, **ends})
    if tokenizer is None or template is None:
        return
    write_atomic(out / "chat_template.jinja", template.source)
    settings = out / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.is_file() else {}
    known.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    known.setdefault("model_max_length", max(config.model.max_positions, config.model.seq_len))
    if "eos_token" not in known and "eos_token_id" in ids:
        first = ids["eos_token_id"][0] if isinstance(ids["eos_token_id"], list) else ids["eos_token_id"]
        known["eos_token"] = tokenize.load(tokenizer).id_to_token(first)
    write_json(settings, known)


def _token_ids(tokenizer: Path | None, template: ChatTemplate | None) -> dict[str, Any]:
    if tokenizer is None or template is None:
        return {}
    loaded = tokenize.load(tokenizer)
    ends = sorted(end_tokens(tokenizer, loaded, template))
    settings = tokenizer.parent / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.is_file() else {}
    ids: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    for key in ("bos_token", "pad_token"):
        text = known.get(key)
        number = loaded.token_to_id(text.get("content") if isinstance(text, dict) else text) if text else None
        if number is not None:
            ids[f"{key}_id"] = number
    return ids


def _long_name(short: str) -> str:
    return str(_NAMES[short]).removeprefix("torch.")


def _short_name(dtype: torch.dtype) -> str:
    return next((name for name, known in _NAMES.items() if known == dtype), "fp32")


def model_card(exported: Exported, config: RunConfig, step: int, facts: dict[str, Any]) -> str:
    """README.md of an export: what was trained, on what, for how long, and how the files were checked."""
    start = describe_start(config)
    data = facts.get("data") or {}
    rows = {
        "Parameters": f"{format_count(exported.parameters)} ({exported.parameters:,})",
        "Architecture": exported.family,
        "Precision of the files": exported.dtype,
        "Trained for": f"{step:,} steps of {config.global_batch} rows × {config.model.seq_len} tokens",
        "Started from": start["start_from"] or facts.get("imported_from") or f"random weights (seed {config.seed})",
        "Adapters": f"LoRA of rank {config.lora.rank}, merged" if start["lora"] else None,
        "Data": config.data.path if data else None,
        "Optimizer": f"{config.optimizer.name}, peak learning rate {config.optimizer.lr:g}" if step else None,
        "Logits read back": f"within {exported.difference:.1e} of the trained model",
        "Logits in transformers": None
        if exported.difference_transformers is None
        else f"within {exported.difference_transformers:.1e}",
    }
    body = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {config.name}\n\n"
        f"Trained and exported with keepstep {__version__}.\n\n| | |\n|---|---|\n{body}\n"
    )
