"""What a request may say of tools and of the form of its answer: types and limits. Knows the wire, no grammar.

Sources: OpenAI's published specification; `functions` and `function_call` are its older words for the same.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.wire import WireModel, rejected

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_DESCRIPTION_CHARS = 16384
MAX_ARGUMENTS_CHARS = 1 << 20

Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(WireModel):
    """A function that may be called. `parameters` is a JSON schema; without it there are none."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> "Function":
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise rejected("The parameters of a function must be a schema of the type 'object'.", at="parameters.type")
        return self


def function_tool(tool: Any) -> Any:
    """Refuses the other kinds of tools by name."""
    if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function":
        raise rejected("Of the types of tools only 'function' is supported.", at="type")
    return tool


class FunctionTool(WireModel):
    type: Literal["function"]
    function: Function


Tool = Annotated[FunctionTool, BeforeValidator(function_tool)]


class FunctionName(WireModel):
    name: str


class NamedTool(WireModel):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_tag(value: Any) -> str:
    """Which kind of choice it is, for a discriminator."""
    if value is None:
        return "<null>"
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<named>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(choice_tag),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("<word>")]
    | Annotated[FunctionName, Tag("<named>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(choice_tag),
]


class CalledFunction(WireModel):
    """`arguments` is JSON as the model wrote it, and so perhaps none."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str = Field(max_length=MAX_ARGUMENTS_CHARS)


class ToolCall(WireModel):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class JsonSchemaFormat(WireModel):
    name: Name
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            at = "json_schema" if self.json_schema is None else "json_schema.schema"
            raise rejected("The response format 'json_schema' needs a schema.", at=at)
        return self
