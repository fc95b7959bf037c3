"""Options of the verbs that listen on a port: `ui` and `serve`."""

from __future__ import annotations

import argparse
import os

from keepstep.core.errors import UsageError
from keepstep.observe.access import Access, AccessServer, new_token


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
