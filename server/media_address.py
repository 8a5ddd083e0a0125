"""Which network addresses pictures may be fetched from. Pure: addresses in, a verdict out.

Only addresses of the public internet pass, and those in networks that the operator names. For IPv6 the rule is the
other way round than usual: what is not global unicast is refused, so that no special range can be forgotten.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# RFC 4291: the only unicast addresses that are routed on the internet.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# Within it: carriers of IPv4 addresses (Teredo RFC 4380, 6to4 RFC 3056), which a gateway would unwrap, and ranges for
# protocols, benchmarks and documentation (RFC 2928, 5180, 3849, 9637).
_NOT_GLOBAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# Beyond what the standard library calls private: the relays of 6to4 (RFC 7526).
_NOT_GLOBAL_V4 = (IPv4Network("192.88.99.0/24"),)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def parse_address(text: str) -> Address:
    """An address as resolvers give it. IPv4 in IPv6's clothes (`::ffff:10.0.0.1`) becomes IPv4."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_allowed(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether to connect to `address`: it is public, or lies in a network of `allowed`."""
    return is_public(address) or any(address in network for network in allowed)


def is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        is_special = address.is_multicast or address.is_reserved or not address.is_global
        return not is_special and not any(address in network for network in _NOT_GLOBAL_V4)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_GLOBAL_V6)
