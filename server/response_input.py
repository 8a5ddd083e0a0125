"""The items of which an input to /v1/responses may consist, and the conversation that they are in chat's words.

Knows the wire; no model, no picture. What the model said and called in one turn are several items here and one message
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.schemas import MAX_MESSAGES, ChatMessage, Content, TextPart, bounded_parts
from server.tool_schemas import MAX_ARGUMENTS_CHARS, MAX_TOOL_CALLS, CalledFunction, ToolCall
from server.wire import WireModel, rejected

CallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionCallItem(WireModel):
    """A call that the model made before; `arguments` is JSON as it wrote it."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str = Field(max_length=MAX_ARGUMENTS_CHARS)

    def call(self) -> ToolCall:
        function = CalledFunction.model_construct(name=self.name, arguments=self.arguments)
        return ToolCall.model_construct(id=self.call_id, type="function", function=function)


class FunctionCallOutputItem(WireModel):
    """What the function gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content

    @model_validator(mode="after")
    def _check_output(self) -> "FunctionCallOutputItem":
        if self.output is None:
            raise rejected("The output of a function must be a string or an array of text parts.", at="output")
        if isinstance(self.output, list):
            for index, part in enumerate(self.output):
                if not isinstance(part, TextPart):
                    raise rejected("The output of a function is text only here.", at=f"output[{index}].type")
        return self

    def message(self) -> ChatMessage:
        return ChatMessage.model_construct(role="tool", content=self.output, tool_call_id=self.call_id)


class ReasoningItem(WireModel):
    """Clients send back what other models answered, their reasoning included; no model here has a use for it."""

    type: Literal["reasoning"]


TAGS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "reasoning": "<reasoning>",
}


def _known_item(item: Any) -> Any:
    """Lets the kinds above through, refuses the others by name."""
    if not isinstance(item, dict):
        raise rejected("An input item must be an object.")
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise rejected("Nothing is stored here: send the item itself instead of a reference.", at="type")
    if not isinstance(kind, str) or kind not in TAGS:
        known = ", ".join(f"'{name}'" for name in TAGS)
        raise rejected(f"Of the input items only {known} are supported.", at="type")
    return item


def _item_tag(item: Any) -> str:
    return TAGS[item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")]


InputItem = Annotated[
    Annotated[ChatMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[FunctionCallOutputItem, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_tag),
    BeforeValidator(_known_item),
]


def _string_or_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rejected("'input' must be a string or an array of items.")
    return bounded_parts(value)


# One message fewer than chat takes: the instructions come before them.
Input = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1), Tag("<list>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<list>"),
    BeforeValidator(_string_or_list),
]


@dataclass(frozen=True)
class Conversation:
    """Messages, and beside each the index of the item that it comes from."""

    messages: tuple[ChatMessage, ...]
    places: tuple[int, ...]


def conversation(items: Sequence[Any]) -> Conversation:
    """
    Raises:
        PydanticCustomError: it has no message, or a turn more calls than a message may have.
    """
    messages: list[ChatMessage] = []
    places: list[int] = []
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            continue
        if isinstance(item, FunctionCallItem) and messages and messages[-1].role == "assistant":
            calls = [*(messages[-1].tool_calls or ()), item.call()]
            if len(calls) > MAX_TOOL_CALLS:
                raise rejected(f"A turn has at most {MAX_TOOL_CALLS} calls.", at=f"input[{index}]")
            messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
            continue
        if isinstance(item, FunctionCallItem):
            item = ChatMessage.model_construct(role="assistant", content=None, tool_calls=[item.call()])
        elif isinstance(item, FunctionCallOutputItem):
            item = item.message()
        messages.append(item)
        places.append(index)
    if not messages:
        raise rejected("'input' has no message.", at="input")
    return Conversation(tuple(messages), tuple(places))
