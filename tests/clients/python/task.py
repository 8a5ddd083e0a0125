"""What every client program is told to do, and how it says what it got: one JSON object a line."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

# Keys: base_url, model, picture (a data URL), question, max_tokens, bad_messages, broken_seed, function (as chat
# completions say it), max_call_tokens.
TASK: dict[str, Any] = json.loads(sys.argv[1])

TEXT = [{"role": "user", "content": TASK["question"]}]
IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": TASK["picture"]}},
            {"type": "text", "text": TASK["question"]},
        ],
    }
]


FUNCTION = TASK["function"]
TOOL = {"type": "function", "function": FUNCTION}
# The same in the words of the responses API.
FLAT_TOOL = {"type": "function", **FUNCTION}
RESPONSES_IMAGE = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": TASK["picture"], "detail": "auto"},
            {"type": "input_text", "text": TASK["question"]},
        ],
    }
]
BAD_RESPONSES_IMAGE = [
    {
        "role": "user",
        "content": [
            {
                "type": "input_image",
                "image_url": TASK["bad_messages"][0]["content"][0]["image_url"]["url"],
                "detail": "auto",
            }
        ],
    }
]


def called(name: str, arguments: Any) -> list[Any]:
    """A call as all programs report it: name and arguments, parsed."""
    return [name, json.loads(arguments) if isinstance(arguments, str) else arguments]


def report(client: str, **values: Any) -> None:
    print(json.dumps({"client": client, **values}), flush=True)


@contextmanager
def reported(client: str, name: str, kind: type[Exception]) -> Generator[None, None, None]:
    """Reports an error of this kind by its name: "error" of a bad request, "broken" of an answer that breaks off."""
    try:
        yield
    except kind as error:
        report(client, **{name: str(error)})
