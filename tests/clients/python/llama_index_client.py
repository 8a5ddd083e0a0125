"""LlamaIndex's clients for servers like OpenAI's, in the words of chat completions and of responses."""

from collections.abc import Iterable
from typing import Any, Literal

import openai
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from task import FUNCTION, TASK, called, report, reported

SHARED = {
    "api_base": TASK["base_url"],
    "api_key": "none",
    "model": TASK["model"],
    "temperature": 0,
    "max_retries": 0,
    "context_window": 4096,
    "is_function_calling_model": True,
}
QUESTION = [ChatMessage(role="user", content=TASK["question"])]
SEEN = [ChatMessage(role="user", blocks=[ImageBlock(url=TASK["picture"]), TextBlock(text=TASK["question"])])]
BAD_URL = TASK["bad_messages"][0]["content"][0]["image_url"]["url"]
BAD = [ChatMessage(role="user", blocks=[ImageBlock(url=BAD_URL), TextBlock(text="x")])]


def chat(max_tokens: int = TASK["max_tokens"], **further: Any) -> OpenAILike:
    return OpenAILike(max_tokens=max_tokens, is_chat_model=True, additional_kwargs=further, **SHARED)


def responses(max_tokens: int = TASK["max_tokens"], **further: Any) -> OpenAILikeResponses:
    extra = {"extra_body": further} if further else {}
    return OpenAILikeResponses(max_output_tokens=max_tokens, additional_kwargs=extra, **SHARED)


def paint(colour: Literal["red", "green"]) -> str:
    """Paints it."""
    return f"It is {colour}."


def first_call(llm: Any, answers: Iterable[Any]) -> list[Any]:
    """Of an answer, or of the pieces of one: each has what was called by then, or only what was called just now."""
    calls = (call for piece in list(answers)[::-1] for call in calls_of(llm, piece))
    call = next(calls)
    return called(call.tool_name, call.tool_kwargs)


def calls_of(llm: Any, answer: Any) -> list[Any]:
    return llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)


for name, model in (("llama-index", chat), ("llama-index responses", responses)):
    llm = model()
    text = llm.chat(QUESTION)
    image = llm.chat(SEEN)
    parts = [piece.delta or "" for piece in llm.stream_chat(SEEN)]
    usage = image.raw.usage
    report(
        name,
        text=text.message.content,
        image=image.message.content,
        stream="".join(parts),
        prompt_tokens=usage.prompt_tokens if model is chat else usage.input_tokens,
    )
    with reported(name, "error", openai.BadRequestError):
        llm.chat(BAD)
    with reported(name, "broken", openai.APIError):
        list(model(seed=TASK["broken_seed"]).stream_chat(QUESTION))
    caller = model(TASK["max_call_tokens"])
    tools = [FunctionTool.from_defaults(fn=paint, name=FUNCTION["name"])]
    asked = {"user_msg": TASK["question"], "tool_required": True}
    answer = caller.chat_with_tools(tools, **asked)
    pieces = caller.stream_chat_with_tools(tools, **asked)
    call = caller.get_tool_calls_from_response(answer)[0]
    result = ChatMessage(role="tool", content="It is red.", additional_kwargs={"tool_call_id": call.tool_id})
    if model is responses:
        result.additional_kwargs = {"call_id": call.tool_id}
    after = llm.chat([*QUESTION, answer.message, result])
    report(
        name,
        tool=first_call(caller, [answer]),
        tool_stream=first_call(caller, pieces),
        after_tool=after.message.content,
    )
