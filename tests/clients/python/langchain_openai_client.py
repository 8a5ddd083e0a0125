"""LangChain's chat model for OpenAI."""

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from task import IMAGE, TASK, TEXT, report

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
