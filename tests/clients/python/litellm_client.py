"""LiteLLM, as a library, with both of its ways to a server of this kind."""

import litellm
from task import IMAGE, TASK, TEXT, report

litellm.suppress_debug_info = True

for provider in ("openai", "hosted_vllm"):
    options = {
        "model": f"{provider}/{TASK['model']}",
        "api_base": TASK["base_url"],
        "api_key": "none",
        "temperature": 0,
        "max_tokens": TASK["max_tokens"],
        "num_retries": 0,
        "max_retries": 0,
    }
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
    try:
        litellm.completion(messages=TASK["bad_messages"], **options)
    except litellm.BadRequestError as error:
        report(name, error=str(error))
    try:
        litellm.completion(messages=TEXT, **{**options, "max_tokens": 100_000})
    except litellm.ContextWindowExceededError as error:
        report(name, context_error=str(error))
    try:
        list(litellm.completion(messages=TEXT, stream=True, seed=TASK["broken_seed"], **options))
    except Exception as error:  # each provider has a class of its own
        report(name, broken=f"{type(error).__name__}: {error}")
