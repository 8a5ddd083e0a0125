"""How a conversation becomes text and token ids, and where each token stands: the family's chat format.

Knows nothing of pictures beyond the size of their grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.sample import Turn

IMAGE_PAD = "<|image_pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] "
    "== 'image' or part['type'] == 'image_url' or 'image' in part or 'image_url' in part -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'video' or 'video' in part -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """Token ids of a conversation and what to learn in it.

    `turn_of` holds, for each token, the index of the turn whose answer it is a part of, or -1.
    """

    token_ids: npt.NDArray[np.int64]  # [T]
    turn_of: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [3, T] time, row, column


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The number of a token that the tokenizer must have."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer has no {token}"
    return found


def encode_chat(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    grids: Sequence[tuple[int, int]],
    *,
    system: str | None = None,
    image_turn: int = 0,
    is_image_last: bool = False,
    max_text_tokens: int | None = None,
) -> EncodedChat:
    """Tokens of `turns`, each with its answer; pictures of `grids` (rows, columns of merged units) go in one
    turn.

    Turns that would exceed `max_text_tokens` (pictures not counted) are left out from the end, but never the
    first.
    """
    pad_id = token_id(tokenizer, IMAGE_PAD)
    start_id, end_id = token_id(tokenizer, "<|vision_start|>"), token_id(tokenizer, "<|vision_end|>")
    token_ids: list[int] = []
    turn_of: list[int] = []
    text_tokens = 0
    if system is not None:
        token_ids += tokenizer.encode(f"<|im_start|>system\n{system}<|im_end|>\n").ids
        turn_of += [-1] * len(token_ids)
        text_tokens += len(token_ids)
    for index, turn in enumerate(turns):
        assert turn.answer is not None, "only turns with an answer can be trained on"
        opening = tokenizer.encode("<|im_start|>user\n").ids
        question = tokenizer.encode(turn.question).ids
        closing = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n").ids
        answer = tokenizer.encode(turn.answer + "<|im_end|>").ids
        added = len(opening) + len(question) + len(closing) + len(answer) + 1
        if max_text_tokens is not None and index > image_turn and text_tokens + added > max_text_tokens:
            break
        text_tokens += added
        pictures: list[int] = []
        if index == image_turn:
            for rows, columns in grids:
                pictures += [start_id, *[pad_id] * (rows * columns), end_id]
        user = [*question, *pictures] if is_image_last else [*pictures, *question]
        prompt = [*opening, *user, *closing]
        token_ids += [*prompt, *answer, *tokenizer.encode("\n").ids]
        turn_of += [-1] * len(prompt) + [index] * len(answer) + [-1]
    ids = np.array(token_ids, dtype=np.int64)
    return EncodedChat(
        token_ids=ids,
        turn_of=np.array(turn_of, dtype=np.int64),
        positions=multimodal_positions(ids, pad_id, grids),
    )


def multimodal_positions(
    token_ids: npt.NDArray[np.int64], pad_id: int, grids: Sequence[tuple[int, int]]
) -> npt.NDArray[np.int64]:
    """Time, row and column of every token, [3, T]: text counts on, a picture spans its grid from one start.

    The text after a picture goes on from the picture's greatest position plus one (Qwen2-VL,
    arXiv:2409.12191).
    """
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    cursor = next_position = 0
    for rows, columns in grids:
        found = np.flatnonzero(token_ids[cursor:] == pad_id)
        if len(found) == 0:
            break
        start = cursor + int(found[0])
        positions[:, cursor:start] = next_position + np.arange(start - cursor)
        next_position += start - cursor
        end = start + rows * columns
        positions[0, start:end] = next_position
        positions[1, start:end] = next_position + np.repeat(np.arange(rows), columns)
        positions[2, start:end] = next_position + np.tile(np.arange(columns), rows)
        cursor, next_position = end, next_position + max(rows, columns)
    positions[:, cursor:] = next_position + np.arange(len(token_ids) - cursor)
    return positions
