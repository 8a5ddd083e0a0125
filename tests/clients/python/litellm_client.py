"""LiteLLM, as a library, with both of its ways to a server of this kind."""

import litellm
from task import (
    BAD_RESPONSES_IMAGE,
    FLAT_TOOL,
    IMAGE,
    RESPONSES_IMAGE,
    TASK,
    TEXT,
    TOOL,
    called,
    report,
    reported,
)

litellm.suppress_debug_info = True

SHARED = {"api_base": TASK["base_url"], "api_key": "none", "temperature": 0, "num_retries": 0, "max_retries": 0}

for provider in ("openai", "hosted_vllm"):
    options = {"model": f"{provider}/{TASK['model']}", "max_tokens": TASK["max_tokens"], **SHARED}
    name = f"litellm {provider}"
    text = litellm.completion(messages=TEXT, **options)
    image = litellm.completion(messages=IMAGE, **options)
    chunks = list(litellm.completion(messages=IMAGE, stream=True, stream_options={"include_usage": True}, **options))
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    report(
        name,
        text=text.choices[0].message.content,
        image=image.choices[0].message.content,
        stream="".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
        prompt_tokens=usages[-1].prompt_tokens,
        finish_reason=text.choices[0].finish_reason,
    )
    with reported(name, "error", litellm.BadRequestError):
        litellm.completion(messages=TASK["bad_messages"], **options)
    with reported(name, "context_error", litellm.ContextWindowExceededError):
        litellm.completion(messages=TEXT, **{**options, "max_tokens": 100_000})
    with reported(name, "broken", Exception):  # each provider has a class of its own
        list(litellm.completion(messages=TEXT, stream=True, seed=TASK["broken_seed"], **options))
    calling = {
        **options,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": TASK["max_call_tokens"],
    }
    if provider == "hosted_vllm":
        # For this provider it takes away `additionalProperties`, without which a model may add to the arguments.
        calling["extra_body"] = {"tools": [TOOL]}
    message = litellm.completion(messages=TEXT, **calling).choices[0].message
    (call,) = message.tool_calls
    chunks = list(litellm.completion(messages=TEXT, stream=True, **calling))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is red."}
    after = litellm.completion(messages=[*TEXT, message.model_dump(exclude_none=True), result], **options)
    report(
        name,
        tool=called(call.function.name, call.function.arguments),
        tool_stream=called(streamed.function.name, streamed.function.arguments),
        after_tool=after.choices[0].message.content,
    )

options = {"model": f"openai/{TASK['model']}", "max_output_tokens": TASK["max_tokens"], **SHARED}


def text_of(response: object) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


def final_of(events: list[object]) -> object:
    return next(event.response for event in events if event.type in ("response.completed", "response.incomplete"))


text = litellm.responses(input=TASK["question"], **options)
image = litellm.responses(input=RESPONSES_IMAGE, **options)
events = list(litellm.responses(input=RESPONSES_IMAGE, stream=True, **options))
report(
    "litellm responses",
    text=text_of(text),
    image=text_of(image),
    stream="".join(event.delta for event in events if event.type == "response.output_text.delta"),
    prompt_tokens=image.usage.input_tokens,
)
with reported("litellm responses", "error", litellm.BadRequestError):
    litellm.responses(input=BAD_RESPONSES_IMAGE, **options)
with reported("litellm responses", "broken", Exception):
    broken = {"seed": TASK["broken_seed"]}
    events = list(litellm.responses(input=TASK["question"], stream=True, extra_body=broken, **options))
    report("litellm responses", broken=" ".join(str(event) for event in events if event.type == "error"))
calling = {
    **options,
    "tools": [FLAT_TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": TASK["max_call_tokens"],
}
(call,) = litellm.responses(input=TASK["question"], **calling).output
(streamed,) = final_of(list(litellm.responses(input=TASK["question"], stream=True, **calling))).output
asked = {"role": "user", "content": TASK["question"]}
made = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is red."}
after = litellm.responses(input=[asked, made, result], tools=[FLAT_TOOL], **options)
report(
    "litellm responses",
    tool=called(call.name, call.arguments),
    tool_stream=called(streamed.name, streamed.arguments),
    after_tool=text_of(after),
)
