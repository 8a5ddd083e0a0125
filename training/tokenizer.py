"""Makes the demo model's tokenizer: byte-level BPE in which every capital letter and every digit is a token.

So a printed word, answered in capitals, is spelled letter by letter.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.drawing import draw_sized
from training.sample import CATEGORIES
from training.vocabulary import BAR_NAMES, WORDS

NUM_TOKENS = 1536
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_PIECES = r"'(?:s|t|m|d|re|ve|ll)|\p{Lu}|\p{N}| ?[\p{Ll}\p{M}]+| ?[^\s\p{L}\p{N}]+|\p{L}|\s+(?!\S)|\s"


def train_tokenizer(texts: Iterator[str], num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """A tokenizer of `num_tokens` tokens in all, the special ones last, with merges learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def dialogue_texts(num_conversations: int) -> Iterator[str]:
    """Questions and answers of every category, the role names, and the common words."""
    rng = random.Random("tokenizer")
    for number in range(num_conversations):
        category = (*CATEGORIES, "general")[number % (len(CATEGORIES) + 1)]
        category = "colour" if category == "second_turn" else category
        for turn in draw_sized(rng, category, ((160, 160), (112, 112)), 3).turns:
            yield turn.question
            yield turn.answer or ""
            yield "user"
            yield "assistant"
            yield "system"
    for word in (*WORDS, *(name for names in BAR_NAMES for name in names)):
        for _ in range(3):
            yield " " + word.lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="where tokenizer.json goes")
    parser.add_argument("--conversations", type=int, default=20_000)
    arguments = parser.parse_args()
    train_tokenizer(dialogue_texts(arguments.conversations)).save(str(arguments.out))


if __name__ == "__main__":
    main()
