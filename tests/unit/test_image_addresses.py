"""Which addresses images may be fetched from, in all the ways in which addresses are written."""

from __future__ import annotations

import pytest

from slipstream.server.images.addresses import is_open, names_of, those_open

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "172.32.0.1",
    "2606:4700:4700::1111",
    "2606:4700:4700:0:0:0:0:1111",
    "::ffff:8.8.8.8",
    "::ffff:808:808",
    "64:ff9b::8.8.8.8",  # through a NAT64 gateway, as names are resolved in networks without IPv4
]
INNER = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "198.18.0.1",
    "::1",
    "0:0:0:0:0:0:0:1",
    "fc00::1",
    "fd12:3456:789a::1",
    "fd12:3456:789a::1%eth0",
    "fec0::1",
    "::ffff:127.0.0.1",
    "::ffff:7f00:1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a00:1",
    "64:ff9b:1::8.8.8.8",
    "64:ff9b:1::10.0.0.1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2002:c0a8:101:1::1",
    "2001:0:808:808::80ff:fffe",  # Teredo of 127.0.0.1, whose bits are turned over
]
NEVER = [
    "169.254.169.254",
    "169.254.0.1",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::a9fe:a9fe",
    "2002:a9fe:a9fe::",
    "2001:0:808:808::5601:5601",  # Teredo of 169.254.169.254
    "2001:0:a9fe:a9fe::f7f7:f7f7",  # and a Teredo server there
    "fe80::1",
    "fe80::1%eth0",
    "FE80::1%1",
    "febf:ffff::1",
    "224.0.0.1",
    "239.255.255.250",
    "ff02::1",
    "ff0e::1",
    "0.0.0.0",
    "::",
    "::ffff:0.0.0.0",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "::ffff:100.100.100.200",
    "64:ff9b::a83f:8110",
    "fd00:ec2::254",
    "fd00:ec2:0:0:0:0:0:254%eth0",
    "fd20:ce::254",
]
# Not answers of a resolver; C's functions would take many of them for 127.0.0.1 or 169.254.169.254.
NO_ADDRESSES = [
    "",
    "localhost",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "127.0.0.01",
    "0xa9fea9fe",
    "8.8.8.8/32",
    " 8.8.8.8",
    "8.8.8.8\n",
    "８.8.8.8",
    "%eth0",
]
RESERVED = [
    "0.1.2.3",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "2001:db8::1",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_open(text: str) -> None:
    assert is_open(text, listed=False)
    assert is_open(text, listed=True)


@pytest.mark.parametrize("text", INNER)
def test_inner_addresses_are_of_listed_hosts_alone(text: str) -> None:
    assert not is_open(text, listed=False)
    assert is_open(text, listed=True)


@pytest.mark.parametrize("text", [*NEVER, *NO_ADDRESSES])
def test_some_are_never_open(text: str) -> None:
    assert not is_open(text, listed=False)
    assert not is_open(text, listed=True)


@pytest.mark.parametrize("text", RESERVED)
def test_reserved_addresses_are_not_public(text: str) -> None:
    assert not is_open(text, listed=False)


def test_of_a_hosts_addresses_the_open_ones_in_their_order() -> None:
    found = ["10.0.0.1", "8.8.8.8", "169.254.169.254", "2606:4700::1", "8.8.8.8"]
    assert list(those_open(found, listed=False)) == ["8.8.8.8", "2606:4700::1"]
    assert list(those_open(found, listed=True)) == ["10.0.0.1", "8.8.8.8", "2606:4700::1"]


def test_lists_of_hosts() -> None:
    assert names_of(None) is None
    assert names_of("") == frozenset()
    assert names_of(" Example.COM., 10.0.0.1 ,,[fd12::1]") == {"example.com", "10.0.0.1", "fd12::1"}
