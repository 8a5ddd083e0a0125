"""The official Python client: plain, with its stream helper, asynchronous, and its responses."""

import asyncio

import openai
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

OPTIONS = {"model": TASK["model"], "temperature": 0, "max_tokens": TASK["max_tokens"]}
USAGE = {"include_usage": True}
CALLING = {"tool_choice": "required", "parallel_tool_calls": False}
CALL_OPTIONS = {**OPTIONS, **CALLING, "max_tokens": TASK["max_call_tokens"], "tools": [TOOL]}
RESPONSES = {"model": TASK["model"], "temperature": 0, "max_output_tokens": TASK["max_tokens"]}
RESPONSES_CALL = {**RESPONSES, **CALLING, "max_output_tokens": TASK["max_call_tokens"], "tools": [FLAT_TOOL]}


def plain(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(messages=TEXT, **OPTIONS)
    image = client.chat.completions.create(messages=IMAGE, **OPTIONS)
    chunks = list(client.chat.completions.create(messages=IMAGE, stream=True, stream_options=USAGE, **OPTIONS))
    report(
        "openai",
        text=text.choices[0].message.content,
        image=image.choices[0].message.content,
        stream="".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
        prompt_tokens=chunks[-1].usage.prompt_tokens,
        finish_reason=text.choices[0].finish_reason,
    )
    try:
        client.chat.completions.create(messages=TASK["bad_messages"], **OPTIONS)
    except openai.BadRequestError as error:
        report("openai", error=error.message, param=error.param, code=error.code, request_id=bool(error.request_id))
    with reported("openai", "broken", openai.APIError):
        list(client.chat.completions.create(messages=TEXT, stream=True, seed=TASK["broken_seed"], **OPTIONS))
    report("openai", models=[model.id for model in client.models.list()])
    message = client.chat.completions.create(messages=TEXT, **CALL_OPTIONS).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is red."}
    after = client.chat.completions.create(messages=[*TEXT, message, result], tools=[TOOL], **OPTIONS)
    name, arguments = None, ""
    for chunk in client.chat.completions.create(messages=TEXT, stream=True, **CALL_OPTIONS):
        for delta in chunk.choices[0].delta.tool_calls or ():
            name, arguments = delta.function.name or name, arguments + (delta.function.arguments or "")
    report(
        "openai",
        tool=called(call.function.name, call.function.arguments),
        tool_stream=called(name, arguments),
        after_tool=after.choices[0].message.content,
    )


def helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=IMAGE, stream_options=USAGE, **OPTIONS) as stream:
        kinds = [event.type for event in stream]
        # Not `get_final_completion`, which raises where the answer ended for want of tokens.
        final = stream.current_completion_snapshot
    report(
        "openai .stream()",
        stream=final.choices[0].message.content,
        prompt_tokens=final.usage.prompt_tokens,
        role=final.choices[0].message.role,
        has_content_events="content.delta" in kinds and "content.done" in kinds,
    )
    with client.chat.completions.stream(messages=TEXT, n=3, stream_options=USAGE, **OPTIONS) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    report("openai .stream()", choices=[choice.message.content for choice in final.choices])
    with client.chat.completions.stream(messages=TEXT, **CALL_OPTIONS) as stream:
        stream.until_done()
        (call,) = stream.current_completion_snapshot.choices[0].message.tool_calls
    report("openai .stream()", tool_stream=called(call.function.name, call.function.arguments))
    broken = client.chat.completions.stream(messages=TEXT, seed=TASK["broken_seed"], **OPTIONS)
    with reported("openai .stream()", "broken", openai.APIError), broken as stream:
        stream.until_done()


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=TASK["base_url"], api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(messages=messages, **OPTIONS) for messages in (TEXT, IMAGE))
        )
        text, image = (answer.choices[0].message.content for answer in answers)
        stream = await client.chat.completions.create(messages=IMAGE, stream=True, **OPTIONS)
        parts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        report("openai async", text=text, image=image, stream="".join(parts))
        # A stream that is left early must leave nothing behind.
        async for _ in await client.chat.completions.create(messages=IMAGE, stream=True, **OPTIONS):
            break
        with reported("openai async", "error", openai.BadRequestError):
            await client.chat.completions.create(messages=TASK["bad_messages"], **OPTIONS)
        with reported("openai async", "broken", openai.APIError):
            async for _ in await client.chat.completions.create(
                messages=TEXT, stream=True, seed=TASK["broken_seed"], **OPTIONS
            ):
                pass
        (call,) = (await client.chat.completions.create(messages=TEXT, **CALL_OPTIONS)).choices[0].message.tool_calls
        async with client.chat.completions.stream(messages=TEXT, **CALL_OPTIONS) as helper:
            await helper.until_done()
            (streamed,) = helper.current_completion_snapshot.choices[0].message.tool_calls
        report(
            "openai async",
            tool=called(call.function.name, call.function.arguments),
            tool_stream=called(streamed.function.name, streamed.function.arguments),
        )
        response = await client.responses.create(input=TASK["question"], **RESPONSES)
        report("openai async", responses=response.output_text)


def responses(client: openai.OpenAI) -> None:
    text = client.responses.create(input=TASK["question"], **RESPONSES)
    image = client.responses.create(input=RESPONSES_IMAGE, **RESPONSES)
    parts = [
        event.delta
        for event in client.responses.create(input=RESPONSES_IMAGE, stream=True, **RESPONSES)
        if event.type == "response.output_text.delta"
    ]
    report(
        "openai responses",
        text=text.output_text,
        image=image.output_text,
        stream="".join(parts),
        prompt_tokens=image.usage.input_tokens,
    )
    try:
        client.responses.create(input=BAD_RESPONSES_IMAGE, **RESPONSES)
    except openai.BadRequestError as error:
        report("openai responses", error=error.message, code=error.code)
    with reported("openai responses", "broken", openai.APIError):
        broken = {"seed": TASK["broken_seed"]}
        list(client.responses.create(input=TASK["question"], stream=True, extra_body=broken, **RESPONSES))
    (call,) = client.responses.create(input=TASK["question"], **RESPONSES_CALL).output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is red."}
    items = [{"role": "user", "content": TASK["question"]}, call, result]
    after = client.responses.create(input=items, tools=[FLAT_TOOL], **RESPONSES)
    with client.responses.stream(input=TASK["question"], **RESPONSES_CALL) as stream:
        (streamed,) = stream.get_final_response().output
    report(
        "openai responses",
        tool=called(call.name, call.arguments),
        tool_stream=called(streamed.name, streamed.arguments),
        after_tool=after.output_text,
    )


with openai.OpenAI(base_url=TASK["base_url"], api_key="none", max_retries=0) as client:
    plain(client)
    helper(client)
    responses(client)
asyncio.run(asynchronous())
