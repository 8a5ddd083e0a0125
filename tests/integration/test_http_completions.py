"""Text completions and tokenization over HTTP on a fake engine, through the official client where it has them."""

import threading
from typing import Any

import openai
import pytest

from runtime.processing.tokenizer import Tokenizer
from tests.fake_engine import Replay
from tests.http_server import MODEL, ReplayText, RunningServer, chat, events, image_part


def complete(server: RunningServer, prompt: Any = "Once", **fields: Any) -> Any:
    return server.post({"model": MODEL, "prompt": prompt, **fields}, "/v1/completions")


def test_official_client_completes_a_text(
    server: RunningServer, client: openai.OpenAI, tokenizer: Tokenizer, replay_text: ReplayText
) -> None:
    token_ids = replay_text(" upon a time", num_cached_tokens=2)
    answer = client.completions.create(model=MODEL, prompt="Once")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" upon a time", "stop")
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(token_ids)
    (request,) = server.engine.requests
    assert request.prompt_token_ids == tokenizer.encode("Once", allow_special=False)
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert request.sampling.max_tokens == 16
    chunks = list(client.completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " upon a time"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_usage_of_a_stream_has_no_choices(server: RunningServer) -> None:
    response = complete(server, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    *chunks, _ = events(complete(server, stream=True).text)
    assert all("usage" not in chunk for chunk in chunks)


def test_prompts_times_n_are_choices_in_order(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Replay(
        token_ids=tokenizer.encode(f"<{tokenizer.decode(request.prompt_token_ids)}>", allow_special=False),
        num_cached_tokens=1,
    )
    answer = complete(server, ["a", "b"], n=2, seed=5, max_tokens=9).json()
    assert [choice["text"] for choice in answer["choices"]] == ["<a>", "<a>", "<b>", "<b>"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert sorted(request.sampling.seed or 0 for request in server.engine.requests) == [5, 5, 6, 6]
    assert answer["usage"]["prompt_tokens"] == 2
    # Cached once for each prompt, not for each choice.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_prompts_of_tokens(server: RunningServer, tokenizer: Tokenizer) -> None:
    assert complete(server, [5, 6, 7]).status_code == 200
    assert complete(server, [[5, 6], [7]]).status_code == 200
    assert [request.prompt_token_ids for request in server.engine.requests] == [[5, 6, 7], [5, 6], [7]]
    picture_token = tokenizer.added_ids["<|image_pad|>"]
    assert "picture" in complete(server, [5, picture_token]).json()["error"]["message"]
    assert complete(server, [10**6]).json()["error"]["param"] == "prompt"


def test_special_tokens_in_a_prompt_stay_text(server: RunningServer, tokenizer: Tokenizer) -> None:
    assert complete(server, "<|vision_start|><|image_pad|><|vision_end|>").status_code == 200
    assert tokenizer.special_ids.isdisjoint(server.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_in_columns(server: RunningServer, replay_text: ReplayText, stream: bool) -> None:
    replay_text("two words", logprob=-0.25)
    response = complete(server, logprobs=2, stream=stream)
    choices = [event["choices"][0] for event in events(response.text)[:-1]] if stream else response.json()["choices"]
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for column in columns for token in column["tokens"]]
    offsets = [offset for column in columns for offset in column["text_offset"]]
    assert "".join(tokens) == "two words"
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert all(value == -0.25 for column in columns for value in column["token_logprobs"])
    assert all(len(top) == 2 for column in columns for top in column["top_logprobs"])


BAD = {
    "echo": ({"echo": True}, "echo"),
    "suffix": ({"suffix": "the end"}, "suffix"),
    "best_of": ({"best_of": 4}, "best_of"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "mixed list": ({"prompt": ["a", 5]}, "prompt[1]"),
    "number": ({"prompt": 5}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 65}, "prompt"),
    "too many choices": ({"prompt": ["a"] * 9, "n": 8}, "prompt"),
    "logprobs": ({"logprobs": 6}, "logprobs"),
    "too long": ({"prompt": "word " * 9000}, "prompt"),
    "more than there is room for": ({"max_tokens": 10**6}, "prompt"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_honoured_is_named(server: RunningServer, name: str, stream: bool) -> None:
    fields, param = BAD[name]
    response = complete(server, **{"prompt": "x", "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_fields_that_change_nothing_are_taken(server: RunningServer) -> None:
    assert complete(server, echo=False, suffix=None, best_of=1, user="me").status_code == 200
    assert complete(server, n=2, best_of=2).status_code == 200


def test_tokenize_a_text_and_back(server: RunningServer, tokenizer: Tokenizer) -> None:
    answer = server.post({"model": MODEL, "prompt": "Grüße 🙂", "return_token_strs": True}, "/tokenize").json()
    assert answer["tokens"] == tokenizer.encode("Grüße 🙂", allow_special=False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert server.post({"tokens": answer["tokens"]}, "/detokenize").json() == {"prompt": "Grüße 🙂"}


def test_tokens_become_text_beside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    token_bytes = Tokenizer.token_bytes

    def observed(self: Tokenizer, token_id: int) -> bytes:
        threads.add(threading.get_ident())
        return token_bytes(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", observed)
    assert server.post({"tokens": [1] * 100}, "/detokenize").status_code == 200
    assert len(threads) == 1
    assert server.in_loop(threading.get_ident) not in threads


def test_tokenize_says_what_a_conversation_will_cost(server: RunningServer) -> None:
    body = chat([image_part(), {"type": "text", "text": "What is it?"}])
    tokens = server.post(body, "/tokenize").json()
    usage = server.post(body).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
    assert tokens["tokens"] == server.engine.requests[0].prompt_token_ids
    assert tokens["image_tokens"] == usage["prompt_tokens_details"]["image_tokens"] == 4


def test_tokenization_refuses_as_completions_do(server: RunningServer) -> None:
    assert server.post({"model": MODEL}, "/tokenize").status_code == 400
    assert server.post({"prompt": "x", "messages": chat()["messages"]}, "/tokenize").status_code == 400
    assert server.post({"model": "other", "prompt": "x"}, "/tokenize").status_code == 404
    assert server.post({"model": "other", "tokens": [1]}, "/detokenize").status_code == 404
    assert server.post({"tokens": [10**6]}, "/detokenize").json()["error"]["param"] == "tokens"
    assert server.post({"tokens": ["a"]}, "/detokenize").json()["error"]["param"] == "tokens[0]"
    assert server.post({"prompt": ""}, "/tokenize").json()["tokens"] == []
