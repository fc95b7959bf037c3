"""Hugging Face in and out: every family, bit by bit, through runs on disk, and tokenizers, cards and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli.main import main
from keepstep.config.dump import dump_config
from keepstep.config.hf_config import export_family, hf_config_of, model_config_from_hf
from keepstep.config.schema import ChatConfig, ModelConfig
from keepstep.core.errors import CheckpointError, ConfigError, UsageError
from keepstep.data.chat.tokenizer import VOCAB, copy_tokenizer, prepare_tokenizer
from keepstep.data.tokenization import END_OF_TEXT, SMALLEST_VOCAB, train_bpe
from keepstep.evaluate.chat_model import Prompt, Sampling, open_chat_model
from keepstep.interop import hf_export, hf_import
from keepstep.interop.full_model import load_full_model
from keepstep.interop.hf_export import check_export, export_model
from keepstep.interop.hf_folder import fetch_source, load_hf, save_hf
from keepstep.interop.hf_import import import_model, import_weights
from keepstep.interop.run_source import read_run_config
from keepstep.interop.safetensors_files import open_hf_tensors, write_file, write_shards
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer

transformers = pytest.importorskip("transformers")
from tests.models.test_reference import REFERENCES, reference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REFERENCES))
def test_import_and_export_keep_every_bit_and_every_logit(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "hf")
    tokens_bt = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens_bt).logits

    config = import_model(tmp_path / "hf", "run", str(tmp_path))
    folder = import_weights(tmp_path / "hf", config)
    ours, _, step = load_full_model(folder.root)
    assert step == 0
    torch.testing.assert_close(ours(tokens_bt)[..., :61], expected, atol=1e-5, rtol=1e-5)

    exported = export_model(folder.root, tmp_path / "out")
    assert exported.difference <= 1e-5
    assert exported.difference_transformers is not None
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(tokens_bt).logits, expected, atol=1e-5, rtol=1e-5)
    before, after = open_hf_tensors(tmp_path / "hf"), open_hf_tensors(tmp_path / "out")
    assert set(before) - {"lm_head.weight"} == set(after) - {"lm_head.weight"}
    assert all(torch.equal(before[key], after[key]) for key in after)


@pytest.mark.slow
def test_round_trip_keeps_bf16_bits(tmp_path: Path) -> None:
    reference("llama").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    folder = import_weights(tmp_path / "hf", import_model(tmp_path / "hf", "run", str(tmp_path)))
    exported = export_model(folder.root, tmp_path / "out")
    assert exported.dtype == "bf16"
    before, after = open_hf_tensors(tmp_path / "hf"), open_hf_tensors(tmp_path / "out")
    assert all(torch.equal(before[key], after[key]) and after[key].dtype == torch.bfloat16 for key in before)


@pytest.mark.slow
def test_round_trip_keeps_bits_of_two_precisions(tmp_path: Path) -> None:
    theirs = reference("llama").to(torch.bfloat16)
    theirs.model.norm.to(torch.float32).weight.data += 1e-5
    theirs.save_pretrained(tmp_path / "hf")
    folder = import_weights(tmp_path / "hf", import_model(tmp_path / "hf", "run", str(tmp_path)))
    export_model(folder.root, tmp_path / "out")
    before, after = open_hf_tensors(tmp_path / "hf"), open_hf_tensors(tmp_path / "out")
    assert before["model.norm.weight"].dtype == torch.float32
    assert all(torch.equal(before[key].float(), after[key].float()) for key in before)


def test_check_export_refuses_wrong_weights(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path)
    shape = ModelConfig(**model_config_from_hf(json.loads((tmp_path / "config.json").read_text())))
    model = Transformer(shape).eval()
    load_hf(model, tmp_path)
    check_export(model, tmp_path, torch.float32)
    model.blocks["0"].attention.out.weight.data[0, 0] += 0.1  # type: ignore[union-attr,operator]
    with pytest.raises(CheckpointError, match="is wrong"):
        check_export(model, tmp_path, torch.float32)


def test_weights_in_several_files_read_as_one(tmp_path: Path) -> None:
    tensors = {f"t{number}.weight": torch.randn(10, 10) for number in range(5)}
    total = write_shards(tensors.items(), tmp_path, largest_bytes=900)
    assert total == 5 * 400
    assert len(list(tmp_path.glob("model-0000*-of-00003.safetensors"))) == 3
    read = open_hf_tensors(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002"):
        open_hf_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_hf_tensors(tmp_path)
    assert "parts that model.safetensors.index.json names" in str(caught.value.hint)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["num_hidden_layers"] = 2
    shape = ModelConfig(**model_config_from_hf(described))
    with pytest.raises(CheckpointError, match=r"no place in this model: model\.layers\.2"):
        load_hf(Transformer(shape), tmp_path)
    described["num_hidden_layers"] = 4
    with pytest.raises(CheckpointError, match=r"model\.layers\.3.* is missing"):
        load_hf(Transformer(ModelConfig(**model_config_from_hf(described))), tmp_path)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({"positions": "learned"}, "gpt2"),
        ({"positions": "alibi", "bias": False}, "mpt"),
        ({"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}, "llama"),
        ({"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "qkv_bias": True}, "qwen2"),
    ],
)
def test_export_family_of_our_shapes(fields: dict[str, Any], family: str) -> None:
    config = ModelConfig(layers=1, hidden=16, heads=2, vocab=31, seq_len=8, **fields)
    assert export_family(config) == family
    assert model_config_from_hf(hf_config_of(config, "float32"))["hidden"] == 16


def test_export_family_refuses_unknown_shapes() -> None:
    with pytest.raises(ConfigError, match="no Hugging Face family"):
        export_family(ModelConfig(positions="none"))
    for source in ("./nowhere", "nowhere", "nowhere/", "a/b/c", "/nowhere"):
        with pytest.raises(UsageError, match=f"there is no folder {source}$"):
            fetch_source(source)


@pytest.mark.slow
def test_greedy_answers_equal_transformers_token_for_token(tmp_path: Path) -> None:
    tokenizer = prepare_tokenizer(tmp_path / "cache", 1)
    size = VOCAB
    shape = {"vocab_size": size, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
             "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    for file in tokenizer.parent.iterdir():
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    speaker = open_chat_model(tmp_path / "hf")
    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("hello there", "what is 17 + 4?", "x")]
    answers = speaker.answers(prompts, Sampling(max_new_tokens=40), batch=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([speaker.encode(prompt)])
        made = theirs.generate(
            ids, max_new_tokens=40, do_sample=False, eos_token_id=sorted(speaker.stop_tokens), pad_token_id=0
        )
        new = [token for token in made[0, ids.shape[1] :].tolist() if token not in speaker.stop_tokens]
        assert answer == speaker.decode(new)
        assert "".join(speaker.stream(prompt, Sampling(max_new_tokens=40))) == answer


@pytest.mark.slow
def test_export_writes_tokenizer_template_and_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data.path=toolcalls", "chat.generated_rows=40", "name=small", f"runs_dir={tmp_path}", "max_duration=2ba",
        "global_batch=2", "microbatch=2", "model.preset=llama-1b", "model.layers=1", "model.hidden=16", "model.heads=2",
        "model.kv_heads=1", "model.ffn_hidden=32", f"model.vocab={VOCAB}", "model.seq_len=512", "evaluate.batches=1",
        "schedule.warmup=1ba", "compute.device=cpu",
    ]  # fmt: skip
    assert main(["finetune", *words, "--procs", "1"]) == 0
    assert main(["export", str(tmp_path / "small"), "--hf", str(tmp_path / "out")]) == 0
    assert "logits within" in capsys.readouterr().out
    out = tmp_path / "out"
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "hi"}]
    speaker = open_chat_model(out)
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == speaker.template.prompt(messages)
    assert theirs(text, add_special_tokens=False)["input_ids"] == speaker.encode(Prompt(messages))
    card = (out / "README.md").read_text()
    assert "2 steps" in card
    assert "toolcalls" in card
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert main(["eval", "tools", str(out), "--rows", "4", "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 0.0
    with pytest.raises(UsageError, match="not empty"):
        export_model(tmp_path / "small", out)


def imported(tmp_path: Path, name: str = "run") -> Path:
    reference("llama").save_pretrained(tmp_path / "hf")
    return import_weights(tmp_path / "hf", import_model(tmp_path / "hf", name, str(tmp_path))).root


@pytest.mark.slow
def test_export_keeps_end_token_with_id_zero(tmp_path: Path) -> None:
    run = imported(tmp_path)
    train_bpe(["a few words"], SMALLEST_VOCAB, run / "tokenizer" / "tokenizer.json")
    export_model(run, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == END_OF_TEXT


HEADERS = (
    "{% for m in messages %}{{ '<|head|>' + m['role'] + '\n' + m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant\n' }}{% endif %}"
)


@pytest.mark.slow
def test_export_stops_at_the_templates_end_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    run = imported(tmp_path)
    path = run / "tokenizer" / "tokenizer.json"
    train_bpe(["a few words"], SMALLEST_VOCAB, path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|head|>", "<|eot|>"])
    tokenizer.save(str(path))
    settings = {"eos_token_id": 0, "temperature": 0.6, "do_sample": True}
    (run / "tokenizer" / "generation_config.json").write_text(json.dumps(settings))
    (run / "tokenizer" / "chat_template.jinja").write_text(HEADERS)

    ends = {0, tokenizer.token_to_id("<|eot|>")}
    assert open_chat_model(run).stop_tokens == ends
    export_model(run, tmp_path / "out")
    written = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert set(written.eos_token_id) == ends
    assert written.temperature == 0.6
    assert set(json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]) == ends


@pytest.mark.slow
def test_export_uses_the_template_of_the_training(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(HEADERS)
    run = imported(tmp_path)
    train_bpe(["a few words"], SMALLEST_VOCAB, tmp_path / "tokenizer.json")
    copy_tokenizer(tmp_path / "tokenizer.json", run / "tokenizer", str(template))
    config = replace(read_run_config(run), chat=ChatConfig(template=str(template)))
    (run / "config.yaml").write_text(dump_config(config))
    template.write_text("another")
    assert open_chat_model(run).template.source == HEADERS
    export_model(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == HEADERS


@pytest.mark.slow
def test_failed_export_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = imported(tmp_path)
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    (tmp_path / "out" / ".unfinished" / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(hf_export, "TOLERANCE", -1.0)
        with pytest.raises(CheckpointError, match="is wrong"):
            export_model(run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    export_model(run, tmp_path / "out")
    assert not (tmp_path / "out" / ".unfinished").exists()
    with pytest.raises(UsageError, match="not empty"):
        export_model(run, tmp_path / "out")


@pytest.mark.slow
def test_interrupted_import_is_no_run_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    words = ["import", str(tmp_path / "hf"), "--name", "base", "--runs-dir", str(tmp_path / "runs")]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for cut_at in ("save", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(hf_import.Checkpointer, cut_at, killed)
            assert main(words) == 130
        assert not (tmp_path / "runs" / "base" / "config.yaml").exists()
    assert main(words) == 0
    assert main(words) == 2
    assert load_full_model(tmp_path / "runs" / "base")[2] == 0


@pytest.mark.parametrize("name", ["my model", "a/b", "..", "modèle"])
def test_import_refuses_impossible_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--name", name, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "must be one safe folder name" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_import_of_working_directory_uses_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    monkeypatch.chdir(tmp_path / "hf")
    assert main(["import", ".", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs" / "hf" / "config.yaml").is_file()


_MPT = {"positions": "alibi", "bias": False}
_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"head_dim": 12}, "head_dim"),
        ({**_MPT, "head_dim": 12}, "head_dim"),
        ({**_MPT, "kv_heads": 2}, "kv_heads"),
        ({**_MPT, "alibi_bias_max": 4.0}, "alibi_bias_max"),
        ({**_MPT, "ffn_hidden": 64}, "ffn_hidden"),
        ({**_LLAMA, "qk_norm": True, "qkv_bias": True}, "qkv_bias"),
    ],
)
def test_export_refuses_what_transformers_does_not_compute(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{name} is .* transformers does not compute"):
        hf_config_of(ModelConfig(layers=1, hidden=32, heads=4, vocab=31, seq_len=8, **fields), "float32")


def test_rope_scaling_with_old_key_exports_as_computed(tmp_path: Path) -> None:
    old = ModelConfig(
        layers=1, hidden=32, heads=4, vocab=31, seq_len=8, rotary_scaling={"type": "linear", "factor": 4.0}, **_LLAMA
    )
    model = Transformer(old).eval()
    init_weights(model, 1)
    save_hf(dict(model.named_parameters()), old, hf_config_of(old, "float32"), tmp_path / "out", torch.float32)
    check_export(model, tmp_path / "out", torch.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("[]", "is list, not an object"),
        ('{"model_type": "llama"}', "does not say 'num_hidden_layers'"),
        ('{"model_type": "gpt2", "n_layer": "x", "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 8}',
         "config.json: model.layers is 'x', but it must be a whole number"),
    ],
)  # fmt: skip
def test_import_names_what_config_json_lacks(
    change: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(change)
    assert main(["import", str(tmp_path / "hf"), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert told in capsys.readouterr().err


def test_partial_rope_is_refused(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for change in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0\.5"):
            model_config_from_hf({**described, **change})


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    tensors = {f"t{number}.weight": torch.randn(10, 10) for number in range(5)}
    write_shards(tensors.items(), tmp_path, largest_bytes=900)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is damaged"):
        open_hf_tensors(tmp_path)["t2.weight"]
    for content in ("{", "{}", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match="is no index"):
            open_hf_tensors(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "{root}/outside.safetensors", "sub/../..", 5])
def test_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, file: object) -> None:
    write_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    named = file.format(root=tmp_path) if isinstance(file, str) else file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
    with pytest.raises(CheckpointError, match="no file of its folder"):
        open_hf_tensors(folder)
