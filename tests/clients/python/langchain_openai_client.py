"""LangChain's chat model for OpenAI."""

from functools import reduce
from operator import add

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from task import BAD_RESPONSES_IMAGE, IMAGE, TASK, TEXT, TOOL, called, report, reported

OPTIONS = {
    "base_url": TASK["base_url"],
    "api_key": "none",
    "model": TASK["model"],
    "temperature": 0,
    "max_tokens": TASK["max_tokens"],
    "max_retries": 0,
}

model = ChatOpenAI(stream_usage=True, **OPTIONS)
text = model.invoke(TEXT[0]["content"])
image = model.invoke([HumanMessage(content=IMAGE[0]["content"])])
whole = reduce(add, model.stream([HumanMessage(content=IMAGE[0]["content"])]))
report(
    "langchain",
    text=text.content,
    image=image.content,
    stream=whole.content,
    # LangChain adds up what it finds in the chunks: more than one usage would double it.
    prompt_tokens=whole.usage_metadata["input_tokens"],
    finish_reason=whole.response_metadata["finish_reason"],
)
with reported("langchain", "error", openai.BadRequestError):
    model.invoke(TASK["bad_messages"])
with reported("langchain", "broken", openai.APIError):
    list(model.bind(seed=TASK["broken_seed"]).stream(TEXT[0]["content"]))


def call_tools(client: str, model: ChatOpenAI) -> None:
    """One call whole and streamed, and what the model says to its result."""
    longer = model.model_copy(update={"max_tokens": TASK["max_call_tokens"]})
    calling = longer.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    message = calling.invoke(TEXT[0]["content"])
    (call,) = message.tool_calls
    streamed = reduce(add, calling.stream(TEXT[0]["content"]))
    result = ToolMessage("It is red.", tool_call_id=call["id"])
    after = model.bind_tools([TOOL]).invoke([HumanMessage(TEXT[0]["content"]), message, result])
    report(
        client,
        tool=called(call["name"], call["args"]),
        tool_stream=called(streamed.tool_calls[0]["name"], streamed.tool_calls[0]["args"]),
        after_tool=after.text,
    )


call_tools("langchain", model)

responses = ChatOpenAI(use_responses_api=True, **OPTIONS)
text = responses.invoke(TEXT[0]["content"])
image = responses.invoke([HumanMessage(content=IMAGE[0]["content"])])
whole = reduce(add, responses.stream([HumanMessage(content=IMAGE[0]["content"])]))
report(
    "langchain responses",
    text=text.text,
    image=image.text,
    stream=whole.text,
    prompt_tokens=whole.usage_metadata["input_tokens"],
)
with reported("langchain responses", "error", openai.BadRequestError):
    responses.invoke(BAD_RESPONSES_IMAGE)
with reported("langchain responses", "broken", openai.APIError):
    list(responses.bind(extra_body={"seed": TASK["broken_seed"]}).stream(TEXT[0]["content"]))
call_tools("langchain responses", responses)
