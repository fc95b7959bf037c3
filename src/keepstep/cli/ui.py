"""`keepstep ui`: the live page over a folder of runs."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.observe import cache
from keepstep.observe.access import Access, new_token
from keepstep.observe.folder import RunFolder
from keepstep.observe.server import PageServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the runs are and who may look."""
    parser.add_argument("runs_dir", nargs="?", default="runs", help="folder of runs, or one run (default: runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs a token")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on; 0 takes a free one (default: 8080)")
    parser.add_argument(
        "--token",
        default=os.environ.get("KEEPSTEP_UI_TOKEN", ""),
        help="what a visitor must know: your own, or `auto` for a new one (default: $KEEPSTEP_UI_TOKEN)",
    )
    parser.add_argument("--no-cache", action="store_true", help="do not keep parsed curves in your cache folder")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    runs_dir, chosen = Path(args.runs_dir), ""
    if not runs_dir.is_dir():
        raise UsageError(f"{runs_dir} is not a folder", "name the folder that holds your runs (run.yaml: runs_dir)")
    if RunFolder(runs_dir).is_run:
        runs_dir, chosen = runs_dir.resolve().parent, f"#run={runs_dir.resolve().name}"
    token = new_token() if args.token == "auto" else args.token
    server = PageServer(runs_dir, Access(args.host, args.port, token), None if args.no_cache else cache.default_dir())
    threading.Thread(target=server.warm, daemon=True).start()
    print(f"runs in {runs_dir}", flush=True)
    print(f"open {server.url}{chosen}", flush=True)
    print("next: Ctrl-C ends the page; runs are not touched", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0
