from ipaddress import ip_network

import pytest

from server.media_address import is_allowed, parse_address

FORBIDDEN = [
    "0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.1", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
    "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "3fff::1", "100::1", "4000::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "100.63.255.255", "172.32.0.1", "::ffff:8.8.8.8", "2606:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize("text", FORBIDDEN)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_allowed(parse_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses(text: str) -> None:
    assert is_allowed(parse_address(text))


def test_networks_of_the_operator_pass() -> None:
    allowed = [ip_network("10.1.0.0/16"), ip_network("fd00::/64")]
    for text, expected in {"10.1.2.3": True, "::ffff:10.1.2.3": True, "10.2.0.1": False, "fd00::5": True}.items():
        assert is_allowed(parse_address(text), allowed) is expected
