"""What a request to /v1/responses may say, and its translation: it is a chat request in other words.

Stateless: `store` is ignored, and what refers to something stored is an error. Knows the wire; no model, no picture.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from server.prompts import PromptField
from server.response_input import Conversation, Input, conversation
from server.response_tools import ResponseTool, ResponseToolChoice, chat_choice, check_tools
from server.schemas import MAX_TOP_LOGPROBS, ChatCompletionRequest, ChatMessage, CompletionFields
from server.tool_schemas import MAX_TOOLS, Description, Name
from server.wire import WireModel, rejected

SCHEMA_FIELDS = ("name", "description", "schema", "strict")

# The one value of `include` that asks for something an answer of ours has; the others ask for nothing here.
LOGPROBS_INCLUDED = "message.output_text.logprobs"


# Kept as long as the answer takes, and told again in three events of a stream: OpenAI's own limits.
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class TextFormat(WireModel):
    """Chat's `response_format`, with the fields of its `json_schema` beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema":
            for required, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    raise rejected(f"The text format 'json_schema' needs a {required}.", at=required)
        return self

    def wire(self) -> dict[str, Any]:
        """As it was sent, for the response that tells it again, but for what says nothing beside its type."""
        is_schema = self.type == "json_schema"
        return self.model_dump(by_alias=True, exclude_none=True) if is_schema else {"type": self.type}

    def response_format(self) -> dict[str, Any]:
        """The same as chat says it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {name: self.wire().get(name) for name in SCHEMA_FIELDS}}


class TextConfig(WireModel):
    format: TextFormat | None = None


class ResponsesRequest(CompletionFields):
    """The body of POST /v1/responses."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] | None = Field(None, max_length=64)
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)

    # Beyond OpenAI's, as in chat completions.
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)

    text: TextConfig | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice = None
    parallel_tool_calls: bool | None = None

    # Known, and honoured only where that is doing nothing.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None

    @model_validator(mode="after")
    def _check_whole(self) -> "ResponsesRequest":
        for stored in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, stored) is not None:
                raise rejected(f"Nothing is stored here, so that '{stored}' is not supported.", at=stored)
        if self.background:
            raise rejected("'background' is not supported: responses are answered at once.", at="background")
        check_tools(self.tools or [], self.tool_choice)
        self._conversation()
        return self

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS_INCLUDED in (self.include or ()) or self.top_logprobs is not None

    @property
    def messages(self) -> list[ChatMessage]:
        own = self._conversation().messages
        # Instructions are OpenAI's system message that comes before all others.
        return [text_message("system", self.instructions), *own] if self.instructions else list(own)

    @property
    def text_format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat.model_validate({"type": "text"})

    @property
    def field(self) -> PromptField:
        return PromptField(
            name="input",
            num_before=1 if self.instructions else 0,
            places=self._conversation().places,
            image_suffix=".image_url",
            format_name="text.format",
        )

    def chat(self) -> ChatCompletionRequest:
        """The same request as a chat completion. Everything in it was checked here."""
        shared = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos", "cache_salt")
        return ChatCompletionRequest.model_validate(
            {
                "model": self.model,
                "messages": self.messages,
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": self.has_logprobs,
                "top_logprobs": self.top_logprobs if self.has_logprobs else None,
                "response_format": self.text_format.response_format(),
                "tools": None if self.tools is None else [tool.chat().model_dump() for tool in self.tools],
                "parallel_tool_calls": self.parallel_tool_calls,
                **{name: getattr(self, name) for name in shared},
            }
        ).model_copy(update={"tool_choice": chat_choice(self.tool_choice)})

    def _conversation(self) -> Conversation:
        if isinstance(self.input, str):
            return Conversation((text_message("user", self.input),), (0,))
        return conversation(self.input)


def text_message(role: str, text: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": text})
