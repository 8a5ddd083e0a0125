"""From a request's messages to what the engine takes: pictures decoded, the template rendered, placeholders placed.

Knows the checkpoint's processing and the image workers; no HTTP, no sampling.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoint import read_model_config, read_processor_config
from runtime.config import resolve_config
from runtime.processing.chat_template import ChatTemplateError
from runtime.processing.prompt import PromptBuilder
from runtime.processing.tokenizer import Tokenizer
from runtime.request import ImageInput
from server.errors import InvalidImageError, InvalidRequestError
from server.images import ImageError, ImageLoader, LoadedImage
from server.metrics import Metrics
from server.schemas import ChatMessage, ImagePart, ImageUrl, TextPart
from server.settings import Settings

logger = logging.getLogger(__name__)

# Templates of this family know neither: OpenAI's newer word for `system`, and its older one for `tool`.
ROLES = {"developer": "system", "function": "tool"}

# Rendering and encoding of shorter conversations takes less than a hop to a thread and back would delay others.
MAX_INLINE_CHARS = 8192


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt, and its pictures with `pixels` [height, width, 3] beside them in the same order."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]
    pixels: tuple[NDArray[np.uint8], ...]
    num_image_tokens: int


class PromptPreparer:
    """One for each application; `load` makes it, `close` ends its image workers."""

    def __init__(self, builder: PromptBuilder, images: ImageLoader, settings: Settings, metrics: Metrics) -> None:
        self._builder = builder
        self._images = images
        self._max_images = settings.max_images_per_prompt
        self._metrics = metrics

    @classmethod
    async def load(cls, directory: Path, settings: Settings, metrics: Metrics) -> "PromptPreparer":
        """Reads the checkpoint's tokenizer and template, and starts the image workers.

        Raises:
            CheckpointError: a file is missing or not served.
            ConfigError: a setting contradicts the checkpoint.
        """
        model = read_model_config(directory)
        resolved = resolve_config(settings.engine_config(), model, read_processor_config(directory))
        images = ImageLoader(
            factor=model.vision.pixels_per_token_side,
            min_pixels=resolved.min_pixels,
            max_pixels=resolved.max_pixels,
            max_bytes=settings.max_image_bytes,
            max_source_pixels=settings.max_image_pixels,
            num_workers=settings.image_workers,
        )
        # The workers load their modules while the tokenizer is read.
        await images.start()
        try:
            builder = await asyncio.to_thread(PromptBuilder.from_checkpoint, directory)
        except BaseException:
            await images.close()
            raise
        return cls(builder, images, settings, metrics)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._builder.tokenizer

    async def close(self) -> None:
        await self._images.close()

    async def prepare(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> PreparedPrompt:
        """
        Args:
            tools: definitions in OpenAI's shape, told to the model.

        Raises:
            InvalidRequestError: too many pictures, or the template refuses the messages.
            InvalidImageError: a picture cannot be used; names its place.
        """
        urls = image_urls(messages)
        if len(urls) > self._max_images:
            error = InvalidRequestError(
                f"The request has {len(urls)} images; at most {self._max_images} are accepted (limit_mm_per_prompt).",
                param="messages",
                code="too_many_images",
            )
            error.reason = "too_many_images"
            raise error
        images = await self._load(urls)
        sizes = [(image.height, image.width) for image in images]
        plain = [plain_message(message) for message in messages]
        try:
            if not tools and num_chars(messages) <= MAX_INLINE_CHARS:
                prompt = self._builder.build(plain, sizes)
            else:
                prompt = await asyncio.to_thread(self._builder.build, plain, sizes, tools=tools or None)
        except ChatTemplateError as refusal:
            # A template's own words may hold anything, and so stay here.
            logger.warning("the chat template refused a request: %s", type(refusal).__name__)
            raise InvalidRequestError(
                "The model's chat template does not take these messages.", param="messages"
            ) from None
        return PreparedPrompt(
            token_ids=prompt.token_ids,
            images=tuple(
                ImageInput(image_hash=image.image_hash, height=image.height, width=image.width, placeholder=placeholder)
                for image, placeholder in zip(images, prompt.placeholders, strict=True)
            ),
            pixels=tuple(image.pixels for image in images),
            num_image_tokens=prompt.num_image_tokens,
        )

    async def _load(self, urls: Sequence[tuple[str, ImageUrl]]) -> list[LoadedImage]:
        """All pictures at once; of several errors the first in the order of the messages is told."""
        loads = (self._images.load(image.url, image.detail or "auto") for _, image in urls)
        results = await asyncio.gather(*loads, return_exceptions=True)
        images: list[LoadedImage] = []
        failure: BaseException | None = None
        for (param, image), result in zip(urls, results, strict=True):
            source = "data" if image.url[:5].lower() == "data:" else "http"
            if isinstance(result, LoadedImage):
                images.append(result)
                self._metrics.count_image(source, result.format.lower(), "ok")
                self._metrics.image_bytes.observe(result.num_source_bytes)
                self._metrics.image_pixels.observe(result.original_height * result.original_width)
                self._metrics.image_decode.observe(result.decode_seconds)
                continue
            self._metrics.count_image(source, "unknown", "rejected")
            if isinstance(result, ImageError):
                self._metrics.images_rejected[result.code].inc()
                message = result.message[:1].upper() + result.message[1:] + "."
                result = InvalidImageError(message, param=param, code=result.code)
            failure = failure or result
        if failure is not None:
            raise failure
        return images


def image_urls(messages: Sequence[ChatMessage]) -> list[tuple[str, ImageUrl]]:
    """The pictures of a conversation in order, each with its place in the request."""
    return [
        (f"messages[{i}].content[{j}].image_url.url", part.image_url)
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates know it."""
    plain: dict[str, Any] = {"role": ROLES.get(message.role, message.role)}
    if isinstance(message.content, list):
        plain["content"] = [plain_part(part) for part in message.content]
    else:
        plain["content"] = message.content if message.content is not None else message.refusal or ""
    if message.name is not None:
        plain["name"] = message.name
    calls = [call.function for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(message.function_call)
    if calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return plain


def plain_part(part: Any) -> dict[str, str]:
    if isinstance(part, ImagePart):
        return {"type": "image"}
    return {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}


def num_chars(messages: Sequence[ChatMessage]) -> int:
    """Characters of text and of calls; pictures count as one."""
    num_text = sum(
        len(message.content) if isinstance(message.content, str)
        else sum(len(part.text) if isinstance(part, TextPart) else 1 for part in message.content or ())
        for message in messages
    )  # fmt: skip
    calls = (call.function for message in messages for call in message.tool_calls or ())
    legacy = (message.function_call for message in messages if message.function_call is not None)
    return num_text + sum(len(call.arguments) for call in (*calls, *legacy))
