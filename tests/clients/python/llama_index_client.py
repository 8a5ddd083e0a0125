"""LlamaIndex's client for servers like OpenAI's."""

import openai
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from task import TASK, report


def model(**further: object) -> OpenAILike:
    return OpenAILike(
        api_base=TASK["base_url"],
        api_key="none",
        model=TASK["model"],
        temperature=0,
        max_tokens=TASK["max_tokens"],
        max_retries=0,
        is_chat_model=True,
        context_window=4096,
        additional_kwargs=further,
    )


words = [ChatMessage(role="user", content=TASK["question"])]
seen = [ChatMessage(role="user", blocks=[ImageBlock(url=TASK["picture"]), TextBlock(text=TASK["question"])])]
llm = model()
text = llm.chat(words)
image = llm.chat(seen)
*_, last = llm.stream_chat(seen)
report(
    "llama-index",
    text=text.message.content,
    image=image.message.content,
    stream=last.message.content,
    prompt_tokens=image.raw.usage.prompt_tokens,
)
try:
    llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="data:image/png;base64,aGVsbG8="), TextBlock(text="x")])])
except openai.BadRequestError as error:
    report("llama-index", error=error.message)
try:
    list(model(seed=TASK["broken_seed"]).stream_chat(words))
except openai.APIError as error:
    report("llama-index", broken=error.message)
