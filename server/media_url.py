"""URLs of pictures on other machines: one strict parser, and which hosts are allowed. Pure functions, no network.

A URL is read once, here, and what is fetched is made of the parts that were checked: two parsers that disagree about
`http://allowed\\@10.0.0.1` are how such checks are passed elsewhere.
"""

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Literal, cast
from urllib.parse import quote

MAX_URL_CHARS = 4096
DEFAULT_PORTS = {"http": 80, "https": 443}

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][^#]*)?(?:#.*)?",
    re.IGNORECASE,
)
# RFC 3986's characters of path and query; percent signs stay as they were sent.
_TARGET_SAFE = "/?:@!$&'()*+,;=-._~%[]"


class MediaUrlError(ValueError):
    """A URL or an entry of the list of hosts cannot be used. The message quotes nothing of a client's URL."""


@dataclass(frozen=True, kw_only=True)
class MediaUrl:
    """A URL in parts. `host` is a name in lower case, or an address as its canonical text, without brackets.

    `target` is path and query, percent-encoded ASCII.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    target: str

    @property
    def is_default_port(self) -> bool:
        return self.port == DEFAULT_PORTS[self.scheme]

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.is_default_port else f"{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class AllowedHost:
    """One entry of the list. `name` None: every host; `has_subdomains`: the hosts below it, not itself.

    `port` None: the scheme's own.
    """

    name: str | None
    has_subdomains: bool
    port: int | None

    def allows(self, url: MediaUrl) -> bool:
        if url.port != self.port if self.port is not None else not url.is_default_port:
            return False
        if self.name is None:
            return True
        return url.host.endswith("." + self.name) if self.has_subdomains else url.host == self.name


def parse_media_url(text: str) -> MediaUrl:
    """Reads an absolute http(s) URL.

    Raises:
        MediaUrlError: it is none, or has what no honest URL of a picture has: userinfo, a backslash, control
            characters, spaces, a host that ends in a dot or is an address in an unusual form.
    """
    if len(text) > MAX_URL_CHARS:
        raise MediaUrlError(f"the image URL is longer than {MAX_URL_CHARS} characters")
    if "\\" in text or any(ord(sign) <= 0x20 or 0x7F <= ord(sign) <= 0x9F for sign in text):
        raise MediaUrlError("the image URL has characters that do not belong into a URL")
    match = _URL.fullmatch(text)
    if match is None:
        raise MediaUrlError("the image URL is malformed: it must be as https://host/path")
    scheme = cast(Literal["http", "https"], match["scheme"].lower())
    port = int(match["port"]) if match["port"] else DEFAULT_PORTS[scheme]
    if not 0 < port < 65536:
        raise MediaUrlError("the image URL's port is out of range")
    target = match["target"] or "/"
    if target.startswith("?"):
        target = "/" + target
    return MediaUrl(scheme=scheme, host=_host(match["host"].lower()), port=port, target=quote(target, _TARGET_SAFE))


def _host(text: str) -> str:
    malformed = MediaUrlError("the image URL's host is malformed")
    if text.startswith("["):
        try:
            return str(IPv6Address(text[1:-1]))
        except AddressValueError:
            raise malformed from None
    if not _NAME.fullmatch(text):
        raise malformed
    last = text.rpartition(".")[2]
    if last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last):
        # Resolvers take 127.1, 0x7f000001, 0177.0.0.1 and 2130706433 for addresses too: only the usual form is one.
        try:
            return str(IPv4Address(text))
        except AddressValueError:
            raise malformed from None
    return text


def parse_allowed_host(entry: str) -> AllowedHost:
    """Reads `img.example`, `*.img.example`, `img.example:8443`, `[2001:db8::1]:8443` or `*`.

    Raises:
        MediaUrlError: it is none of these.
    """
    match = re.fullmatch(r"(\*|(?:\*\.)?[^*:/\[\]]+|\[[^\]]+\])(?::([0-9]{1,5}))?", entry.strip().lower())
    if match is None:
        raise MediaUrlError(f"{entry!r} is no host; write img.example, *.img.example, img.example:8443 or *")
    name, port = match[1], int(match[2]) if match[2] else None
    if name == "*":
        return AllowedHost(name=None, has_subdomains=False, port=port)
    has_subdomains = name.startswith("*.")
    try:
        return AllowedHost(name=_host(name.removeprefix("*.")), has_subdomains=has_subdomains, port=port)
    except MediaUrlError:
        raise MediaUrlError(f"{entry!r} is no host; write img.example, *.img.example, img.example:8443 or *") from None


def resolve_redirect(url: MediaUrl, location: str) -> MediaUrl:
    """Where a redirect leads: an absolute URL, or a path on the same host.

    Raises:
        MediaUrlError: it leads from https to http, or is no URL that `parse_media_url` takes.
    """
    if location.startswith("/") and not location.startswith("//"):
        host = f"[{url.host}]" if ":" in url.host else url.host
        location = f"{url.scheme}://{host}:{url.port}{location}"
    elif location.startswith("//"):
        location = f"{url.scheme}:{location}"
    found = parse_media_url(location)
    if url.scheme == "https" and found.scheme == "http":
        raise MediaUrlError("the image URL redirects from https to http")
    return found
