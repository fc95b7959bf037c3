"""Every file format that keepstep reads, and HTTP: a small valid sample, and the command that reads it."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from keepstep.checkpoint.protocol.manifest import hasher
from keepstep.checkpoint.storage.store import open_store
from keepstep.cli.main import _answer
from keepstep.config.hf_config import hf_config_of
from keepstep.data.formats.mds_writer import TokenShardWriter, write_index
from keepstep.data.formats.megatron import MegatronReader, MegatronWriter
from keepstep.interop.gguf.model import write_gguf_model
from keepstep.interop.hf_folder import load_hf, save_hf
from keepstep.interop.hf_import import import_model
from keepstep.interop.safetensors_files import INDEX, SINGLE, fingerprint
from keepstep.models.size import parameter_count
from keepstep.models.transformer import Transformer
from keepstep.observe.history import open_history
from keepstep.observe.run_folder import RunFolder
from keepstep.observe.view import jsonable, overview, series, summary
from tests.checkpoint.support import example_state, write_step
from tests.fuzz.http_api import METRICS_REQUEST, PAGE_REQUEST, ask_metrics, ask_page
from tests.interop import test_convert
from tests.interop.test_convert import megatron_weights, weights_of, write_legacy, write_torch_dist
from tests.interop.test_gguf import TOKENIZER as GGUF_TOKENIZER

Files = dict[str, bytes]
LLAMA, GPT = replace(test_convert.LLAMA, layers=2), replace(test_convert.GPT, layers=2)
OLD_FILES = Path(__file__).parents[1] / "fixtures" / "before_rename"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
    },
    {"role": "tool", "content": '{"degrees": 12}'},
    {"role": "assistant", "content": "It is 12 degrees."},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "str"}}}}}]
CHAT_ROWS = [
    {"messages": MESSAGES, "tools": TOOLS},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"query": "q", "answers": '[{"name": "f", "arguments": {"a": 1}}]', "tools": '[{"name": "f", "parameters": {}}]'},
    {"system": "SYSTEM: You may call -\n{\"name\": \"f\"}", "chat": "USER: hi\n\nASSISTANT: hello <|endoftext|>"},
]  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
RUN_YAML = """\
name: small
seed: 3
model: {preset: custom, layers: 2, hidden: 32, heads: 4, vocab: 256, seq_len: 16, positions: rotary}
max_duration: 10ba
global_batch: 8
microbatch: 4
data:
  path: demo
optimizer:
  lr: 1e-3
  betas: [0.9, 0.95]
schedule:
  warmup: 2ba
parallel: {tensor: 1, pipeline: 1}
checkpoint:
  interval: 5ba
  keep: 2
  folder: ""
lora:
  rank: 0
