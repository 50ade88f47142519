"""What a sandbox may reach: lists of names, addresses and networks. Nothing is looked up here.

What `allow` names is allowed, else what `deny` names is refused. What neither names is allowed, unless there is an allow list
alone: then only that. Addresses that are not the internet's are refused before any of this (`Outside`).
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from sandkeep.errors import BadArgument, EgressDenied

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
ALL = "0.0.0.0/0"
MOST = 1000
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NAT64 = IPv6Network("64:ff9b::/96")
_SERVICES = (IPv4Network("192.0.0.0/24"), IPv4Network("168.63.129.16/32"))
"""What clouds offer to their own machines only, under addresses that look public."""


def name_of(text: str) -> str:
    """A host's name as it is compared: in ASCII, small letters, without the last dot."""
    try:
        name = text.lower() if text.isascii() else text.encode("idna").decode().lower()
    except UnicodeError:
        name = ""
    name = name.removesuffix(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise BadArgument(f"{text[:300]!r} is neither a host's name nor an address", "example.com, 192.0.2.7 or [::1]")
    return name


def address_of(text: str) -> Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return None if isinstance(found, IPv6Address) and found.scope_id else found


@dataclass(frozen=True)
class Matcher:
    names: frozenset[str]
    below: tuple[str, ...]  # ".example.com" for "*.example.com": whatever is below it, not itself
    networks: tuple[Network, ...]
    all: bool

    @classmethod
    def of(cls, entries: Iterable[str]) -> Matcher:
        names, below, networks = set(), [], []
        for entry in entries:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif entry.startswith("*."):
                below.append("." + name_of(entry[2:]))
            else:
                names.add(name_of(entry))
        everything = any(not network.prefixlen and network.version == 4 for network in networks)
        return cls(frozenset(names), tuple(below), tuple(networks), everything)

    def name(self, name: str) -> bool:
        return self.all or name in self.names or name.endswith(self.below)

    def address(self, address: Address) -> bool:
        return self.all or any(address in network for network in self.networks)


def _network(entry: str) -> Network | None:
    try:
        return ip_network(entry, strict=False)
    except ValueError:
        if "/" in entry:
            raise BadArgument(
                f"{entry[:300]!r} is not a network", "192.0.2.0/24 is one, 0.0.0.0/0 is everything"
            ) from None
        return None


@dataclass(frozen=True)
class Rules:
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @classmethod
    def of(cls, told: dict[str, Any]) -> Rules:
        """From JSON, checked."""
        if unknown := told.keys() - {"allow", "deny"}:
            raise BadArgument(
                f"egress has no {', '.join(map(str, sorted(unknown)))}", "allow and deny are lists of texts"
            )
        lists = []
        for part in ("allow", "deny"):
            entries = told.get(part) or []
            if not isinstance(entries, (list, tuple)) or not all(isinstance(one, str) for one in entries):
                raise BadArgument(f"egress: {part} must be a list of texts", "names, *.names, addresses or networks")
            if len(entries) > MOST:
                raise BadArgument(f"egress: {part} has more than {MOST} entries", "name networks instead")
            _matcher(tuple(entries))
            lists.append(tuple(entries))
        return cls(*lists)

    def as_dict(self) -> dict[str, list[str]]:
        return {"allow": list(self.allow), "deny": list(self.deny)}

    def by_name(self, name: str) -> bool | None:
        """Whether a name may be reached; None: that depends on its addresses. What is refused here is never looked up."""
        allow, deny = _matcher(self.allow), _matcher(self.deny)
        if allow.name(name):
            return True
        if deny.name(name) or (self.allow and not self.deny):
            return False
        return None

    def by_address(self, address: Address) -> bool:
        allow, deny, address = _matcher(self.allow), _matcher(self.deny), _inner(address)
        return allow.address(address) or not (deny.address(address) or (self.allow and not self.deny))


@lru_cache(1024)
def _matcher(entries: tuple[str, ...]) -> Matcher:
    return Matcher.of(entries)


@dataclass(frozen=True)
class Outside:
    """Which addresses are outside: the internet's, and the networks that the server's settings name."""

    named: tuple[Network, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> Outside:
        try:
            return cls(tuple(ip_network(one) for one in networks))
        except ValueError as error:
            raise BadArgument(f"egress-private: {error}", "name a network like 10.1.0.0/16") from None

    def __contains__(self, address: Address) -> bool:
        inner = _inner(address)
        if any(inner in network for network in self.named):
            return True
        public = inner.is_global and not inner.is_multicast and not inner.is_reserved and not _site_local(inner)
        return public and not any(inner in network for network in _SERVICES) and not _own(inner)


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address leads to, if it does."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)
    return address


def _site_local(address: Address) -> bool:
    return isinstance(address, IPv6Address) and address.is_site_local


def _own(address: Address) -> bool:
    """Whether it is this machine's: then the way to it begins there."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))
        return ip_address(probe.getsockname()[0]) == address
    return False


def decide(rules: Rules, outside: Outside, host: str, addresses: Iterable[Address]) -> list[Address]:
    """Those addresses of the host that may be connected to. None: it is said why."""
    literal = address_of(host)
    named = None if literal is not None else rules.by_name(name_of(host))
    found = list(addresses)
    public = [one for one in found if one in outside]
    allowed = [one for one in public if named or (named is None and rules.by_address(one))]
    if allowed:
        return allowed
    if named is False or public:
        raise denied(host)
    raise EgressDenied(
        f"{host} is at an address of the server's own network", "an operator may open it with --egress-private"
    )


def denied(host: str) -> EgressDenied:
    return EgressDenied(f"{host} is refused by this sandbox's egress rules", "change them, or ask who made the sandbox")
