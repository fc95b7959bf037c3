"""A run becomes a folder that `transformers` and vLLM load, or PEFT files of its adapters.

Every export is read back and its logits compared before it counts as done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep import __version__
from keepstep.config.hf_config import export_family, hf_config_of
from keepstep.config.schema import RunConfig
from keepstep.core.errors import CheckpointError, UsageError
from keepstep.core.files import finished_in, is_vacant, write_atomic, write_json
from keepstep.core.units import format_count
from keepstep.data import tokenization
from keepstep.data.chat.template import ChatTemplate, find_template
from keepstep.data.chat.tokenizer import copy_tokenizer, end_tokens
from keepstep.interop.convert import PRECISIONS
from keepstep.interop.full_model import load_full_model
from keepstep.interop.hf_folder import load_hf, read_hf_shape, save_hf
from keepstep.interop.peft import save_adapter
from keepstep.interop.run_source import find_chat_template, find_tokenizer, read_run_config, read_run_facts
from keepstep.models.moe import router_biases
from keepstep.models.size import parameter_count
from keepstep.models.transformer import Transformer

TOLERANCE = 1e-5
"""Largest difference of logits that a reloaded export may have, relative to the largest logit where that is above 1."""
_CHECK_TOKENS = 24


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and how much its logits differ when it is read back."""

    folder: Path
    step: int
    """The training step that the weights are of; 0 for an imported model."""
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
    _check_vacant(out)
    model, config, step = load_full_model(where)
    facts = read_run_facts(where)
    chosen = dtype if dtype != "auto" else str(facts.get("dtype", "fp32"))
    precision = PRECISIONS[chosen]
    tokenizer = find_tokenizer(where)
    template = find_template(tokenizer, find_chat_template(where, config)) if tokenizer else None
    described = hf_config_of(config.model, str(precision).removeprefix("torch."), _token_ids(tokenizer, template))
    with finished_in(out) as unfinished:
        state = {**dict(model.named_parameters()), **router_biases(model)}
        size = save_hf(state, config.model, described, unfinished, precision)
        _write_tokenizer(tokenizer, template, config, described, unfinished)
        difference, difference_theirs = check_export(model, unfinished, precision)
        exported = Exported(
            folder=out,
            step=step,
            family=str(described["model_type"]),
            dtype=chosen,
            parameters=parameter_count(config.model),
            weight_bytes=size,
            difference=difference,
            difference_transformers=difference_theirs,
        )
        write_atomic(unfinished / "README.md", _model_card(exported, config, step, facts))
    return exported


def export_adapter(where: Path, out: Path) -> int:
    """Write a LoRA run's adapters as PEFT files; return their step."""
    _check_vacant(out)
    config = read_run_config(where)
    if not config.lora.rank:
        raise UsageError(f"{where} has no adapters: all its weights were trained", "keepstep export RUN --hf OUT")
    model, _, step = load_full_model(where, merge=False)
    family, base = export_family(config.model), config.finetune.start_from or "unknown"
    with finished_in(out) as unfinished:
        save_adapter(model, config.lora, family, base, unfinished)
    return step


def _check_vacant(out: Path) -> None:
    """Raise where the folder holds files that an export would mix with; leftovers of an interrupted export may go."""
    if not is_vacant(out):
        raise UsageError(f"{out} is not empty", "choose another folder, or remove it")


@torch.no_grad()
def check_export(model: Transformer, out: Path, dtype: torch.dtype) -> tuple[float, float | None]:
    """How much logits differ when keepstep and when transformers reads the folder. Raises above the tolerance."""
    generator = torch.Generator().manual_seed(0)
    length = min(_CHECK_TOKENS, model.config.seq_len)
    tokens_bt = torch.randint(0, model.config.vocab, (2, length), generator=generator)
    expected = _rounded(model, dtype)(tokens_bt)[..., : model.config.vocab]
    reloaded = Transformer(read_hf_shape(out))
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
    rounded = {name: item.detach().to(dtype).float() for name, item in model.named_parameters()}
    copy.load_state_dict({**rounded, **router_biases(model)})
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
        copy_tokenizer(tokenizer, out)
    kept = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    # Readers stop at these ids, whatever config.json says; those of the imported model may lack our end tokens.
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
        known["eos_token"] = tokenization.load(tokenizer).id_to_token(first)
    write_json(settings, known)


def _token_ids(tokenizer: Path | None, template: ChatTemplate | None) -> dict[str, Any]:
    if tokenizer is None or template is None:
        return {}
    loaded = tokenization.load(tokenizer)
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


def _model_card(exported: Exported, config: RunConfig, step: int, facts: dict[str, Any]) -> str:
    """README.md of an export: what was trained, on what, for how long, and how the files were checked."""
    started_from = config.finetune.start_from or facts.get("imported_from")
    rows = {
        "Parameters": f"{format_count(exported.parameters)} ({exported.parameters:,})",
        "Architecture": exported.family,
        "Precision of the files": exported.dtype,
        "Trained for": f"{step:,} steps of {config.global_batch} rows × {config.model.seq_len} tokens",
        "Started from": started_from or f"random weights (seed {config.seed})",
        "Adapters": f"LoRA of rank {config.lora.rank}, merged" if config.lora.rank else None,
        "Data": config.data.path if facts.get("data") else None,
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
