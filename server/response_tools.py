"""What a request to /v1/responses may say of tools, and the same in chat's words. Knows the wire, no grammar.

The responses API writes a function flat, beside its `type`; chat nests it.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.tool_schemas import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    Function,
    FunctionName,
    FunctionTool,
    NamedTool,
    ToolChoice,
    choice_tag,
    function_tool,
)
from server.wire import WireModel, rejected


class ResponseFunctionTool(Function):
    type: Literal["function"]

    def wire(self) -> dict[str, Any]:
        """As a response tells it again: with what it was without a word, too."""
        described = {} if self.description is None else {"description": self.description}
        return {
            "type": self.type,
            "name": self.name,
            **described,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def chat(self) -> FunctionTool:
        function = Function.model_construct(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return FunctionTool.model_construct(type="function", function=function)


class NamedFunction(WireModel):
    type: Literal["function"]
    name: str

    def chat(self) -> NamedTool:
        return NamedTool.model_construct(type="function", function=FunctionName.model_construct(name=self.name))


class AllowedFunctions(WireModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)

    def chat(self) -> AllowedToolsChoice:
        allowed = AllowedTools.model_construct(mode=self.mode, tools=[tool.chat() for tool in self.tools])
        return AllowedToolsChoice.model_construct(type="allowed_tools", allowed_tools=allowed)


ResponseTool = Annotated[ResponseFunctionTool, BeforeValidator(function_tool)]
ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")]
    | Annotated[None, Tag("<null>")],
    Discriminator(choice_tag),
]


def check_tools(tools: list[ResponseFunctionTool], choice: "ResponseToolChoice") -> None:
    """
    Raises:
        PydanticCustomError: two tools share a name, or the choice names or requires one that is not there.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise rejected("Two functions have the same name.", at=f"tools[{index}].name")
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise rejected("'tool_choice' names a function that is not there.", at="tool_choice.name")
    if isinstance(choice, AllowedFunctions) and not {tool.name for tool in choice.tools}.issubset(names):
        raise rejected("'tool_choice' names a function that is not there.", at="tool_choice.tools")
    if choice == "required" and not tools:
        raise rejected("'tool_choice' asks for a call, but there are no 'tools'.", at="tool_choice")


def chat_choice(choice: "ResponseToolChoice") -> "ToolChoice":
    """The same as chat says it."""
    return choice.chat() if isinstance(choice, NamedFunction | AllowedFunctions) else choice


def choice_wire(choice: "ResponseToolChoice") -> Any:
    """As a response tells it again."""
    return choice.model_dump() if isinstance(choice, NamedFunction | AllowedFunctions) else choice or "auto"
