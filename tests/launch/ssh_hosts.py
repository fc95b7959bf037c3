"""Two "hosts" on this machine: two real sshd of this user on free ports of 127.0.0.1, with keys of their own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

SOURCES = Path(__file__).parents[2] / "src"
SETTINGS = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv PYTHONPATH={sources}
"""


@dataclass
class SshHosts:
    """The hosts, and a profile that names them."""

    folder: Path
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        known = [f"UserKnownHostsFile={self.folder}/known", "GlobalKnownHostsFile=/dev/null"]
        return [f"IdentityFile={self.folder}/user", "IdentitiesOnly=yes", "StrictHostKeyChecking=no", *known]

    def profile(self, **settings: object) -> Path:
        path = self.folder / "hosts.yaml"
        defaults = {"hosts": self.names, "options": self.options, "gpus_per_node": 0, "python": sys.executable}
        path.write_text(yaml.safe_dump({**defaults, **settings}))
        return path

    def cut(self, host: int) -> None:
        """Break the connections of a host, as a network does: the processes that serve them are gone."""
        for pid in _children(self.servers[host].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def _children(parent: int) -> list[int]:
    """Servers of connections; not what a user started through them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == parent and "sshd" in name:
                found += [int(path.parent.name), *_children(int(path.parent.name))]
    return found


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd; scripts/system-packages installs it where it can")
    hosts = SshHosts(folder)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(SETTINGS.format(folder=folder, sources=SOURCES))
    if os.geteuid() == 0:
        # An sshd of root needs this folder; the package's service makes it when it starts.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    try:
        for _ in range(2):
            _start(hosts, server)
        yield hosts
    finally:
        for host, process in enumerate(hosts.servers):
            hosts.cut(host)
            process.kill()
            process.wait()


def _start(hosts: SshHosts, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = hosts.folder / f"sshd-{port}.log"
    command = [server, "-D", "-f", str(hosts.folder / "sshd_config"), "-p", str(port), "-E", str(log)]
    hosts.servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    hosts.names.append(f"{getpass.getuser()}@127.0.0.1:{port}")
    words = [word for option in hosts.options for word in ("-o", option)]
    probe = ["ssh", *words, "-o", "BatchMode=yes", "-p", str(port), "127.0.0.1", "true"]
    deadline = time.monotonic() + 60
    while (done := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode:
        refused = "Connection refused" not in done.stderr or hosts.servers[-1].poll() is not None
        if refused or time.monotonic() > deadline:
            pytest.skip(f"no login to an sshd of this user: {done.stderr.strip()} {log.read_text().strip()}")
        time.sleep(0.05)