variables: {a: "${name}"}
"""
TEXT_ROWS = [{"text": f"document {number} about steps"} for number in range(4)]


Reader = Callable[[Path, Path], int]
"""Reads the first folder, may write into the second one, returns the exit code."""


@dataclass(frozen=True)
class Format:
    """Valid files, which of them are damaged, and what reads them."""

    files: Callable[[], Files]
    readers: tuple[Reader, ...]
    """The commands that read the folder; each case runs one of them."""
    damaged: Callable[[str], bool] = lambda name: True
    sign: Callable[[Files], Files] = lambda files: files
    """Makes the hashes right again, so that damage is found by what the values mean."""
    accepted: Callable[[Path, Files], str] = lambda folder, files: ""
    """What is wrong with an accepted damaged folder; the files are those before the damage."""


def _written(write: Callable[[Path], Any]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def commands(*lines: str) -> tuple[Reader, ...]:
    """Readers that run a command line each; `{}` is the folder of the files, `{out}` one to write into."""

    def reader(line: str) -> Reader:
        return lambda folder, out: _answer(line.replace("{out}", str(out)).replace("{}", str(folder)).split())

    return tuple(map(reader, lines))


def _jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _megatron(folder: Path) -> None:
    with MegatronWriter(folder / "set", np.dtype("<u2")) as writer:
        for length in (5, 1, 17, 8, 30):
            writer.add(np.arange(length, dtype=np.uint16) + length)


def same_documents(folder: Path, files: Files) -> str:
    """An index that is accepted must give the same documents in the same places."""
    if files["set.bin"] != (folder / "set.bin").read_bytes():
        return ""  # the format has no hash of the tokens; `data verify` has one where keepstep built them
    with tempfile.TemporaryDirectory() as pristine:
        put(Path(pristine), files)
        first, second = (_documents(MegatronReader(Path(place) / "set")) for place in (pristine, folder))
    return "" if first == second else "the documents differ"


def _documents(reader: MegatronReader) -> Any:
    starts = reader.starts_between(0, reader.token_count)
    return [reader.document(number).tolist() for number in range(reader.documents)], starts.tolist()


def _mds(folder: Path) -> None:
    writer = TokenShardWriter(folder, "shard", np.dtype("u2"))
    for length in (5, 1, 17, 8):
        writer.add(np.arange(length, dtype=np.uint16))
    writer.flush()
    writer.add_rows(np.arange(40, dtype=np.uint16).reshape(5, 8))
    writer.flush()
    write_index(folder, writer.entries)


def _parquet(rows: list[Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")

    return write


def _text_files() -> Files:
    import zstandard

    lines = _jsonl(TEXT_ROWS)
    return {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines, mtime=0),
        "c.jsonl.zst": zstandard.compress(lines),
        "d.parquet": _written(_parquet(TEXT_ROWS))["rows.parquet"],
    }


def _tokenizer_files() -> Files:
    base = (OLD_FILES / "text" / "tokenizer.json").read_bytes()
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    generation = {"eos_token_id": [0, 1]}
    rows = [{"messages": [message for message in MESSAGES if message["role"] in ("user", "system")] + MESSAGES[-1:]}]
    return {
        "tokenizer.json": base,
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
        "rows.jsonl": _jsonl(rows),
    }


def _read_ends(folder: Path, _: Path) -> int:
    """As `chat` and `eval` do before they load the weights."""
    from keepstep.data import tokenization
    from keepstep.data.chat.template import find_template
    from keepstep.data.chat.tokenizer import end_tokens

    tokenizer = folder / "tokenizer.json"
    end_tokens(tokenizer, tokenization.load(tokenizer), find_template(tokenizer))
    return 0


def _hf(config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_hf(weights_of(config), config, hf_config_of(config, "float32"), folder, torch.float32)
        (folder / INDEX).unlink(missing_ok=True)

    return write


def _hf_sharded(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    _hf(LLAMA)(folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def _import_hf(folder: Path, out: Path) -> int:
    """What `import` and `finetune --from` do, without the process that writes checkpoints."""
    fingerprint(folder)
    config = import_model(folder, "imported", str(out))
    if parameter_count(config.model) < 10**6:
        load_hf(Transformer(config.model), folder)
    return 0


def _gguf(folder: Path) -> None:
    config = replace(LLAMA, vocab=265, vocab_multiple=1)
    write_gguf_model(folder / "model.gguf", weights_of(config), config, "q8_0", GGUF_TOKENIZER)


def _import_gguf(folder: Path, out: Path) -> int:
    """As `import` does, without the process that writes checkpoints."""
    config = import_model(folder / "model.gguf", "imported", str(out))
    if parameter_count(config.model) < 10**6:
        load_hf(Transformer(config.model), folder / "model.gguf")
    return 0


def _checkpoint(folder: Path) -> None:
    state = example_state(1)
    state["model"] = {"embed.weight": torch.ones(30, 4), "flag": torch.tensor(True), "half": torch.ones(3).bfloat16()}
    state["optimizer"] = {"embed.weight": {"exp_avg": torch.zeros(30, 4)}}
    write_step(open_store(folder), 7, state, ranks=2, with_parity=True)


def _sign(files: Files) -> Files:
    """Header hashes into the manifest, its hash into the marker, the marker's own hash into itself."""
    try:
        marker_name = next(name for name in files if name.endswith("_SUCCESS"))
        manifest_name = next(name for name in files if "manifest" in name)
        manifest, marker = json.loads(files[manifest_name]), json.loads(files[marker_name])
        digest = hasher(marker["algorithm"])
        for entry in manifest["files"]:
            data = files[f"{Path(marker_name).parent}/{entry[0]}"]
            if int.from_bytes(data[:8], "little") + 8 == entry[2]:
                entry[3] = digest(data[: entry[2]])
        encoded = json.dumps(manifest, separators=(",", ":")).encode()
        marker["manifest_hash"] = digest(encoded)
        marker.pop("check", None)
        marker["check"] = digest(json.dumps(marker, sort_keys=True).encode())
        return {**files, manifest_name: encoded, marker_name: json.dumps(marker).encode()}
    except Exception:
        return files


