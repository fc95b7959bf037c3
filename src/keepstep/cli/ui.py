"""`keepstep ui`: the live page over a folder of runs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

from keepstep.core.errors import HardwareError, UsageError
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
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when whoever started this is gone")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    runs_dir, chosen = Path(args.runs_dir), ""
    if not runs_dir.is_dir():
        raise UsageError(f"{runs_dir} is not a folder", "name the folder that holds your runs (run.yaml: runs_dir)")
    if RunFolder(runs_dir).is_run:
        runs_dir, chosen = runs_dir.resolve().parent, f"#run={quote(runs_dir.resolve().name)}"
    token = new_token() if args.token == "auto" else args.token
    server = PageServer(runs_dir, Access(args.host, args.port, token), None if args.no_cache else cache.default_dir())
    threading.Thread(target=server.warm, daemon=True).start()
    if args.until_stdin_closes:
        threading.Thread(target=_shut_down_at_end_of_input, args=(server,), daemon=True).start()
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


def _shut_down_at_end_of_input(server: PageServer) -> None:
    sys.stdin.buffer.read()
    server.shutdown()


def start_beside(runs_dir: Path, name: str) -> str:
    """Serve the page from a process of its own, which ends with this one; the link to run `name`.

    A process, not a thread: whatever a visitor asks for must not cost the training process a moment.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "keepstep", "ui", str(runs_dir), "--port", "0", "--until-stdin-closes"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout
    for line in server.stdout:
        if line.startswith("open "):
            # The pipe must stay open as long as we live: its end is the page's sign to end too.
            _BESIDE.append(server)
            return f"{line.split()[1]}#run={quote(name)}"
    raise HardwareError("the live page did not start", "start it by hand: keepstep ui")


_BESIDE: list[subprocess.Popen[str]] = []
