"""Gets a request's pictures: from the URL in the message to pixels. Knows URLs and limits, no HTTP requests of ours.

The pixels are made in `image_pool`'s workers, base64 included.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from runtime.processing.image_processor import Detail, pixel_budget
from server.byte_budget import Hold
from server.data_url import DataUrlError, data_url_payload, is_data_url, looks_like_base64
from server.errors import ServerBusyError
from server.image_decode import DecodeOptions, ImageError, ImageErrorCode
from server.image_pool import ImagePool, ImagePoolClosedError, LoadedImage, default_num_workers

__all__ = ["ImageError", "ImageErrorCode", "ImageLoader", "ImagePoolClosedError", "LoadedImage", "PictureBudget"]

DEFAULT_MAX_BYTES = 20 << 20
# 64 megapixels: above every camera that is common, and at most 256 MB a picture while it is decoded with alpha.
DEFAULT_MAX_SOURCE_PIXELS = 64_000_000

# The bytes behind an http(s) URL, or ImageError.
FetchImage = Callable[[str], Awaitable[bytes]]


# Fetched pictures wait in memory for a worker: so many at most.
MAX_REMOTE_IN_FLIGHT = 16


class PictureBudget:
    """What one request's pictures may have together: pixels before they are reduced, and bytes after it, which `hold`
    counts beside those of other requests."""

    def __init__(self, max_pixels: int, hold: Hold) -> None:
        self.max_pixels = max_pixels
        self.num_pixels = 0
        self._hold = hold
        self._is_refused = False

    @property
    def is_exceeded(self) -> bool:
        return self.num_pixels > self.max_pixels

    def check(self) -> None:
        """Asked before a picture is decoded.

        Raises:
            ImageError, ServerBusyError: the request is refused anyhow.
        """
        if self._is_refused:
            raise ServerBusyError(self._hold.max_bytes)
        if self.is_exceeded:
            raise ImageError("image_too_large", "the request's images have too many pixels together")

    def count(self, image: LoadedImage) -> None:
        """
        Raises:
            ServerBusyError: there is no room for its pixels.
        """
        self.num_pixels += image.original_height * image.original_width
        try:
            self._hold.add(image.pixels.nbytes)
        except ServerBusyError:
            self._is_refused = True
            raise


class ImageLoader:
    """Loads pictures for one model. `start` and `close` bracket its use; loads may run side by side."""

    def __init__(
        self,
        *,
        factor: int,
        min_pixels: int,
        max_pixels: int,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_source_pixels: int = DEFAULT_MAX_SOURCE_PIXELS,
        num_workers: int | None = None,
        timeout_seconds: float = 30.0,
        fetch: FetchImage | None = None,
    ) -> None:
        """
        Args:
            factor: sides after resizing are multiples of it (`pixels_per_token_side` of the model).
            min_pixels, max_pixels: bounds of height x width after resizing.
            max_bytes: of a picture's file.
            max_source_pixels: of a picture's own height x width, read from its header.
            num_workers: of the pool; None: two, or one on two cores or fewer.
            timeout_seconds: for decoding one picture.
            fetch: fetches http(s) URLs; None: they are refused.
        """
        self._factor = factor
        self._min_pixels = min_pixels
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._max_source_pixels = max_source_pixels
        self._fetch = fetch
        self._pool = ImagePool(num_workers=num_workers, timeout_seconds=timeout_seconds)
        self._decoding = asyncio.Semaphore(num_workers or default_num_workers())
        self._remote = asyncio.Semaphore(MAX_REMOTE_IN_FLIGHT)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return self._pool.pids

    async def start(self) -> None:
        """Starts the workers, and does not wait until they are ready: pictures that come sooner wait for them."""
        self._pool.start()

    async def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        await self._pool.close()

    async def load(self, url: str, detail: Detail = "auto", budget: PictureBudget | None = None) -> LoadedImage:
        """Loads one picture.

        Args:
            url: a data URL in base64, or http(s) where fetching is enabled.
            detail: how much of the picture the model gets to see, see `image_processor.pixel_budget`.
            budget: of the pictures of one request. Once it is exceeded, those that still wait are not decoded.

        Raises:
            ImageError: the URL or the picture cannot be used.
            ServerBusyError: there is no room for it in the budget.
            ImagePoolClosedError: the loader is closed.
        """
        if is_data_url(url):
            # Percent-encoding at most trebles base64, whose length is 4/3 of the data's: more cannot fit the limit,
            # nor be sent to a worker. The worker counts exactly.
            if len(url) > 4 * self._max_bytes + 1024:
                raise self._too_many_bytes()
            try:
                payload = data_url_payload(url)
            except DataUrlError as error:
                raise ImageError("invalid_image_url", str(error)) from None
            return await self._decode(payload, "base64", detail, budget)
        async with self._remote:
            data = await self._fetch_remote(url)
            if len(data) > self._max_bytes:
                raise self._too_many_bytes()
            return await self._decode(data, "raw", detail, budget)

    async def _decode(
        self, payload: bytes, encoding: Literal["base64", "raw"], detail: Detail, budget: PictureBudget | None
    ) -> LoadedImage:
        async with self._decoding:
            if budget is not None:
                budget.check()
            options = DecodeOptions(
                max_source_pixels=self._max_source_pixels,
                factor=self._factor,
                min_pixels=self._min_pixels,
                max_pixels=pixel_budget(detail, min_pixels=self._min_pixels, max_pixels=self._max_pixels),
            )
            image = await self._pool.decode(payload, options, encoding=encoding, max_bytes=self._max_bytes)
        if budget is not None:
            budget.count(image)
        return image

    async def _fetch_remote(self, url: str) -> bytes:
        if not url.strip()[:8].lower().startswith(("http://", "https://")):
            raise ImageError("invalid_image_url", _explain(url))
        if self._fetch is None:
            raise ImageError(
                "invalid_image_url",
                "fetching images from http(s) URLs is disabled on this server; send the image as a data URL "
                "(data:image/png;base64,...) (operators: --allowed-media-domains)",
            )
        return await self._fetch(url)

    def _too_many_bytes(self) -> ImageError:
        return ImageError("image_too_large", f"the image has more than {self._max_bytes} bytes, the most accepted")


def _explain(url: str) -> str:
    if not url.strip():
        return "the image URL is empty"
    if looks_like_base64(url):
        return "the image URL looks like bare base64; put data:image/png;base64, in front of it"
    return "the image URL must be a data URL in base64 (data:image/png;base64,...) or begin with http:// or https://"
