"""`keepstep import` and `export`: a Hugging Face model or GGUF file as a run, and a run as what other engines load."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from keepstep.cli.parser import positive, run_name
from keepstep.cli.train import start_processes
from keepstep.core.errors import UsageError
from keepstep.core.ranks import from_environment
from keepstep.core.step_folders import newest_saved_step
from keepstep.core.units import format_bytes, format_count
from keepstep.core.verbosity import progress


@dataclass(frozen=True)
class Shipped:
    """Which step of a run an export holds."""

    saved_step: int
    last_step: int
    """The last step that the run did."""
    best: bool
    """Whether it is the step with the lowest validation loss, which the run keeps apart."""
    skipped_saves: int


def add_import(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep import`."""
    add = parser.add_argument
    add("source", help="a folder with config.json and safetensors, a .gguf file, or OWNER/NAME[/FILE.gguf] on the Hub")
    add("--name", type=run_name, help="the run's name (default: the name of the source)")
    add("--runs-dir", default="runs", help="folder of the runs (default: runs)")
    add("--tokenizer", metavar="FOLDER", help="a tokenizer.json or its folder, instead of the source's own")
    add("--procs", type=positive, default=1, help="processes that read the weights, each a share (default: 1)")
    parser.set_defaults(call=_import)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `keepstep export`."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--hf", type=Path, metavar="OUT", help="write a Hugging Face folder; adapters are merged")
    parser.add_argument(
        "--gguf", type=Path, metavar="OUT", help="write a GGUF file and an Ollama Modelfile into a folder"
    )
    types = ("f16", "q8_0", "q4_k", "bf16", "f32")
    parser.add_argument("--type", choices=types, help="type of the tensors in a GGUF file (default: f16)")
    parser.add_argument("--adapter", type=Path, metavar="OUT", help="write the adapters of a LoRA run as PEFT files")
    dtypes = ("auto", "fp32", "bf16", "fp16")
    parser.add_argument("--dtype", choices=dtypes, help="precision of the weights of --hf (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=_export)


def _export(args: argparse.Namespace) -> int:
    """Write, check and print a summary."""
    from keepstep.data.chat.template import find_template, tool_call_parser
    from keepstep.interop.hf_export import export_adapter, export_model

    if sum(out is not None for out in (args.hf, args.gguf, args.adapter)) != 1:
        raise UsageError("export needs exactly one of --hf, --gguf and --adapter", "keepstep export RUN --hf OUT")
    for option, value, needs, folder in (
        ("--type", args.type, "--gguf", args.gguf),
        ("--dtype", args.dtype, "--hf", args.hf),
    ):
        if value and folder is None:
            raise UsageError(f"{option} is {value}, but it is for {needs}", f"leave it out, or {needs} OUT")
    if args.gguf is not None:
        return _export_gguf(args)
    if args.adapter is not None:
        shipped = _shipped(args.run, export_adapter(args.run, args.adapter))
        facts = {"folder": str(args.adapter), **asdict(shipped)}
        text = f"wrote        {args.adapter}: load it with peft.PeftModel\nstep         {_describe(shipped)}"
        print(json.dumps(facts) if args.json else text)
        return 0
    exported = export_model(args.run, args.hf, args.dtype or "auto")
    shipped = _shipped(args.run, exported.step)
    if args.json:
        print(json.dumps({**asdict(exported), "folder": str(exported.folder), **asdict(shipped)}, indent=2))
        return 0
    theirs = exported.difference_transformers
    print(f"wrote        {exported.folder}: {exported.family}, {format_count(exported.parameters)} parameters")
    print(f"step         {_describe(shipped)}")
    print(f"weights      {exported.dtype}, {format_bytes(exported.weight_bytes)}")
    print(f"read back    logits within {exported.difference:.1e} of the trained model")
    print(f"transformers {'is not installed: not compared' if theirs is None else f'logits within {theirs:.1e}'}")
    parser = tool_call_parser(find_template(exported.folder / "tokenizer.json").source)
    tools = f" --enable-auto-tool-choice --tool-call-parser {parser}" if parser else ""
    print(f"next: vllm serve {exported.folder}{tools}")
    return 0


def _export_gguf(args: argparse.Namespace) -> int:
    from keepstep.interop.gguf.export import export_gguf

    exported = export_gguf(args.run, args.gguf, args.type or "f16")
    shipped = _shipped(args.run, exported.step)
    if args.json:
        print(json.dumps({**asdict(exported), "folder": str(exported.folder), **asdict(shipped)}, indent=2))
        return 0
    in_modelfile = {"tools": " and in the Modelfile", "chat": " and, without tools, in the Modelfile", "": ""}
    print(
        f"wrote        {exported.folder}/model.gguf: {exported.family}, {format_count(exported.parameters)} parameters"
    )
    print(f"step         {_describe(shipped)}")
    print(f"weights      {exported.type}, {format_bytes(exported.file_bytes)}")
    print(f"read back    weights within {exported.difference:.1e} of the trained model")
    print(f"template     in the file{in_modelfile[exported.ollama_template] or '; Ollama does not read it'}")
    print(f"next: llama-server -m {exported.folder}/model.gguf --jinja")
    return 0


def _shipped(run: Path, step: int) -> Shipped:
    """Which step it is; a warning where the run did later ones."""
    from keepstep.interop.run_source import BEST_FOLDER
    from keepstep.observe.history import open_recent
    from keepstep.observe.run_folder import RunFolder
    from keepstep.observe.verdict import judge

    verdict = judge(open_recent(RunFolder(run)), time.time())
    best = newest_saved_step(run / BEST_FOLDER)
    is_best = best is not None and best[0] == step
    shipped = Shipped(step, max(step, verdict.step), is_best, verdict.skipped_saves)
    if not is_best and step < shipped.last_step:
        missing = f"step {step + 1}" if step + 1 == shipped.last_step else f"steps {step + 1} to {shipped.last_step}"
        skipped = f" ({shipped.skipped_saves} saves were skipped)" if shipped.skipped_saves else ""
        print(f"warning: not on disk, so not in the export: {missing}{skipped}", file=sys.stderr)
    return shipped


def _describe(shipped: Shipped) -> str:
    if shipped.saved_step == shipped.last_step:
        return f"{shipped.saved_step:,}, the last of the run"
    why = "the lowest validation loss" if shipped.best else "the newest on disk"
    return f"{shipped.saved_step:,}, {why}; the run reached step {shipped.last_step:,}"


def _import(args: argparse.Namespace) -> int:
    """Read the weights and commit them as step 0; as a worker if a launcher started this process."""
    from keepstep.data.tokenization import named_tokenizer
    from keepstep.interop.gguf.reader import model_name
    from keepstep.interop.hf_folder import fetch_source, is_gguf
    from keepstep.interop.hf_import import import_model, import_weights
    from keepstep.interop.run_source import find_tokenizer

    source = fetch_source(args.source)
    given = model_name(source) if is_gguf(source) else (source.resolve() if source.is_dir() else Path(args.source)).name
    name = args.name or given
    tokenizer = named_tokenizer(args.tokenizer or "")
    config = import_model(source, name, args.runs_dir, own_tokenizer=tokenizer is not None)
    ranks = from_environment()
    where = Path(args.runs_dir) / name
    if not ranks.launched and (where / "config.yaml").exists():
        raise UsageError(f"{where} already exists", "choose another --name")
    if args.procs > 1 and not ranks.launched:
        words = ["import", str(source), "--name", name, "--runs-dir", args.runs_dir, "--procs", str(args.procs)]
        words += ["--tokenizer", str(tokenizer)] if tokenizer else []
        code = start_processes(words, args.procs)
        if code:
            return code
    else:
        import_weights(source, config, tokenizer)
        if ranks.launched:
            return 0
    progress(f"imported {source} as {where}")
    if find_tokenizer(where) is None:
        from keepstep.data.tokenization import MAKES_TOKENIZER_JSON

        needs = "fine-tuning on conversations, generation and serving need one"
        hint = f"remove {where} and import with --tokenizer FOLDER; {MAKES_TOKENIZER_JSON}"
        print(f"warning: {source} has no tokenizer; {needs}\n hint: {hint}", file=sys.stderr)
    print(f"next: keepstep finetune --from {where} --data CONVERSATIONS.jsonl")
    return 0
