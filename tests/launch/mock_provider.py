"""Terraform providers (plugin protocol 6) with the schemas of a facts file, which plan each resource without a service.

Terraform checks the module as written against those schemas and evaluates it; nothing is downloaded. Computed
attributes get a value at plan time, so that what is made from them is known too.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import yaml

Schema = dict[str, Any]
NESTING = {"single": 1, "list": 2, "set": 3}


class Unknown:
    """A value that Terraform does not know yet."""


def packed(value: Any) -> bytes:
    """MessagePack, as far as Terraform's values need it."""
    match value:
        case None:
            return b"\xc0"
        case Unknown():
            return b"\xd4\x00\x00"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"\xdb" + struct.pack(">I", len(data)) + data
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
        case _:
            pairs = b"".join(packed(key) + packed(item) for key, item in value.items())
            return b"\xdf" + struct.pack(">I", len(value)) + pairs


NUMBERS = dict(zip(range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True))
LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
LENGTHS |= {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


class Unpacker:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self) -> Any:
        tag = self.take(1)[0]
        if tag <= 0x7F or tag >= 0xE0:
            return tag if tag <= 0x7F else tag - 256
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        if tag in NUMBERS:
            return self.number(NUMBERS[tag])
        if 0xD4 <= tag <= 0xD8:
            self.take(1 + 2 ** (tag - 0xD4))
            return Unknown()
        if tag == 0xC7:
            self.take(self.number(">B") + 1)
            return Unknown()
        if tag <= 0x8F or tag in (0xDE, 0xDF):
            return {self.value(): self.value() for _ in range(tag & 15 if tag <= 0x8F else self.number(LENGTHS[tag]))}
        if tag <= 0x9F or tag in (0xDC, 0xDD):
            return [self.value() for _ in range(tag & 15 if tag <= 0x9F else self.number(LENGTHS[tag]))]
        return self.take(tag & 31 if tag <= 0xBF else self.number(LENGTHS[tag])).decode()


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number: int, value: bytes | str | int) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(message: bytes) -> dict[int, bytes | int]:
    """The last value of each field of a message."""
    found: dict[int, bytes | int] = {}
    at = 0

    def read() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7

    while at < len(message):
        key = read()
        size = read()
        if key & 7 == 0:
            found[key >> 3] = size
        else:
            found[key >> 3] = message[at : at + size]
            at += size
    return found


def attribute(name: str, spec: Any) -> bytes:
    """`string`, `number`, `bool`, `[string]`, `{string}`; `!` means required, `=` computed; a mapping is an object."""
    out = field(1, name)
    if isinstance(spec, str):
        kind = spec.strip("!=")
        types = {"[string]": ["list", "string"], "{string}": ["map", "string"]}
        out += field(2, json.dumps(types.get(kind, kind)))
        mode = 4 if spec.endswith("!") else 6 if spec.endswith("=") else 5
    else:
        nested = b"".join(field(1, attribute(key, item)) for key, item in members(spec).items())
        out += field(10, nested + field(3, NESTING["list" if isinstance(spec, list) else "single"]))
        mode = 6 if computed(spec) else 5
    return out + field(mode, 1)


def members(spec: Any) -> Schema:
    return spec[0] if isinstance(spec, list) else spec  # type: ignore[no-any-return]


def computed(spec: Any) -> bool:
    return spec.endswith("=") if isinstance(spec, str) else all(computed(item) for item in members(spec).values())


def block(schema: Schema) -> bytes:
    """Attributes, and under `blocks` the nested blocks: a list of at most one, or any number with `[...]`."""
    out = b"".join(field(2, attribute(name, spec)) for name, spec in schema.items() if name != "blocks")
    for name, spec in schema.get("blocks", {}).items():
        limit = b"" if isinstance(spec, list) else field(5, 1)
        out += field(3, field(1, name) + field(2, block(members(spec))) + field(3, NESTING["list"]) + limit)
    return out


def planned(spec: Any, path: str) -> Any:
    """What a service would fill in."""
    if isinstance(spec, str):
        return f"{path}-e00x" if "string" in spec else 1
    made = {name: planned(item, f"{path}.{name}") for name, item in members(spec).items()}
    return [made] if isinstance(spec, list) else made


def filled(state: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    """A planned state in which nothing is left for the service to compute."""
    for name, spec in schema.items():
        if name != "blocks" and computed(spec) and (state[name] is None or isinstance(state[name], Unknown)):
            state[name] = planned(spec, f"{path}.{name}")
    for name, spec in schema.get("blocks", {}).items():
        state[name] = [filled(item, members(spec), f"{path}.{name}") for item in state[name]]
    return state


class MockProvider(grpc.GenericRpcHandler):
    def __init__(self, provider: Schema, resources: dict[str, Schema]) -> None:
        self.provider, self.resources = provider, resources

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.rsplit("/", 1)[1]
        answers: dict[str, Callable[[bytes], bytes]] = {
            "GetProviderSchema": lambda _: self.schema(),
            "ValidateProviderConfig": lambda _: b"",
            "ValidateResourceConfig": lambda _: b"",
            "ConfigureProvider": lambda _: b"",
            "StopProvider": lambda _: b"",
            "PlanResourceChange": self.plan,
        }
        if "tfplugin6" not in details.method or name not in answers:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, _: answers[name](request))

    def schema(self) -> bytes:
        out = field(1, field(2, block(self.provider)))
        for name, schema in self.resources.items():
            out += field(2, field(1, name) + field(2, field(2, block(schema))))
        return out

    def plan(self, request: bytes) -> bytes:
        given = fields(request)
        kind, proposed = bytes(given[1]).decode(), fields(bytes(given[3]))  # type: ignore[arg-type]
        state = Unpacker(bytes(proposed[1])).value()  # type: ignore[arg-type]
        return field(1, field(1, packed(filled(state, self.resources[kind], kind))))


def serve(providers: dict[str, dict[str, Any]], folder: Path) -> tuple[list[grpc.Server], dict[str, Any]]:
    """Start a server for each provider; returns them and what Terraform must know to use them."""
    servers, addresses = [], {}
    for number, (source, facts) in enumerate(providers.items()):
        server = grpc.server(futures.ThreadPoolExecutor(4))
        server.add_generic_rpc_handlers([MockProvider(facts["provider"], facts["resources"])])
        address = {"Network": "unix", "String": str(folder / f"{number}.sock")}
        server.add_insecure_port(f"unix:{address['String']}")
        server.start()
        servers.append(server)
        addresses[source] = {
            "Protocol": "grpc",
            "ProtocolVersion": 6,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": address,
        }
    return servers, addresses


if __name__ == "__main__":
    given = yaml.safe_load(Path(sys.argv[1]).read_text())["providers"]
    servers, addresses = serve(given, Path(sys.argv[2]))
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    # Ends with the process that started it.
    sys.stdin.read()
