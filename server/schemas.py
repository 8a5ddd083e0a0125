"""What a chat request may say: types, ranges, aliases. Knows the wire; no model, no picture is looked at here.

Any optional field may be null, and unknown fields are ignored. A known field that would change the answer and that this
server cannot honour is an error that names it. Sources: OpenAI's published specification, and what clients really send.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.tool_schemas import (
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    CalledFunction,
    Function,
    FunctionChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from server.wire import WireModel, rejected

MAX_CHOICES = 8
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
# Of a whole request: validating one takes some microseconds, in which nobody else is served.
MAX_PARTS_AND_CALLS = 8192
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TOP_LOGPROBS = 20

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Detail = Literal["auto", "low", "high", "original"]


class TextPart(WireModel):
    type: Literal["text"] = "text"
    text: str


class ImageUrl(WireModel):
    url: str
    detail: Detail | None = None


class ImagePart(WireModel):
    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


class RefusalPart(WireModel):
    type: Literal["refusal"] = "refusal"
    refusal: str


def _plain_part(part: Any) -> Any:
    """Brings the aliases of a part to the one form; refuses the kinds that are no text and no picture."""
    if not isinstance(part, dict):
        raise rejected("A content part must be an object.")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {**part, "type": "text"}
    if kind in ("image_url", "input_image"):
        image = part.get("image_url")
        if isinstance(image, str):
            image = {"url": image, "detail": part.get("detail")}
        if image is None and kind == "input_image":
            raise rejected("This server takes pictures as 'image_url'; uploaded files are not supported.", at="file_id")
        return {"type": "image_url"} if image is None else {"type": "image_url", "image_url": image}
    if kind == "refusal":
        return part
    if not isinstance(kind, str):
        raise rejected("A content part must have a 'type'.", at="type")
    name = kind if kind in KNOWN_UNSUPPORTED_PARTS else "of this type"
    raise rejected(f"Content parts {name} are not supported; supported are 'text' and 'image_url'.", at="type")


KNOWN_UNSUPPORTED_PARTS = frozenset(
    {"input_audio", "audio", "audio_url", "file", "input_file", "video", "video_url", "image_embeds", "image"}
)

ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(lambda part: {"text": "<text>", "refusal": "<refusal>"}.get(_type_of(part), "<image>")),
    BeforeValidator(_plain_part),
]


def _type_of(part: Any) -> str:
    return str(part["type"] if isinstance(part, dict) else part.type)


def _string_list_or_null(value: Any) -> Any:
    if value is not None and not isinstance(value, str | list):
        raise rejected("This must be a string or an array.")
    return value


def _string_or_list_tag(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<null>" if value is None else "<list>"


Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS), Tag("<list>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(_string_or_list_tag),
    BeforeValidator(_string_list_or_null),
]


class ChatMessage(WireModel):
    role: Role
    content: Content = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = Field(None, max_length=256)
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        for calls in ("tool_calls", "function_call"):
            if getattr(self, calls) and self.role != "assistant":
                raise rejected("Only the assistant calls tools.", at=calls)
        if self.role == "tool" and self.tool_call_id is None:
            raise rejected("A message of the role 'tool' must have a 'tool_call_id'.", at="tool_call_id")
        if self.role == "function" and self.name is None:
            raise rejected("A message of the role 'function' must have a 'name'.", at="name")
        says_something = self.refusal is not None or self.tool_calls or self.function_call
        if self.content is None and not (self.role == "assistant" and says_something):
            raise rejected(f"A message of the role '{self.role}' must have content.", at="content")
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if isinstance(part, ImagePart) and self.role != "user":
                    raise rejected(
                        f"Pictures belong into messages of the role 'user', not '{self.role}'.", at=f"content[{index}]"
                    )
                if isinstance(part, RefusalPart) and self.role != "assistant":
                    raise rejected("Only the assistant refuses.", at=f"content[{index}]")
        return self


def bounded_parts(messages: Any) -> Any:
    """Counts the parts and calls of a conversation before they are looked at.

    Raises:
        PydanticCustomError: there are more than a request may have.
    """
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        lists = (
            message[name]
            for message in messages
            if isinstance(message, dict)
            for name in ("content", "tool_calls", "output")
            if isinstance(message.get(name), list)
        )
        num_parts = sum(map(len, lists))
        if num_parts > MAX_PARTS_AND_CALLS:
            raise rejected(
                f"The messages have {num_parts} content parts and tool calls together; at most {MAX_PARTS_AND_CALLS} "
                "are accepted."
            )
    return messages


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(bounded_parts)]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("<list>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(_string_or_list_tag),
    BeforeValidator(_string_list_or_null),
]
Bias = Annotated[float, Field(ge=-100, le=100)]


class CompletionFields(WireModel):
    """What every request that is answered by the model has."""

    model: str
    stream: bool | None = None

    @property
    def num_choices(self) -> int:
        """Sequences to generate for it."""
        return 1


class SamplingFields(CompletionFields):
    """What a completion's request may say of sampling, whatever its prompt is."""

    # Sampling, as OpenAI names it.
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_LOGIT_BIAS_ENTRIES)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)

    # Sampling beyond OpenAI's, as other servers name it.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, max_length=64)
    cache_salt: str | None = Field(None, max_length=256)

    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_sampling(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise rejected("'stream_options' needs 'stream' to be true.", at="stream_options")
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise rejected("The keys of 'logit_bias' must be token ids.", at="logit_bias")
        return self

    @property
    def default_max_tokens(self) -> int | None:
        """Length of an answer when the request names none; None: as long as the context allows."""
        return None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def num_choices(self) -> int:
        return self.choices_per_prompt

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each one; None: no log-probabilities at all."""
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def requested_max_tokens(self) -> int | None:
        """`max_completion_tokens` wins over the older `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class ChatCompletionRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    # The form of the answer, and tools; `functions` and `function_call` are their older names.
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = Field(None, max_length=MAX_TOOLS)
    function_call: FunctionChoice = None

    # Known, and honoured only where that is doing nothing.
    modalities: list[str] | None = None
    audio: Any = None

    @model_validator(mode="after")
    def _check_whole(self) -> "ChatCompletionRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise rejected("'top_logprobs' needs 'logprobs' to be true.", at="top_logprobs")
        if self.modalities is not None and any(modality != "text" for modality in self.modalities):
            raise rejected("Answers are text only.", at="modalities")
        if self.audio is not None:
            raise rejected("Answers are text only.", at="audio")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
