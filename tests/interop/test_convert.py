"""`keepstep ckpt convert` takes other trainers' checkpoints over, bit for bit, and no file of theirs runs code."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from keepstep.checkpoint.checkpointer import Checkpointer
from keepstep.checkpoint.offline import Content, Tensors
from keepstep.cli.main import main
from keepstep.config.dump import dump_config
from keepstep.config.hf_config import hf_config_of
from keepstep.config.schema import CheckpointConfig, ModelConfig, RunConfig
from keepstep.core.errors import CheckpointError
from keepstep.interop.convert import open_source, write_checkpoint, write_hf
from keepstep.interop.hf_names import export_parameters, rules
from keepstep.interop.megatron_names import megatron_rules
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from tests.train.tiny_runs import run_here

LLAMA = ModelConfig(
    layers=4, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=100, vocab_multiple=4, seq_len=64,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False, max_positions=64,
)  # fmt: skip
GPT = replace(
    LLAMA, kv_heads=0, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied=True
)  # fmt: skip
MPT = replace(LLAMA, kv_heads=0, positions="alibi", norm="layernorm", activation="gelu", ffn_hidden=128, tied=True)


def weights_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    built = Transformer(model)
    init_weights(built, 3)
    weights = {name: item.detach() for name, item in built.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    for item in weights.values():
        if item.ndim == 1:
            # At first all norms are 1 and all biases 0, so that nobody would notice one in the place of another.
            item += 0.3 * torch.randn(item.shape, generator=generator)
    for name in ("embed.weight", "head.weight"):
        if name in weights:
            weights[name][model.vocab :] = 0
    return weights


def arguments_of(model: ModelConfig) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads,
        group_query_attention=model.kv_heads > 0, num_query_groups=model.key_value_heads,
        ffn_hidden_size=model.ffn_size, params_dtype=torch.float32,
        vocab_size=model.vocab, padded_vocab_size=128, seq_length=model.seq_len, max_position_embeddings=model.seq_len,
        position_embedding_type="rope" if model.positions == "rotary" else "learned_absolute",
        swiglu=model.activation == "swiglu", normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        untie_embeddings_and_output_weights=not model.tied, add_bias_linear=model.bias,
    )  # fmt: skip


def megatron_weights(model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors as megatron-core names them, the vocabulary padded to 128 rows."""
    theirs: dict[str, torch.Tensor] = {}
    for rule in megatron_rules(model):
        (tensor,) = rule.unpack(weights[rule.ours])
        if rule.theirs[0].endswith(("word_embeddings.weight", "output_layer.weight")):
            tensor = torch.cat([tensor, torch.ones(128 - len(tensor), tensor.shape[1])])
        theirs[rule.theirs[0]] = tensor.contiguous()
    return theirs


