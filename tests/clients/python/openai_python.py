"""The official Python client: plain, with its stream helper, and asynchronous."""

import asyncio

import openai
from task import IMAGE, TASK, TEXT, report

OPTIONS = {"model": TASK["model"], "temperature": 0, "max_tokens": TASK["max_tokens"]}
USAGE = {"include_usage": True}


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
    try:
        list(client.chat.completions.create(messages=TEXT, stream=True, seed=TASK["broken_seed"], **OPTIONS))
    except openai.APIError as error:
        report("openai", broken=error.message)
    report("openai", models=[model.id for model in client.models.list()])


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
    try:
        with client.chat.completions.stream(messages=TEXT, seed=TASK["broken_seed"], **OPTIONS) as stream:
            stream.until_done()
    except openai.APIError as error:
        report("openai .stream()", broken=error.message)


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
        try:
            await client.chat.completions.create(messages=TASK["bad_messages"], **OPTIONS)
        except openai.BadRequestError as error:
            report("openai async", error=error.message)


with openai.OpenAI(base_url=TASK["base_url"], api_key="none", max_retries=0) as client:
    plain(client)
    helper(client)
asyncio.run(asynchronous())
