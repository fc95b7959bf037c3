"""Hugging Face in and out: every family, bit by bit, through runs on disk, and tokenizers, cards and answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli.main import main
from keepstep.config.dump import dump_config
from keepstep.config.schema import ChatConfig, ModelConfig
from keepstep.core.errors import CheckpointError, ConfigError, UsageError
from keepstep.data.chat_tokenizer import VOCAB, keep_tokenizer, prepare_tokenizer
from keepstep.data.tokenize import END_OF_TEXT, SMALLEST_VOCAB, train_bpe
from keepstep.models.hf_config import model_config_from_hf
from keepstep.models.hf_describe import describe_hf, export_family
from keepstep.models.hf_folder import HfTensors, load_hf, save_hf, write_shards
from keepstep.models.init import init_weights
from keepstep.models.transformer import Transformer
from keepstep.train import exchange
from keepstep.train.exchange import check_export, export_model, fetch_source, import_model, import_weights
from keepstep.train.speaker import Prompt, Sampling, open_speaker
from keepstep.train.start import run_config, whole_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
transformers = pytest.importorskip("transformers")
from test_reference import REFERENCES, reference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REFERENCES))
def test_import_and_export_keep_every_bit_and_every_logit(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "hf")
    tokens_bt = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens_bt).logits

    config = import_model(tmp_path / "hf", "run", str(tmp_path), 1)
    folder = import_weights(tmp_path / "hf", config)
    ours, _, step = whole_model(folder.root)
    assert step == 0
    torch.testing.assert_close(ours(tokens_bt)[..., :61], expected, atol=1e-5, rtol=1e-5)

    exported = export_model(folder.root, tmp_path / "out")
    assert exported.difference <= 1e-5
    assert exported.difference_transformers is not None
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(tokens_bt).logits, expected, atol=1e-5, rtol=1e-5)
    before, after = HfTensors(tmp_path / "hf"), HfTensors(tmp_path / "out")
    assert set(before) - {"lm_head.weight"} == set(after) - {"lm_head.weight"}
    assert all(torch.equal(before[key], after[key]) for key in after)


@pytest.mark.slow
def test_bf16_survives_the_round_trip_bit_by_bit(tmp_path: Path) -> None:
    reference("llama").to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    folder = import_weights(tmp_path / "hf", import_model(tmp_path / "hf", "run", str(tmp_path), 1))
    exported = export_model(folder.root, tmp_path / "out")
    assert exported.dtype == "bf16"
    before, after = HfTensors(tmp_path / "hf"), HfTensors(tmp_path / "out")
    assert all(torch.equal(before[key], after[key]) and after[key].dtype == torch.bfloat16 for key in before)


@pytest.mark.slow
def test_weights_of_two_precisions_survive_the_round_trip_bit_by_bit(tmp_path: Path) -> None:
    theirs = reference("llama").to(torch.bfloat16)
    theirs.model.norm.to(torch.float32).weight.data += 1e-5
    theirs.save_pretrained(tmp_path / "hf")
    folder = import_weights(tmp_path / "hf", import_model(tmp_path / "hf", "run", str(tmp_path), 1))
    export_model(folder.root, tmp_path / "out")
    before, after = HfTensors(tmp_path / "hf"), HfTensors(tmp_path / "out")
    assert before["model.norm.weight"].dtype == torch.float32
    assert all(torch.equal(before[key].float(), after[key].float()) for key in before)


def test_a_wrong_export_fails_loudly(tmp_path: Path) -> None:
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
    read = HfTensors(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002"):
        HfTensors(tmp_path)


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
def test_our_own_shapes_export_to_the_family_that_computes_them(fields: dict[str, Any], family: str) -> None:
    config = ModelConfig(layers=1, hidden=16, heads=2, vocab=31, seq_len=8, **fields)
    assert export_family(config) == family
    assert model_config_from_hf(describe_hf(config, "float32"))["hidden"] == 16


def test_what_no_family_computes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no Hugging Face family"):
        export_family(ModelConfig(positions="none"))
    with pytest.raises(UsageError, match="no folder"):
        fetch_source("./nowhere")


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
    speaker = open_speaker(tmp_path / "hf")
    prompts = [Prompt([{"role": "user", "content": text}]) for text in ("hello there", "what is 17 + 4?", "x")]
    answers = speaker.answers(prompts, Sampling(max_new_tokens=40), batch=3)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([speaker.encode(prompt)])
        made = theirs.generate(
            ids, max_new_tokens=40, do_sample=False, eos_token_id=sorted(speaker.ends), pad_token_id=0
        )
        new = [token for token in made[0, ids.shape[1] :].tolist() if token not in speaker.ends]
        assert answer == speaker.decode(new)
        assert "".join(speaker.stream(prompt, Sampling(max_new_tokens=40))) == answer


@pytest.mark.slow
def test_a_trained_run_exports_with_tokenizer_template_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    speaker = open_speaker(out)
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
    return import_weights(tmp_path / "hf", import_model(tmp_path / "hf", name, str(tmp_path), 1)).root


@pytest.mark.slow
def test_the_token_that_ends_a_text_is_told_even_when_its_number_is_zero(tmp_path: Path) -> None:
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
def test_a_base_model_that_learnt_a_template_stops_at_its_turns_in_chat_and_in_the_export(tmp_path: Path) -> None:
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
    assert open_speaker(run).ends == ends
    export_model(run, tmp_path / "out")
    written = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert set(written.eos_token_id) == ends
    assert written.temperature == 0.6
    assert set(json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]) == ends


@pytest.mark.slow
def test_a_run_keeps_the_template_it_was_trained_with_though_the_file_is_edited(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(HEADERS)
    run = imported(tmp_path)
    train_bpe(["a few words"], SMALLEST_VOCAB, tmp_path / "tokenizer.json")
    keep_tokenizer(tmp_path / "tokenizer.json", run / "tokenizer", str(template))
    config = replace(run_config(run), chat=ChatConfig(template=str(template)))
    (run / "config.yaml").write_text(dump_config(config))
    template.write_text("another")
    assert open_speaker(run).template.source == HEADERS
    export_model(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == HEADERS


@pytest.mark.slow
def test_an_export_that_fails_leaves_nothing_that_could_be_taken_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = imported(tmp_path)
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    (tmp_path / "out" / ".unfinished" / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "TOLERANCE", -1.0)
        with pytest.raises(CheckpointError, match="is wrong"):
            export_model(run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    export_model(run, tmp_path / "out")
    assert not (tmp_path / "out" / ".unfinished").exists()
    with pytest.raises(UsageError, match="not empty"):
        export_model(run, tmp_path / "out")


@pytest.mark.slow
def test_an_import_that_was_cut_short_is_no_run_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    words = ["import", str(tmp_path / "hf"), "--name", "base", "--runs-dir", str(tmp_path / "runs")]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for cut_at in ("save", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(exchange.Checkpointer, cut_at, killed)
            assert main(words) == 130
        assert not (tmp_path / "runs" / "base" / "config.yaml").exists()
    assert main(words) == 0
    assert main(words) == 2
    assert whole_model(tmp_path / "runs" / "base")[2] == 0


@pytest.mark.parametrize("name", ["my model", "a/b", "..", "modèle"])
def test_an_import_under_a_name_that_no_run_can_have_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--name", name, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "must be one safe folder name" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_model_in_the_working_directory_is_imported_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_what_transformers_would_read_wrongly_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{name} is .* transformers does not compute"):
        describe_hf(ModelConfig(layers=1, hidden=32, heads=4, vocab=31, seq_len=8, **fields), "float32")


def test_rotary_scaling_under_its_older_name_comes_out_as_it_is_computed(tmp_path: Path) -> None:
    old = ModelConfig(
        layers=1, hidden=32, heads=4, vocab=31, seq_len=8, rotary_scaling={"type": "linear", "factor": 4.0}, **_LLAMA
    )
    model = Transformer(old).eval()
    init_weights(model, 1)
    save_hf(dict(model.named_parameters()), old, describe_hf(old, "float32"), tmp_path / "out", torch.float32)
    check_export(model, tmp_path / "out", torch.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("[]", "is list, not an object"),
        ('{"model_type": "llama"}', "does not say 'num_hidden_layers'"),
        ('{"model_type": "gpt2", "n_layer": "x", "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 8}',
         "makes model.layers 'x'"),
    ],
)  # fmt: skip
def test_a_config_json_that_is_none_says_what_it_lacks(
    change: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference("llama").save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(change)
    assert main(["import", str(tmp_path / "hf"), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert told in capsys.readouterr().err


def test_a_turn_of_a_part_of_each_head_is_refused(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for change in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0\.5"):
            model_config_from_hf({**described, **change})


def test_a_damaged_file_among_several_is_named(tmp_path: Path) -> None:
    tensors = {f"t{number}.weight": torch.randn(10, 10) for number in range(5)}
    write_shards(tensors.items(), tmp_path, largest_bytes=900)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is damaged"):
        HfTensors(tmp_path)["t2.weight"]
    for content in ("{", "{}", "[]", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match="is no index"):
            HfTensors(tmp_path)
