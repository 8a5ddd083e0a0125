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
from server.byte_budget import Hold
from server.errors import InvalidImageError, InvalidRequestError, context_length
from server.image_fetch import image_fetch
from server.images import ImageError, ImageLoader, LoadedImage, PictureBudget
from server.metrics import Metrics
from server.schemas import ChatMessage, ImagePart, ImageUrl, TextPart
from server.settings import Settings

logger = logging.getLogger(__name__)

# Templates of this family know neither: OpenAI's newer word for `system`, and its older one for `tool`.
ROLES = {"developer": "system", "function": "tool"}

# Rendering and encoding of shorter conversations takes less than a hop to a thread and back would delay others.
MAX_INLINE_CHARS = 8192
# Normalisation (NFC) makes one character of a few at most: Unicode's own bound is three, see its annex 15.
MAX_COMPOSED_CHARS = 4


@dataclass(frozen=True, kw_only=True)
class PromptField:
    """Where in a request its messages stand, so that an error can name the place.

    `num_before`: messages that were put in front of the field's own. `places`: index in the field of each of its own
    messages, where that is not their number. `image_suffix`: from a part to its URL. `format_name`: the field that says
    in which format to answer.
    """

    name: str
    num_before: int = 0
    places: tuple[int, ...] = ()
    image_suffix: str = ".image_url.url"
    format_name: str = "response_format"

    def image(self, message: int, part: int) -> str:
        index = message - self.num_before
        place = self.places[index] if self.places else index
        return f"{self.name}[{place}].content[{part}]{self.image_suffix}"


MESSAGES = PromptField(name="messages")


