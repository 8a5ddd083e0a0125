"""A tokenizer with added tokens of both kinds, on disk."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from runtime.processing.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's tokenizer, with two added tokens that are not special, and one more that only
    `tokenizer_config.json` lists."""
    directory = tmp_path_factory.mktemp("tokenizer")
    raw = RawTokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    raw.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    config = json.loads((tiny_checkpoint / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][str(raw.get_vocab_size())] = {"content": "<think>", "special": False}
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(tokenizer_directory)
