"""Addresses in the network that images may be fetched from: public ones alone, unless a host is listed by name."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Clouds give credentials to whoever asks there; the link-local ones (169.254.169.254) are refused as such.
METADATA = frozenset(
    ipaddress.ip_address(one)
    for one in ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
# Their last 32 bits are an IPv4 address: two kinds of gateways, and two older forms.
CARRYING = (NAT64, NAT64_LOCAL, ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("::ffff:0:0:0/96"))


def is_open(text: str, *, listed: bool) -> bool:
    """Whether images may be fetched from an IP address. `listed`: it is of a host that `--remote-image-hosts` names."""
    try:
        addresses = _meant(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False
    return not any(_is_never(one) for one in addresses) and (listed or all(map(_is_public, addresses)))


def names_of(listed: str | None) -> frozenset[str] | None:
    """The hosts of a comma list; None if there is none."""
    if listed is None:
        return None
    return frozenset(plain(one.strip().strip("[]")) for one in listed.split(",") if one.strip())


def plain(host: str) -> str:
    """A host's name as names are compared."""
    return host.lower().removesuffix(".")


def those_open(addresses: Iterable[str], *, listed: bool) -> Sequence[str]:
    """Those of a host's addresses that may be connected to, in their order."""
    return [one for one in dict.fromkeys(addresses) if is_open(one, listed=listed)]


def _meant(address: Address) -> Sequence[Address]:
    """The address and the IPv4 addresses that it carries, if any: a gateway would go on to those."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    carried = [address.sixtofour, *(address.teredo or ())]
    if any(address in one for one in CARRYING):
        carried.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(one for one in carried if one is not None)]


def _is_never(address: Address) -> bool:
    return address in METADATA or address.is_link_local or address.is_multicast or address.is_unspecified


def _is_public(address: Address) -> bool:
    """Python's `is_global` is false of what IANA lists as private, shared, loopback, or for documentation.

    An address of NAT64 is as public as that which it carries, though it lies in a reserved block.
    """
    if address in NAT64:
        return True
    odd = address.is_private or address.is_loopback or address.is_reserved
    local = isinstance(address, ipaddress.IPv6Address) and (address.is_site_local or address in NAT64_LOCAL)
    return address.is_global and not odd and not local
