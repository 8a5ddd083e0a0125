"""What every client program is told to do, and how it says what it got: one JSON object a line."""

import json
import sys
from typing import Any

# Keys: base_url, model, picture (a data URL), question, max_tokens, bad_messages, broken_seed.
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


def report(client: str, **values: Any) -> None:
    print(json.dumps({"client": client, **values}), flush=True)
