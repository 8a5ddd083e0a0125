"""Text to tokens and back over HTTP: /tokenize and /detokenize on the wire. Knows JSON; the tokens are the model's."""

import asyncio
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from server.byte_budget import Hold
from server.chat import ModelSide
from server.schemas import Messages
from server.wire import WireModel, rejected

MAX_TOKENS = 1 << 20


class TokenizeRequest(WireModel):
    """The body of POST /tokenize: a text, or messages, whose pictures count with the tokens that they will take."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise rejected("Give either 'prompt' or 'messages'.", at="prompt")
        return self


class DetokenizeRequest(WireModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(max_length=MAX_TOKENS)


async def tokenize(side: ModelSide, max_model_len: int, request: TokenizeRequest, hold: Hold) -> bytes:
    """The answer's JSON: the tokens, how many they are, and how many of them stand for pictures. `hold` counts the
    pictures.

    Raises:
        InvalidRequestError: a picture cannot be used, or the template refuses the messages.
        ServerBusyError: the pictures are too many beside those of other requests.
    """
    if request.messages is not None:
        prompt = await side.prompts.prepare(request.messages, hold=hold)
        tokens, num_image_tokens = prompt.token_ids, prompt.num_image_tokens
    else:
        tokens, num_image_tokens = await side.prompts.encode(request.prompt or ""), 0
    answer = {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "image_tokens": num_image_tokens,
        "token_strs": None,
    }
    if request.return_token_strs:
        answer["token_strs"] = [side.prompts.tokenizer.token_text(token) for token in tokens]
    return msgspec.json.encode(answer)


async def detokenize(side: ModelSide, request: DetokenizeRequest) -> bytes:
    """The answer's JSON: the text, special tokens included. A million tokens take a second, beside the event loop.

    Raises:
        InvalidRequestError: a token is none of the vocabulary.
    """
    tokenizer = side.prompts.tokenizer
    side.prompts.check_tokens(request.tokens, "tokens")

    def answer() -> bytes:
        text = b"".join(map(tokenizer.token_bytes, request.tokens)).decode(errors="replace")
        return msgspec.json.encode({"prompt": text})

    return await asyncio.to_thread(answer)
