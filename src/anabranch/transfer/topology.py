"""A host's NICs, as its operator wrote them down, and which of them reach a peer.

    [[nic]]
    name = "left"                   # how messages and metrics call it
    address = "10.0.1.5"            # bound by connections that leave through it
    device = "eth1"                 # interface; without it the kernel's routes decide by destination alone
    speed_gbit = 100                # first guess of its bandwidth
    rate_gbit = 80                  # sent over it at most; none: as the setting link.rate_bytes says
    numa = 0
    reaches = ["10.0.1.0/24"]       # peers' addresses or networks; none: everything
    use = "storage"                 # storage | compute | any

**Covers** parsing and looking up. **Does not cover** reading the file or binding (`transfer.live.rails`), or choosing
among rails (`transfer.spread`).
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from anabranch.core.errors import ConfigError

Use = Literal["any", "storage", "compute"]
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
UNKNOWN_NUMA = -1


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Empty `address` and `device`: whatever the kernel chooses. `speed_gbit` 0: unknown, `rate_gbit` 0: not
    its own."""

    name: str = ""
    address: str = ""
    device: str = ""
    speed_gbit: float = 0.0
    rate_gbit: float = 0.0
    numa: int = UNKNOWN_NUMA
    reaches: tuple[str, ...] = ()
    use: Use = "any"

    @property
    def bandwidth(self) -> float:
        """Bytes a second, 0 = unknown."""
        return self.speed_gbit * 1e9 / 8

    @property
    def rate_bytes(self) -> int:
        """What may be sent in a second, 0 = not its own limit."""
        return round(self.rate_gbit * 1e9 / 8)

    def reaches_host(self, host: str) -> bool:
        """`host` is an IP address; a host name is reached by NICs without `reaches`, or by one that lists the name."""
        if not self.reaches or host in self.reaches:
            return not self.address or _same_family(self.address, host)
        where = _address(host)
        return where is not None and any(where in network for network in map(_network, self.reaches) if network)

    def serves(self, use: Use) -> bool:
        return use == self.use or "any" in (use, self.use)


class Topology(msgspec.Struct, frozen=True):
    """`nics` is never empty; names are unique."""

    nics: tuple[Nic, ...] = (Nic(),)

    def towards(self, host: str, use: Use = "any") -> tuple[Nic, ...]:
        """The NICs from which `host` is reached, in the file's order. Raises ConfigError if there is none."""
        found = tuple(nic for nic in self.nics if nic.serves(use) and nic.reaches_host(host))
        if not found:
            names = ", ".join(nic.name or "(unnamed)" for nic in self.nics)
            wanted = "" if use == "any" else f" for {use}"
            raise ConfigError(f"no NIC of the topology reaches {host}{wanted} (it has: {names}); add it to `reaches`")
        return found


def parse_topology(text: str, origin: str) -> Topology:
    """The topology in a TOML document. Raises ConfigError naming `origin`, the NIC, the key and the remedy."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from error
    rows = table.pop("nic", None)
    if table:
        raise ConfigError(f"{origin}: unknown key '{next(iter(table))}'; a topology is a list of [[nic]] tables")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{origin} lists no NIC; write at least one [[nic]] table, or leave the setting empty")
    nics = tuple(_nic(row, f"{origin}: nic {number}") for number, row in enumerate(rows, 1))
    _refuse_twins(nics, origin)
    return Topology(nics)


def _nic(row: Any, place: str) -> Nic:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place} is not a table; write [[nic]]")
    if name := row.get("name"):
        place = f"{place} ({name})"
    try:
        nic = msgspec.convert(row, Nic)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}; keys are {', '.join(Nic.__struct_fields__)}") from error
    if not nic.name:
        raise ConfigError(f'{place}: no name; give it one, e.g. name = "left"')
    if nic.address and _address(nic.address) is None:
        raise ConfigError(f"{place}: address = {nic.address!r} is not an IP address of this host")
    for key, value in (("speed_gbit", nic.speed_gbit), ("rate_gbit", nic.rate_gbit)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{place}: {key} = {value} must be 0 or a finite number above it")
    for network in nic.reaches:
        if "/" in network and _network(network) is None:
            raise ConfigError(f"{place}: reaches = {network!r} is not a network; write e.g. 10.0.1.0/24")
    return nic


def _refuse_twins(nics: tuple[Nic, ...], origin: str) -> None:
    for key in ("name", "address"):
        values = [value for nic in nics if (value := getattr(nic, key))]
        twins = sorted({value for value in values if values.count(value) > 1})
        if twins:
            raise ConfigError(f"{origin}: two NICs have the {key} {twins[0]!r}; every NIC needs its own")


def split_addresses(address: str) -> tuple[str, ...]:
    """A peer with several NICs is written `host:port+host:port`; these are the parts. (A comma parts peers.)"""
    return tuple(part for part in (piece.strip() for piece in address.split("+")) if part)


def host_of(address: str) -> str:
    """The host of `host:port` or `[host]:port`."""
    return address.rpartition(":")[0].strip("[]")


def _address(text: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _same_family(own: str, host: str) -> bool:
    mine, theirs = _address(own), _address(host)
    return mine is None or theirs is None or mine.version == theirs.version
