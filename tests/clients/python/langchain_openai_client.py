"""LangChain's chat model for OpenAI."""

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from task import BAD_RESPONSES_IMAGE, IMAGE, TASK, TEXT, TOOL, called, report

model = ChatOpenAI(
    base_url=TASK["base_url"],
    api_key="none",
    model=TASK["model"],
    temperature=0,
    max_tokens=TASK["max_tokens"],
    max_retries=0,
    stream_usage=True,
)
text = model.invoke(TEXT[0]["content"])
image = model.invoke([HumanMessage(content=IMAGE[0]["content"])])
whole = None
for chunk in model.stream([HumanMessage(content=IMAGE[0]["content"])]):
    whole = chunk if whole is None else whole + chunk
assert whole is not None
report(
    "langchain",
    text=text.content,
    image=image.content,
    stream=whole.content,
    # LangChain adds up what it finds in the chunks: more than one usage would double it.
    prompt_tokens=whole.usage_metadata["input_tokens"],
    finish_reason=whole.response_metadata["finish_reason"],
)
try:
    model.invoke(TASK["bad_messages"])
except openai.BadRequestError as error:
    report("langchain", error=error.message)
try:
    list(model.bind(seed=TASK["broken_seed"]).stream(TEXT[0]["content"]))
except openai.APIError as error:
    report("langchain", broken=error.message)


def call_tools(client: str, model: ChatOpenAI) -> None:
    """One call whole and streamed, and what the model says to its result."""
    longer = model.model_copy(update={"max_tokens": TASK["max_call_tokens"]})
    calling = longer.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    message = calling.invoke(TEXT[0]["content"])
    (call,) = message.tool_calls
    streamed = None
    for chunk in calling.stream(TEXT[0]["content"]):
        streamed = chunk if streamed is None else streamed + chunk
    result = ToolMessage("It is red.", tool_call_id=call["id"])
    after = model.bind_tools([TOOL]).invoke([HumanMessage(TEXT[0]["content"]), message, result])
    report(
        client,
        tool=called(call["name"], call["args"]),
        tool_stream=called(streamed.tool_calls[0]["name"], streamed.tool_calls[0]["args"]),
        after_tool=after.text,
    )


call_tools("langchain", model)

responses = ChatOpenAI(
    base_url=TASK["base_url"],
    api_key="none",
    model=TASK["model"],
    temperature=0,
    max_tokens=TASK["max_tokens"],
    max_retries=0,
    use_responses_api=True,
)
text = responses.invoke(TEXT[0]["content"])
image = responses.invoke([HumanMessage(content=IMAGE[0]["content"])])
whole = None
for chunk in responses.stream([HumanMessage(content=IMAGE[0]["content"])]):
    whole = chunk if whole is None else whole + chunk
report(
    "langchain responses",
    text=text.text,
    image=image.text,
    stream=whole.text,
    prompt_tokens=whole.usage_metadata["input_tokens"],
)
try:
    responses.invoke(BAD_RESPONSES_IMAGE)
except openai.BadRequestError as error:
    report("langchain responses", error=error.message)
try:
    list(responses.bind(extra_body={"seed": TASK["broken_seed"]}).stream(TEXT[0]["content"]))
except openai.APIError as error:
    report("langchain responses", broken=error.message)
call_tools("langchain responses", responses)
