"""A transport by its name; libraries are loaded only for the one that is asked for."""

from __future__ import annotations

from anabranch.core.errors import ConfigError
from anabranch.transfer.live.rails import Links
from anabranch.transfer.live.transports.mooncake import MooncakeTransport
from anabranch.transfer.live.transports.nixl import NixlTransport
from anabranch.transfer.live.transports.shm import ShmTransport
from anabranch.transfer.live.transports.tcp import TcpTransport
from anabranch.transfer.topology import split_addresses
from anabranch.transfer.transport import Transport

NAMES = ("shm", "tcp", "nixl", "mooncake")


def open_transport(name: str, *, host: str = "127.0.0.1", links: Links | None = None, device: str = "") -> Transport:
    """`host`: this host's address for peers; for tcp one for each NIC, `host+host`. `device`: an RDMA device for
    nixl and mooncake. Raises ConfigError for another name or what this machine lacks, MissingExtra, Unavailable."""
    match name:
        case "shm":
            return ShmTransport()
        case "tcp":
            return TcpTransport([f"{part}:0" for part in split_addresses(host)], links=links)
        case "nixl":
            return NixlTransport(device=device)
        case "mooncake":
            return MooncakeTransport(host, protocol="rdma" if device else "tcp", device=device)
    raise ConfigError(f"no transport '{name}'; there are {', '.join(NAMES)}")