def write_torch_dist(folder: Path, model: ModelConfig, theirs: Mapping[str, torch.Tensor]) -> None:
    """As megatron-core 0.16 does: layers stacked, arguments in common.pt."""
    stacked: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.items():
        if not name.startswith("decoder.layers."):
            stacked[name] = tensor
        elif name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            parts = [theirs[f"decoder.layers.{layer}.{rest}"] for layer in range(model.layers)]
            stacked[f"decoder.layers.{rest}"] = torch.stack(parts)
    stacked["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = torch.zeros(128, 32)
    iteration = folder / "iter_0000007"
    dcp_save(stacked, checkpoint_id=str(iteration), no_dist=True)
    torch.save({"args": arguments_of(model), "iteration": 7, "checkpoint_version": 3.0}, iteration / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def write_legacy(folder: Path, model: ModelConfig, theirs: Mapping[str, torch.Tensor]) -> None:
    """Two tensor ranks by two pipeline stages, as Megatron cuts them."""
    half = model.layers // 2
    for stage in range(2):
        for rank in range(2):
            mine: dict[str, torch.Tensor | None] = {}
            for name, tensor in theirs.items():
                if name.startswith("decoder.layers."):
                    layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
                    if int(layer) // half != stage:
                        continue
                    name = f"decoder.layers.{int(layer) % half}.{rest}"
                elif name.startswith("embedding.") == bool(stage):
                    continue
                mine[name] = _slice(name, tensor, rank, model.activation == "swiglu")
                mine[f"{name}._extra_state"] = None
            if stage and model.tied:
                mine["output_layer.weight"] = _slice(
                    "output_layer.weight", theirs["embedding.word_embeddings.weight"], rank, False
                )
            place = folder / "iter_0000007" / f"mp_rank_{rank:02d}_{stage:03d}"
            place.mkdir(parents=True)
            torch.save({"args": arguments_of(model), "iteration": 7, "model": mine}, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def _slice(name: str, tensor: torch.Tensor, rank: int, gated: bool) -> torch.Tensor:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(2, dim=1)[rank].clone()
    if gated and "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    if name.endswith(("word_embeddings.weight", "output_layer.weight")) or "linear_qkv" in name or "linear_fc1" in name:
        return tensor.chunk(2)[rank].clone()
    return tensor


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["ckpt", "convert", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def loaded(place: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """The newest step of a folder, read by the part that training uses."""
    into = {name: torch.zeros_like(tensor) for name, tensor in weights_of(model).items()}
    assert Checkpointer(place, CheckpointConfig()).load_newest({"model": into}) is not None
    return into


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_torch_dist, write_legacy])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_megatron_checkpoints_become_ours_bit_for_bit(
    write: Any, model: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of(model)
    write(tmp_path / "megatron", model, megatron_weights(model, weights))
    (tmp_path / "run.yaml").write_text(dump_config(replace(RunConfig(), model=model)))
    written = run(
        capsys, str(tmp_path / "megatron"), str(tmp_path / "ours"), "--to", "sharded", "--shards", "3",
        "--config", str(tmp_path / "run.yaml"),
    )  # fmt: skip
    assert written["step"] == 7
    assert same(loaded(tmp_path / "ours", model), weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_train_starts_from_converted_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = replace(LLAMA, vocab_multiple=1)
    theirs = {name: tensor.bfloat16() for name, tensor in megatron_weights(model, weights_of(model)).items()}
    write_torch_dist(tmp_path / "megatron", model, theirs)
    written = run(capsys, str(tmp_path / "megatron"), str(tmp_path / "ours"), "--to", "sharded")["written"]
    (tmp_path / "run.yaml").write_text(dump_config(replace(RunConfig(), model=model)))
    words = ["data=synthetic", "precision=fp32", "global_batch=2", "microbatch=2", "max_duration=1ba", "name=next"]
    words += [f"runs_dir={tmp_path}", f"checkpoint.resume_from={written}", "checkpoint.skip_optimizer=true"]
    words += ["optimizer.lr=1e-30", "optimizer.weight_decay=0.0", "compute.device=cpu", "compute.compile=false"]
    assert main(["train", str(tmp_path / "run.yaml"), *words]) == 0
    after = loaded(tmp_path / "next" / "checkpoints", model)
    assert same(after, {name: item.bfloat16().float() for name, item in weights_of(model).items()})


@pytest.mark.filterwarnings("ignore")
def test_megatron_shape_comes_from_its_arguments(tmp_path: Path) -> None:
    model = replace(LLAMA, vocab_multiple=1)
    write_torch_dist(tmp_path, model, megatron_weights(model, weights_of(model)))
    with open_source(str(tmp_path), None) as content:
        assert content.tensors.kinds["model.blocks.3.mlp.gate_up.weight"][1] == (96, 32)
        assert same({name.removeprefix("model."): item for name, item in content.tensors.items()}, weights_of(model))


@pytest.mark.parametrize("model", [LLAMA, GPT, replace(MPT, bias=False)], ids=["llama", "gpt2", "mpt"])
@pytest.mark.slow
def test_hf_folder_round_trip_keeps_every_bit(
    model: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, weights = replace(model, vocab_multiple=1), weights_of(replace(model, vocab_multiple=1))
    checkpointer = Checkpointer(tmp_path / "ours", CheckpointConfig())
    checkpointer.save(5, {"model": weights}, {"config": dump_config(replace(RunConfig(), model=model))})
    checkpointer.close()
    run(capsys, str(tmp_path / "ours" / "step_00000005"), str(tmp_path / "hf"), "--to", "hf")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens_bt = torch.arange(20).reshape(2, 10) * 5 % model.vocab
    ours = Transformer(model).eval()
    ours.load_state_dict(weights)
    torch.testing.assert_close(theirs(tokens_bt).logits, ours(tokens_bt), rtol=1e-4, atol=1e-5)
    run(capsys, str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "full", "--step", "5")
    assert same(loaded(tmp_path / "back", model), weights)
    assert main(["ckpt", "convert", str(tmp_path / "ours" / "step_00000005"), str(tmp_path / "hf"), "--to", "hf"]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err


def test_run_folder_means_its_newest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(tmp_path, "max_duration=2ba", "checkpoint.interval=1ba")
    for source, words, step in (("run", [], 2), ("run/checkpoints", [], 2), ("run", ["--step", "1"], 1)):
        target = tmp_path / f"{source.replace('/', '-')}{step}"
        assert run(capsys, str(tmp_path / source), str(target), "--to", "full", *words)["step"] == step
    assert main(["ckpt", "convert", str(tmp_path / "run"), str(tmp_path / "x"), "--to", "full", "--step", "7"]) == 1
    assert "holds no committed step 7" in capsys.readouterr().err


class _Timestamp:
    """Something of the trainer's own that plain types cannot hold."""


@pytest.mark.filterwarnings("ignore")
def test_composer_checkpoints_become_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = replace(MPT, bias=False, vocab_multiple=1)
    weights = weights_of(model)
    theirs = dict(export_parameters(weights, model, "mpt"))
    assert {name for rule in rules(model, "mpt") for name in rule.theirs} == set(theirs)
    state: dict[str, dict[str, Any]] = {
        "state": {
            "model": {f"model.{name}": tensor.contiguous() for name, tensor in theirs.items()},
            "optimizers": {"DecoupledAdamW": {"param_groups": {"lr": 0.1}}},
            "timestamp": _Timestamp(),
        }
    }
    dcp_save(state, checkpoint_id=str(tmp_path / "ep0-ba10"), no_dist=True)
    assert main(["ckpt", "convert", str(tmp_path / "ep0-ba10"), str(tmp_path / "x"), "--to", "full"]) == 2
    assert "--config" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(dump_config(replace(RunConfig(), model=model)))
    words = ("--to", "full", "--step", "10", "--config", str(tmp_path / "run.yaml"))
    run(capsys, str(tmp_path / "ep0-ba10"), str(tmp_path / "ours"), *words)
    assert same(loaded(tmp_path / "ours", model), weights)
    content = hf_config_of(model, "float32")
    state["state"]["integrations"] = {"huggingface": {"model": {"config": {"content": content}}}}
    dcp_save(state, checkpoint_id=str(tmp_path / "ep0-ba20"), no_dist=True)
    run(capsys, str(tmp_path / "ep0-ba20"), str(tmp_path / "again"), "--to", "full", "--step", "20")
    assert same(loaded(tmp_path / "again", model), weights)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile-was-here",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
def test_hostile_megatron_file_runs_nothing(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = LLAMA
    theirs = megatron_weights(model, weights_of(model))
    if form == "torch_dist":
        write_torch_dist(tmp_path, model, theirs)
        victim = tmp_path / "iter_0000007" / "common.pt"
    else:
        write_legacy(tmp_path, model, theirs)
        victim = tmp_path / "iter_0000007" / "mp_rank_01_001" / "model_optim_rng.pt"
    torch.save({"args": _Hostile(), "iteration": 7, "model": {}}, victim)
    with pytest.raises(CheckpointError, match=r"posix\.system"), open_source(str(tmp_path), None):
        pass
    victim.write_bytes(b"no file of torch")
    with pytest.raises(CheckpointError, match="cannot be read"), open_source(str(tmp_path), None):
        pass
    assert not (tmp_path / "hostile-was-here").exists()


@pytest.mark.filterwarnings("ignore")
def test_megatron_refuses_what_our_decoder_does_not_compute(tmp_path: Path) -> None:
    from keepstep.core.errors import ConfigError
    from keepstep.interop.megatron_names import model_config_from_megatron

    arguments = vars(arguments_of(LLAMA))
    with pytest.raises(ConfigError, match="num_experts"):
        model_config_from_megatron({**arguments, "num_experts": 8})
    for key, value in (
        ("rotary_seq_len_interpolation_factor", 4),
        ("apply_residual_connection_post_layernorm", True),
        ("qk_l2_norm", True),
    ):
        with pytest.raises(ConfigError, match=key):
            model_config_from_megatron({**arguments, key: value})
    with pytest.raises(ConfigError, match="num_layers"):
        model_config_from_megatron({})
    write_legacy(tmp_path, LLAMA, megatron_weights(LLAMA, weights_of(LLAMA)))
    (tmp_path / "iter_0000007" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="tensor rank 1"), open_source(str(tmp_path), None):
        pass


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_interrupted_conversion_leaves_nothing(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"model.{name}": item for name, item in weights_of(LLAMA).items()}
    moments = 0

    def interrupted_at(moment: int) -> None:
        nonlocal moments
        moments += 1
        if moments == moment:
            raise KeyboardInterrupt

    def read(name: str) -> torch.Tensor:
        if form == "safetensors":
            interrupted_at(5)
        return weights[name]

    kinds = {name: (item.dtype, tuple(item.shape)) for name, item in weights.items()}
    metadata = {"config": dump_config(replace(RunConfig(), model=replace(LLAMA, preset="custom")))}
    content = Content(3, Tensors(kinds, read), {}, metadata, {})

    def convert() -> str:
        if form == "hf":
            return write_hf(content, tmp_path / "out", None)
        return write_checkpoint(content, str(tmp_path / "out"), "safetensors")

    with monkeypatch.context() as patched:
        # Weights are there by now, and what tells readers about them is not.
        patched.setattr("keepstep.interop.hf_folder.write_json", lambda *_: interrupted_at(1))
        with pytest.raises(KeyboardInterrupt):
            convert()
    assert list(tmp_path.glob("out/*")) + list(tmp_path.glob("out/.*")) == []
    # The same command again does it.
    assert Path(convert()).exists()
    assert (tmp_path / "out" / "model.safetensors").exists()
