import json

import pytest

from server.completion import Chunk, Fold, LogprobEntry, Usage
from server.sse import ChunkPrinter, error_event, parse_event


def printer(usage: Usage | None = None, *, continuous: bool = False) -> ChunkPrinter:
    return ChunkPrinter(completion_id="id", created=5, model='m"x', usage=usage, continuous_usage=continuous)


def event(data: bytes) -> dict[str, object]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return dict(json.loads(data[6:]))


HEAD = {"id": "id", "object": "chat.completion.chunk", "created": 5, "model": 'm"x'}


def test_events_are_as_json_would_print_them() -> None:
    assert event(printer().role(2)) == {
        **HEAD,
        "choices": [
            {"index": 2, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    text = 'line\r\nquote " back \\ \u2028 ü 🙂 \x00'
    assert event(printer().chunk(Chunk(1, text))) == {
        **HEAD,
        "choices": [{"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


def test_end_of_a_choice_is_an_event_of_its_own() -> None:
    first, second, rest = printer().chunk(Chunk(0, "bye", None, "stop")).split(b"\n\n")
    assert rest == b""
    assert json.loads(first[6:])["choices"][0]["delta"] == {"content": "bye"}
    (choice,) = json.loads(second[6:])["choices"]
    assert choice == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert printer().chunk(Chunk(0, "", None, "length")).count(b"data: ") == 1


def test_logprobs_ride_on_the_text() -> None:
    entry = LogprobEntry("a", -0.5, [97], [])
    choices = event(printer().chunk(Chunk(0, "", [entry])))["choices"]
    assert choices[0]["logprobs"] == {  # type: ignore[index]
        "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}],
        "refusal": None,
    }


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_is_null_until_the_end_unless_continuous(continuous: bool) -> None:
    usage = Usage(prompt_tokens=10, image_tokens=4, completion_tokens=2, cached_tokens=8)
    one = printer(usage, continuous=continuous)
    for data in (one.role(0), one.chunk(Chunk(0, "x"))):
        assert event(data)["usage"] == (usage.wire() if continuous else None)
    last, done, rest = one.end().split(b"\n\n")
    assert json.loads(last[6:]) == {**HEAD, "choices": [], "usage": usage.wire()}
    assert (done, rest) == (b"data: [DONE]", b"")
    assert printer().end() == b"data: [DONE]\n\n"


def test_usage_adds_up() -> None:
    wire = Usage(prompt_tokens=10, image_tokens=4, completion_tokens=2, cached_tokens=8).wire()
    assert wire["total_tokens"] == 12
    details = {"cached_tokens": 8, "cache_write_tokens": 0, "audio_tokens": 0, "image_tokens": 4, "text_tokens": 6}
    assert wire["prompt_tokens_details"] == details


def test_folded_stream_is_the_answer() -> None:
    entry = LogprobEntry("a", -0.5, [97], [])
    chunks = [Chunk(1, "b1"), Chunk(0, "a1", [entry]), Chunk(0, "a2", [entry], "stop"), Chunk(1, "b2", None, "length")]
    fold = Fold(2)
    for chunk in chunks:
        fold.add(chunk)
    usage = Usage(prompt_tokens=1, image_tokens=0)
    answer = json.loads(fold.body(completion_id="id", created=5, model="m", usage=usage))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a1a2", "b1b2"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2
    assert answer["choices"][1]["logprobs"] is None


def test_error_event_and_parsing() -> None:
    assert error_event(b"{}") == b"data: {}\n\n"
    assert parse_event('data: {"a": 1}') == {"a": 1}
    assert parse_event("data:[DONE]") is None
    assert parse_event(": comment") is None
