"""`keepstep serve`: an OpenAI-compatible server for a checkpoint; and options of every verb that listens on a port."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from keepstep.cli.parser import positive
from keepstep.core.errors import UsageError
from keepstep.observe.access import Access, AccessServer, new_token


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


def add_access(parser: argparse.ArgumentParser, port: int) -> None:
    """Where to listen, and the token."""
    add = parser.add_argument
    host = "address to listen on; any other than loopback needs a token (default: 127.0.0.1)"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=int, default=port, help=f"port to listen on; 0 chooses a free one (default: {port})")
    token = "`auto` creates a token that visitors need; your own goes into KEEPSTEP_UI_TOKEN"
    add("--token", default="", metavar="auto", help=token)


def read_access(args: argparse.Namespace) -> Access:
    """The access rule of these options."""
    if args.token not in ("", "auto"):
        message = "a token on the command line is visible to every user of this machine"
        raise UsageError(message, "--token auto, or set KEEPSTEP_UI_TOKEN to your token")
    token = args.token or os.environ.get("KEEPSTEP_UI_TOKEN", "")
    return Access(args.host, args.port, new_token() if token == "auto" else token)


def serve_until_interrupted(server: AccessServer) -> int:
    """Answer requests until Ctrl-C, which is how these verbs end."""
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0
