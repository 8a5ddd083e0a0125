from typing import Any

from server.prompts import image_urls, num_chars, plain_message
from server.schemas import ChatCompletionRequest, ChatMessage


def messages(*documents: dict[str, Any]) -> list[ChatMessage]:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": list(documents)}).messages


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_pictures_keep_their_order_and_know_their_place() -> None:
    found = image_urls(
        messages(
            {"role": "user", "content": [image("a"), {"type": "text", "text": "x"}, image("b")]},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": [image("c")]},
        )
    )
    assert [(place, part.url) for place, part in found] == [
        ("messages[0].content[0].image_url.url", "a"),
        ("messages[0].content[2].image_url.url", "b"),
        ("messages[2].content[0].image_url.url", "c"),
    ]


def test_messages_as_templates_know_them() -> None:
    parts = [{"type": "text", "text": "x"}, image("a")]
    found = [
        plain_message(message)
        for message in messages(
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        )
    ]
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}], "name": "Ann"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    ]


def test_pictures_do_not_count_as_text() -> None:
    found = messages(
        {"role": "user", "content": [{"type": "text", "text": "four"}, image("x" * 10_000)]},
        {"role": "assistant", "content": "six..."},
    )
    assert num_chars(found) == 11
