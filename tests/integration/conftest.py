"""One server over a fake engine for a module's tests, as each of them finds it new, and what they ask it with."""

from collections.abc import Generator
from pathlib import Path

import openai
import pytest

from runtime.processing.tokenizer import Tokenizer
from tests.fake_engine import Replay
from tests.http_server import ReplayText, RunningServer, running_server


@pytest.fixture(scope="module")
def shared_server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Generator[RunningServer, None, None]:
    """Its engine replays the default, and has heard of nothing."""
    yield shared_server
    shared_server.engine.forget()


@pytest.fixture
def client(server: RunningServer) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(tiny_checkpoint)


@pytest.fixture
def replay_text(shared_server: RunningServer, tokenizer: Tokenizer) -> ReplayText:
    def set_replay(text: str, **fields: object) -> list[int]:
        token_ids = tokenizer.encode(text, allow_special=False)
        shared_server.engine.replay = Replay(token_ids=token_ids, **fields)  # type: ignore[arg-type]
        return token_ids

    return set_replay