@dataclass(frozen=True, kw_only=True)
class PreparedPrompt:
    """A prompt, and its pictures with `pixels` [height, width, 3] beside them in the same order."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]
    pixels: tuple[NDArray[np.uint8], ...]
    num_image_tokens: int


class PromptPreparer:
    """One for each application; `load` makes it, `close` ends its image workers."""

    def __init__(
        self, builder: PromptBuilder, images: ImageLoader, settings: Settings, metrics: Metrics, *, max_model_len: int
    ) -> None:
        self._builder = builder
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * builder.tokenizer.max_token_chars * MAX_COMPOSED_CHARS
        self._images = images
        self._max_images = settings.max_images_per_prompt
        self._max_images_per_turn = settings.max_images_per_turn
        self._max_request_pixels = settings.max_request_pixels
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
            fetch=image_fetch(settings, metrics),
        )
        # The workers load their modules while the tokenizer is read.
        await images.start()
        try:
            builder = await asyncio.to_thread(PromptBuilder.from_checkpoint, directory)
        except BaseException:
            await images.close()
            raise
        return cls(builder, images, settings, metrics, max_model_len=resolved.max_model_len)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._builder.tokenizer

    async def close(self) -> None:
        await self._images.close()

    async def prepare(
        self,
        messages: Sequence[ChatMessage],
        field: PromptField = MESSAGES,
        *,
        hold: Hold,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PreparedPrompt:
        """
        Args:
            hold: counts the pictures' pixels as they come, for as long as those of slow hosts are waited for.
            tools: definitions in OpenAI's shape, told to the model.

        Raises:
            InvalidRequestError: too many pictures, or the template refuses the messages.
            InvalidImageError: a picture cannot be used; names its place.
            ServerBusyError: the pictures are too many beside those of other requests.
        """
        self._check_length(num_chars(messages), field.name)
        urls = image_urls(messages, field)
        self._check_num_images(messages, len(urls), field)
        images = await self._load(urls, field, hold)
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
                "The model's chat template does not take these messages.", param=field.name
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

    async def prepare_text(self, prompt: str | list[int]) -> PreparedPrompt:
        """A prompt that is text, in which special tokens are letters like any others, or tokens.

        Raises:
            InvalidRequestError: it is empty, or a token is none of the vocabulary, or stands for a picture.
        """
        if isinstance(prompt, str):
            token_ids = await self.encode(prompt)
        else:
            token_ids = prompt
            self.check_tokens(token_ids, "prompt")
            if self._builder.image_token_id in token_ids:
                raise InvalidRequestError(
                    "'prompt' holds a picture's token; pictures come with /v1/chat/completions.", param="prompt"
                )
        if not token_ids:
            raise InvalidRequestError("'prompt' is empty; it must have at least one token.", param="prompt")
        return PreparedPrompt(token_ids=token_ids, images=(), pixels=(), num_image_tokens=0)

    async def encode(self, text: str) -> list[int]:
        """Tokens of plain text; long ones are made beside the event loop.

        Raises:
            ContextLengthError: it is surely too long for the model.
        """
        self._check_length(len(text), "prompt")
        if len(text) <= MAX_INLINE_CHARS:
            return self.tokenizer.encode(text, allow_special=False)
        return await asyncio.to_thread(self.tokenizer.encode, text, allow_special=False)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """
        Raises:
            InvalidRequestError: one is none of the vocabulary.
        """
        vocab_size = self.tokenizer.vocab_size
        if max(token_ids, default=0) >= vocab_size:
            message = f"'{param}' names a token outside of the vocabulary of {vocab_size}."
            raise InvalidRequestError(message, param=param)

    def _check_length(self, num_chars: int, param: str) -> None:
        """Spares the tokenizer, which takes a second for some megabytes, what cannot fit in any case.

        Raises:
            ContextLengthError: there are more characters than the longest prompt can have.
        """
        if num_chars > self._max_chars:
            raise context_length(self._max_model_len, None, None, param=param)

    def _check_num_images(self, messages: Sequence[ChatMessage], num_images: int, field: PromptField) -> None:
        in_turn = max(
            sum(isinstance(part, ImagePart) for part in message.content) if isinstance(message.content, list) else 0
            for message in messages
        )
        if num_images > self._max_images:
            message = f"The request has {num_images} images; at most {self._max_images} are accepted"
            knob = "limit_mm_per_prompt"
        elif self._max_images_per_turn is not None and in_turn > self._max_images_per_turn:
            message = f"A message has {in_turn} images; at most {self._max_images_per_turn} are accepted"
            knob = "max_images_per_turn"
        else:
            return
        error = InvalidRequestError(f"{message} ({knob}).", param=field.name, code="too_many_images")
        error.reason = "too_many_images"
        raise error

    async def _load(self, urls: Sequence[tuple[str, ImageUrl]], field: PromptField, hold: Hold) -> list[LoadedImage]:
        """All pictures at once; of several that cannot be used the first in the order of the messages is told."""
        budget = PictureBudget(self._max_request_pixels, hold)

        async def load(image: ImageUrl) -> LoadedImage | ImageError:
            try:
                return await self._images.load(image.url, image.detail or "auto", budget)
            except ImageError as error:
                return error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load(image)) for _, image in urls]
        except ExceptionGroup as failures:
            # No fault of a picture: nobody waits for the others.
            raise failures.exceptions[0] from None
        images: list[LoadedImage] = []
        failure: InvalidImageError | None = None
        for (param, image), task in zip(urls, tasks, strict=True):
            result = task.result()
            source = "data" if image.url[:5].lower() == "data:" else "http"
            if isinstance(result, ImageError):
                self._metrics.count_image(source, "unknown", "rejected")
                self._metrics.images_rejected[result.code].inc()
                message = result.message[:1].upper() + result.message[1:] + "."
                failure = failure or InvalidImageError(message, param=param, code=result.code)
                continue
            images.append(result)
            self._metrics.count_image(source, result.format.lower(), "ok")
            self._metrics.image_bytes.observe(result.num_source_bytes)
            self._metrics.image_pixels.observe(result.original_height * result.original_width)
            self._metrics.image_decode.observe(result.decode_seconds)
        if failure is not None:
            raise failure
        if budget.is_exceeded:
            raise InvalidImageError(
                f"The images have {budget.num_pixels} pixels together; at most {self._max_request_pixels} are accepted "
                "(max_request_pixels).",
                param=field.name,
                code="image_too_large",
            )
        return images


def image_urls(messages: Sequence[ChatMessage], field: PromptField = MESSAGES) -> list[tuple[str, ImageUrl]]:
    """The pictures of a conversation in order, each with its place in the request."""
    return [
        (field.image(i, j), part.image_url)
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
