"""Messages and image sizes to a prompt: token ids, and where each image's tokens stand. Reads no pixels."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.checkpoint import read_model_config
from runtime.processing.chat_template import ChatTemplate
from runtime.processing.tokenizer import Tokenizer
from runtime.processing.tool_prompt import without_tools
from runtime.request import PlaceholderRange


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the engine takes it; `placeholders` are in the order of the images."""

    token_ids: list[int]
    placeholders: list[PlaceholderRange]

    @property
    def num_image_tokens(self) -> int:
        return sum(placeholder.length for placeholder in self.placeholders)


class PromptBuilder:
    """Builds prompts for one checkpoint. Building is a pure read, so that one object may serve many threads."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, *, image_token_id: int, pixels_per_token_side: int
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.image_token_id = image_token_id
        self._pixels_per_token_side = pixels_per_token_side

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "PromptBuilder":
        """Reads a checkpoint's configuration, tokenizer and chat template.

        Raises:
            CheckpointError: one of them is missing or not served.
        """
        config = read_model_config(directory)
        tokenizer = Tokenizer.from_checkpoint(directory)
        image_token = tokenizer.token_text(config.image_token_id)
        return cls(
            ChatTemplate.from_checkpoint(directory, image_token=image_token),
            tokenizer,
            image_token_id=config.image_token_id,
            pixels_per_token_side=config.vision.pixels_per_token_side,
        )

    def num_image_tokens(self, height: int, width: int) -> int:
        """Tokens of an image of this size in pixels, after resizing."""
        side = self._pixels_per_token_side
        rows, columns = height // side, width // side
        assert (rows * side, columns * side) == (height, width), f"{height} x {width} are no multiples of {side}"
        return rows * columns

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        image_sizes: Sequence[tuple[int, int]] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Renders and encodes a conversation.

        A user's text that meets a template's is encoded together with it, as if the rendered prompt were encoded in
        one go, but added tokens are looked for in the template's text only.

        Args:
            messages: as in `ChatTemplate.render`.
            image_sizes: (height, width) in pixels of each image after resizing, in the order of the messages.
            tools: definitions in OpenAI's shape, told to the model in its family's format.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        if self.template.knows_tools:
            messages = [_with_decoded_arguments(message) for message in messages]
        elif tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            messages, tools = without_tools(messages, tools), None
        pieces = self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        num_images = sum(piece.kind == "image" for piece in pieces)
        assert num_images == len(image_sizes), f"{num_images} images in the messages, {len(image_sizes)} sizes"
        writer = _Writer(self.tokenizer)
        placeholders: list[PlaceholderRange] = []
        for piece in pieces:
            if piece.kind == "user":
                writer.write(piece.text)
            elif piece.kind == "template":
                for part in self.tokenizer.split_added(piece.text):
                    if isinstance(part, int):
                        writer.write_ids([part])
                    else:
                        writer.write(part)
            else:
                length = self.num_image_tokens(*image_sizes[len(placeholders)])
                offset = writer.write_ids([self.image_token_id] * length)
                placeholders.append(PlaceholderRange(offset, length))
        token_ids = writer.finish()
        num_image_tokens = sum(placeholder.length for placeholder in placeholders)
        assert token_ids.count(self.image_token_id) == num_image_tokens, "an image token came from text"
        return Prompt(token_ids=token_ids, placeholders=placeholders)


def _with_decoded_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates want the arguments of calls as objects, which on the wire are JSON in a string; what is none stays."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


class _Writer:
    """Collects token ids; adjoining texts are encoded as one, without added tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._ids: list[int] = []

    def write(self, text: str) -> None:
        self._texts.append(text)

    def write_ids(self, ids: list[int]) -> int:
        """Appends ids, and gives the index of the first."""
        self._flush()
        offset = len(self._ids)
        self._ids += ids
        return offset

    def finish(self) -> list[int]:
        self._flush()
        return self._ids

    def _flush(self) -> None:
        if self._texts:
            self._ids += self._tokenizer.encode("".join(self._texts), allow_special=False)
            self._texts.clear()
