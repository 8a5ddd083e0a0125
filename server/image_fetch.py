"""Fetches pictures from other machines, under limits. Off unless the operator names the hosts.

The rules: only hosts of the list; a name is resolved once, every address it has must be allowed, and the connection
goes to the address that was checked, with the name in the Host header and in TLS; redirects are followed by hand, each
checked as the first URL was; a cap on the bytes that come and on the time that all takes; no proxies, cookies,
compression or second tries. What a client learns of a failure names no address. Logs hold scheme and host only.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self

import httpcore2

from server.image_decode import ImageError
from server.images import FetchImage
from server.media_address import Network, is_allowed, parse_address
from server.media_url import AllowedHost, MediaUrl, MediaUrlError, parse_allowed_host, parse_media_url, resolve_redirect
from server.metrics import Metrics
from server.settings import Settings

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 3
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})

UNREACHABLE = "the image URL's server could not be reached"
NOT_ALLOWED = "the image URL's host is not one that images are fetched from (allowed_media_domains)"

# The addresses of a host, as text.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class ForbiddenAddressError(Exception):
    """A host has an address that nothing is fetched from. For our log; a client learns no more than of any failure."""


def image_fetch(settings: Settings, metrics: Metrics) -> FetchImage | None:
    """The fetcher that the settings ask for; None: pictures are not fetched."""
    if not settings.allowed_media_domains:
        return None
    return ImageFetcher(
        allowed_hosts=[parse_allowed_host(entry) for entry in settings.allowed_media_domains],
        allowed_networks=settings.allowed_media_addresses,
        max_bytes=settings.max_image_bytes,
        timeout_seconds=settings.media_timeout_seconds,
        observe_seconds=metrics.image_fetch.observe,
    )


class ImageFetcher:
    """Called with a URL, gives the bytes behind it. Each fetch has connections of its own."""

    def __init__(
        self,
        *,
        allowed_hosts: Sequence[AllowedHost],
        allowed_networks: Sequence[Network] = (),
        max_bytes: int,
        timeout_seconds: float,
        observe_seconds: Callable[[float], None] | None = None,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            timeout_seconds: for one picture, from the first name to the last byte.
            observe_seconds: is told how long each fetch took that gave a picture.
            resolve: for tests; None: the system's resolver.
            ssl_context: for tests; None: verifies against the usual authorities.
        """
        self._allowed_hosts = allowed_hosts
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._observe_seconds = observe_seconds
        self._ssl_context = ssl_context or httpcore2.default_ssl_context()
        self._allowed_networks = allowed_networks
        self._resolve = resolve or system_addresses

    async def __call__(self, url: str) -> bytes:
        """
        Raises:
            ImageError: the URL is not allowed, or the picture did not come whole and in time.
        """
        start = time.perf_counter()
        try:
            parsed = parse_media_url(url.strip())
        except MediaUrlError as error:
            raise ImageError("invalid_image_url", str(error)) from None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                data = await self._follow(parsed)
        except TimeoutError:
            message = f"the image could not be fetched within {self._timeout_seconds:g} seconds"
            raise ImageError("invalid_image_url", message) from None
        except MediaUrlError as error:
            raise ImageError("invalid_image_url", str(error)) from None
        except ForbiddenAddressError:
            logger.warning("an image URL's host has a forbidden address: %s://%s", parsed.scheme, parsed.host)
            raise ImageError("invalid_image_url", UNREACHABLE) from None
        except (OSError, httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as error:
            logger.info("an image was not fetched: %s://%s: %s", parsed.scheme, parsed.host, type(error).__name__)
            raise ImageError("invalid_image_url", UNREACHABLE) from None
        if self._observe_seconds is not None:
            self._observe_seconds(time.perf_counter() - start)
        return data

    async def _follow(self, url: MediaUrl) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            if not any(allowed.allows(url) for allowed in self._allowed_hosts):
                raise ImageError("invalid_image_url", NOT_ALLOWED)
            found = await self._get(url)
            if isinstance(found, bytes):
                return found
            url = found
        raise ImageError("invalid_image_url", f"the image URL redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: MediaUrl) -> bytes | MediaUrl:
        """What is behind one URL: a picture's bytes, or where to look next."""
        target = httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        headers = [
            (b"host", url.host_header.encode()),
            (b"user-agent", b"fovea"),
            (b"accept", b"image/*"),
            (b"accept-encoding", b"identity"),
            (b"connection", b"close"),
        ]
        # The pool would reuse connections by the name that was asked for: one a request, so that each is checked.
        async with (
            CheckedBackend(self._allowed_networks, self._resolve) as backend,
            httpcore2.AsyncConnectionPool(ssl_context=self._ssl_context, network_backend=backend) as pool,
            pool.stream("GET", target, headers=headers) as response,
        ):
            answered = {name.lower(): value for name, value in response.headers}
            if response.status in REDIRECT_STATUSES:
                return resolve_redirect(url, answered.get(b"location", b"").decode("latin-1"))
            if response.status != 200:
                message = f"the image URL's server answered with the status {response.status}"
                raise ImageError("invalid_image_url", message)
            if answered.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ImageError("invalid_image_url", "the image URL's server sent the image compressed")
            announced = answered.get(b"content-length", b"")
            if announced.isdigit() and int(announced[:20]) > self._max_bytes:
                raise self._too_many_bytes()
            return await self._read(response)

    async def _read(self, response: httpcore2.Response) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        async for part in response.aiter_stream():
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise self._too_many_bytes()
            parts.append(part)
        return b"".join(parts)

    def _too_many_bytes(self) -> ImageError:
        return ImageError("image_too_large", f"the image has more than {self._max_bytes} bytes, the most accepted")


class CheckedBackend(httpcore2.AnyIOBackend):
    """Connects by name, to addresses that it has looked up and checked itself: there is no second look-up.

    What it opened is closed at the end of the `async with` block: a handshake that is given up half-way leaves its
    socket to nobody else.
    """

    def __init__(self, allowed_networks: Sequence[Network], resolve: Resolve) -> None:
        self._allowed_networks = allowed_networks
        self._resolve = resolve
        self._streams: list[httpcore2.AsyncNetworkStream] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for stream in self._streams:
            with contextlib.suppress(Exception):
                await stream.aclose()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (the interface is httpcore2's)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """
        Raises:
            ForbiddenAddressError: one of the host's addresses is not allowed.
            httpcore2.ConnectError: the host has no address, or none of them answers.
        """
        addresses = [parse_address(text) for text in await self._resolve(host, port)]
        if not all(is_allowed(address, self._allowed_networks) for address in addresses):
            raise ForbiddenAddressError
        failure: Exception = httpcore2.ConnectError("the host has no address")
        for address in addresses:
            try:
                stream = await super().connect_tcp(str(address), port, timeout, local_address, socket_options)
                self._streams.append(stream)
                return stream
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


async def system_addresses(host: str, port: int) -> list[str]:
    """What the system's resolver says, each address once.

    Raises:
        OSError: it knows none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
