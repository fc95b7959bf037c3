"""Published files with weights in 4 and 8 bits: they read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keepstep.core.errors import CheckpointError
from keepstep.interop.full_model import load_full_model
from keepstep.interop.hf_folder import decode_fp8, decode_mxfp4, open_source
from keepstep.interop.safetensors_files import SINGLE, common_dtype, open_hf_tensors, write_file

transformers = pytest.importorskip("transformers")
from tests.models.test_reference import reference  # noqa: E402


def random_mxfp4(experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(114, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)


def test_mxfp4_decodes_as_in_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_mxfp4(3, 10, 64)
    scales[0, 0] = torch.tensor([0, 250])
    decoded = decode_mxfp4(blocks, scales)
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, mxfp4.convert_moe_packed_tensors(blocks, scales))


def test_fp8_blocks_are_multiplied_by_their_scales() -> None:
    weight = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3)
    decoded = decode_fp8(weight, scale)
    for row, column in ((0, 0), (127, 128), (128, 255), (199, 299)):
        expected = (weight[row, column].float() * scale[row // 128, column // 128]).bfloat16()
        assert decoded[row, column] == expected


def test_published_deepseek_v3_reads_as_its_bf16_weights(tmp_path: Path) -> None:
    theirs = reference("deepseek v3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    stored = {name: tensor.clone() for name, tensor in open_hf_tensors(tmp_path).items()}
    generator = torch.Generator().manual_seed(1)
    decoded: dict[str, torch.Tensor] = {}
    for name in [name for name in stored if "proj" in name and stored[name].dim() == 2]:
        weight = stored[name].float().to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = 0.5 + torch.rand([-(-size // 128) for size in weight.shape], generator=generator)
        stored[name], decoded[name] = weight, decode_fp8(weight, stored[f"{name}_scale_inv"])
    assert len(decoded) == 3 * 5 + 3 + 2 * (8 + 1) * 3
    # The layer after the last one predicts later tokens.
    predictor = {"model.layers.3.eh_proj.weight": torch.zeros(2, 2), "model.layers.3.enorm.weight": torch.zeros(2)}
    write_file({**stored, **predictor}, tmp_path / SINGLE)
    described = json.loads((tmp_path / "config.json").read_text())
    described["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(described))
    _, tensors = open_source(tmp_path)
    assert set(tensors) == set(stored) - {name for name in stored if name.endswith("_scale_inv")}
    assert all(torch.equal(tensors[name], expected) for name, expected in decoded.items())
    model, _, _ = load_full_model(tmp_path)
    write_file({**{name: stored[name] for name in tensors}, **decoded}, tmp_path / SINGLE)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens_bt = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(model(tokens_bt), again.eval()(tokens_bt).logits, atol=1e-5, rtol=1e-5)


def test_published_gpt_oss_reads_as_its_bf16_weights(tmp_path: Path) -> None:
    theirs = reference("gpt-oss with mxfp4 sizes").to(torch.bfloat16)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = random_mxfp4(experts, outputs, inputs)
            tensor.copy_(decode_mxfp4(packed[f"{name}_blocks"], packed[f"{name}_scales"]))
        else:
            packed[name] = tensor.clone()
    theirs.save_pretrained(tmp_path)
    write_file(packed, tmp_path / SINGLE)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert common_dtype(open_source(tmp_path)[1]) == torch.bfloat16
    model, _, _ = load_full_model(tmp_path)
    tokens_bt = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(model(tokens_bt), theirs.float()(tokens_bt).logits, atol=1e-5, rtol=1e-5)

    scales = next(name for name in packed if name.endswith("_scales"))
    write_file({**packed, scales: packed[scales][:, :-1].clone()}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"the scales of .* do not fit"):
        load_full_model(tmp_path)
    write_file({name: tensor for name, tensor in packed.items() if name != scales}, tmp_path / SINGLE)
    assert scales not in open_hf_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=f"tensor {scales} is missing"):
        load_full_model(tmp_path)
