"""`keepstep serve`: an OpenAI-compatible server for a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.cli.access import add_access, read_access, serve_until_interrupted
from keepstep.cli.parser import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("model", type=Path, help="the folder of a run or of a Hugging Face model")
    add("--name", default="", help="the name that clients ask for (default: the run's name)")
    add("--batch", type=positive, default=32, help="answers that are decoded at a time (default: 32)")
    add("--tokenizer", type=Path, help="a tokenizer.json, if the model's folder has none")
    add("--device", default="auto", help="cpu, cuda or auto")
    add_access(parser, 8000)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from keepstep.evaluate.chat_model import open_chat_model
    from keepstep.serve.server import ChatServer

    access = read_access(args)
    model = open_chat_model(args.model, args.device, args.tokenizer)
    name = args.name or model.config.name
    server = ChatServer(access, model, name, args.batch)
    print(f"{name}, step {model.step}, for OpenAI clients: {server.base_url}", flush=True)
    if access.token:
        print(f"api key: {access.token}", flush=True)
    print("next: Ctrl-C stops the server", flush=True)
    return serve_until_interrupted(server)
