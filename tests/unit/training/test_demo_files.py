"""The shipped model's files: small enough, in the family's layout, and talking as they were trained."""

import json

from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training.chat import CHAT_TEMPLATE, encode_chat, multimodal_positions
from training.network import Network, NetworkConfig
from training.sample import Turn
from training.tokenizer import SPECIAL_TOKENS, train_tokenizer
from training.train import TOKENIZER

DEMO = TOKENIZER.parent


def test_the_weights_are_the_networks_and_at_most_16_mb() -> None:
    weights = load_file(DEMO / "model.safetensors")
    network = Network(NetworkConfig())
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in network.state_dict().items()
    }
    assert (DEMO / "model.safetensors").stat().st_size <= 16_000_000


def test_the_tokenizer_spells_capitals_and_digits() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.get_vocab_size() <= 4096
    assert all(tokenizer.token_to_id(token) is not None for token in SPECIAL_TOKENS)
    assert tokenizer.encode("HELLO42").tokens == list("HELLO42")
    for text in ("What colour is it?", "héllo ☃\n\n x", "It says A B."):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_trained_conversation_is_what_the_chat_template_gives() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    turns = [
        Turn(question="What is this?", answer="It is a star.", expected=("star",), category="shape"),
        Turn(question="And its colour?", answer="It is red.", expected=("red",), category="second_turn"),
    ]
    chat = encode_chat(Tokenizer.from_file(str(TOKENIZER)), turns, [(1, 1)], system="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": turns[0].question}]},
        {"role": "assistant", "content": turns[0].answer},
        {"role": "user", "content": turns[1].question},
        {"role": "assistant", "content": [{"type": "text", "text": turns[1].answer}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"] == chat.token_ids.tolist()
    learned = chat.token_ids[chat.turn_of == 1]
    assert tokenizer.decode(learned) == "It is red.<|im_end|>"


def test_positions_go_on_after_a_pictures_longer_side() -> None:
    import numpy as np

    token_ids = np.array([1, 9, 9, 9, 9, 9, 9, 2, 3])
    positions = multimodal_positions(token_ids, 9, [(2, 3)])
    assert positions[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert positions[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert positions[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]


def test_a_tokenizer_learns_words_from_its_texts() -> None:
    tokenizer = train_tokenizer(iter(["the circle is red", "the circle is blue"] * 5), num_tokens=300)
    assert "Ġcircle" in tokenizer.encode("a circle").tokens