def _changed_step(folder: Path, files: Files) -> str:
    """Without new hashes, any changed byte of a step must be found by `ckpt verify`."""
    changed = [name for name, data in files.items() if (folder / name).read_bytes() != data]
    return f"{changed[0]} was changed" if changed and not _only_spaces(folder, files, changed[0]) else ""


def _only_spaces(folder: Path, files: Files, name: str) -> bool:
    """JSON that means the same: the marker's hash is of its values, not of its text."""
    try:
        return bool(json.loads((folder / name).read_bytes()) == json.loads(files[name]))
    except ValueError:
        return name.endswith("latest")


def _dcp(folder: Path) -> None:
    state = {"model": {"a": torch.ones(4, 3), "b": torch.zeros(5)}, "step": 3, "note": "plain"}
    dcp_save({"model": state["model"], "values": {"step": 3}}, checkpoint_id=str(folder / "dcp"), no_dist=True)


def _megatron_checkpoint(write: Callable[..., None], config: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder / "megatron", config, megatron_weights(config, weights_of(config)))


def _built(name: str) -> Files:
    root = OLD_FILES / name
    return {f"{name}/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _run_files() -> Files:
    root = OLD_FILES / "runs" / "lora"
    names = ("metrics.jsonl", "events.jsonl", "facts.json")
    files = {f"runs/a/{name}": (root / name).read_bytes() for name in names}
    rows = [
        {"time": 1.0 + step, "step": step, "loss": 2.0, "tokens": 9, "step_s": 0.1, "samples": 3} for step in range(9)
    ]
    files["runs/b/metrics.jsonl"] = _jsonl([*rows, {"step": 8, "valid_loss": 1.5, "time": 10.0}])
    files |= {"runs/a/config.yaml": RUN_YAML.encode(), "runs/b/config.yaml": RUN_YAML.replace("1e-3", "2e-3").encode()}
    files["runs/a/ranks.jsonl"] = _jsonl([{"time": 2.0, "step": 1, "step_s": [0.1, 0.2], "memory": [1, 2]}])
    files["runs/a/samples.jsonl"] = _jsonl([{"time": 2.0, "step": 1, "prompt": "a", "text": "b"}])
    files["runs/a/skipped.jsonl"] = _jsonl([{"first": 1, "last": 4, "step": 2}])
    files["runs/a/logs/trainer-00000.jsonl"] = (root / "logs" / "trainer-00000.jsonl").read_bytes()
    return files


def _read_runs(folder: Path, _: Path) -> int:
    """What the page computes for its answers."""
    for name in ("a", "b"):
        history = open_history(RunFolder(folder / "runs" / name), None)
        curves = series(history, ["loss", "valid_loss", "tokens_per_s"], 100, 0.9)
        json.dumps(jsonable([summary(history, 2e9), overview(history, 2e9), curves]), allow_nan=False)
    return 0


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _is_rejected_copy(name: str) -> bool:
    return not name.endswith(("rejects.jsonl", "tokenizer.json"))


_VERIFY = commands("ckpt verify {}")
_STEPS = commands("ckpt ls {}", "ckpt show {} --tensors", "ckpt verify {}", "ckpt diff {} {}", "ckpt repair {}",
                  "ckpt gc {}", "ckpt convert {}/step_00000007 {out}/converted --to safetensors")  # fmt: skip
_RUNS = commands("runs list {}/runs", "runs list {}/runs --json", "runs compare {}/runs/a {}/runs/b",
                 "runs logs {}/runs/a", "watch {}/runs/a --once",
                 "watch {}/runs/a --json", "report {}/runs/a -o -")  # fmt: skip
_HF = (_import_hf, *commands("ckpt convert {} {out}/converted --to safetensors"))
_TOKENIZER = (_read_ends, *commands("data show {}/rows.jsonl --tokenizer {}/tokenizer.json --tokens"))
FORMATS: dict[str, Format] = {
    "config": Format(
        lambda: {"run.yaml": RUN_YAML.encode()},
        commands("config check {}/run.yaml", "config show {}/run.yaml", "plan {}/run.yaml --cluster h100:1"),
    ),
    "megatron-data": Format(
        lambda: _written(_megatron),
        commands("data inspect {}/set --json", "data inspect {}", "data merge {} --out {out}/merged"),
        accepted=same_documents,
    ),
    "mds": Format(lambda: _written(_mds), commands("data inspect {}", "data inspect {} --json")),
    "data-build": Format(
        lambda: {**_built("text"), **_built("mds")},
        commands("data verify {}/text", "data verify {}/mds", "data inspect {}/text", "data inspect {}/mds"),
        _is_rejected_copy,
    ),
    "chat": Format(
        lambda: {"rows.jsonl": _jsonl(CHAT_ROWS)},
        commands("data show {}/rows.jsonl --rows 9", "data chat {}/rows.jsonl --out {out}/rows.jsonl"),
    ),
    "chat-files": Format(
        lambda: {
            "rows.json": json.dumps(CHAT_ROWS).encode(),
            "rows.jsonl.gz": gzip.compress(_jsonl(CHAT_ROWS), mtime=0),
            **_written(_parquet([{"messages": MESSAGES[:2] + MESSAGES[4:]}] * 3)),
        },
        commands("data show {} --rows 20", "data chat {} --out {out}/rows.jsonl"),
    ),
    "text": Format(_text_files, commands("data dedup {} --out {out}/kept.jsonl")),
    "tokenizer": Format(_tokenizer_files, _TOKENIZER, lambda name: name != "rows.jsonl"),
    "chat-template": Format(
        lambda: {**_tokenizer_files(), "chat_template.jinja": TEMPLATE.encode()},
        _TOKENIZER,
        lambda name: name == "chat_template.jinja",
    ),
    "hf-llama": Format(lambda: _written(_hf(LLAMA)), _HF),
    "hf-gpt2": Format(lambda: _written(_hf(GPT)), _HF, lambda name: name == "config.json"),
    "gguf": Format(lambda: _written(_gguf), (_import_gguf,)),
    "hf-sharded": Format(lambda: _written(_hf_sharded), _HF),
    "checkpoint": Format(lambda: _written(_checkpoint), _VERIFY, accepted=_changed_step),
    "checkpoint-signed": Format(lambda: _written(_checkpoint), _STEPS, sign=_sign),
    "dcp": Format(lambda: _written(_dcp), commands("ckpt convert {}/dcp {out}/converted --to safetensors")),
    "megatron-dist": Format(
        lambda: _written(_megatron_checkpoint(write_torch_dist, LLAMA)),
        commands("ckpt convert {}/megatron {out}/converted --to safetensors"),
    ),
    "megatron-legacy": Format(
        lambda: _written(_megatron_checkpoint(write_legacy, GPT)),
        commands("ckpt convert {}/megatron {out}/converted --to safetensors"),
    ),
    "run-folder": Format(_run_files, (_read_runs, *_RUNS)),
    "http-page": Format(lambda: {"request.http": PAGE_REQUEST}, (ask_page,)),
    "http-metrics": Format(lambda: {"request.http": METRICS_REQUEST}, (ask_metrics,)),
}
