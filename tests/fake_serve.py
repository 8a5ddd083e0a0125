"""Serves a fake engine in a process of its own, as `fovea serve` serves a real one. SIGUSR1 kills the engine.

Arguments: the checkpoint's directory, the port, JSON fields of `Replay`, JSON fields of `Settings`.
"""

import json
import signal
import sys

from server.log import configure_logging
from server.serve import serve
from server.settings import Settings
from tests.fake_engine import FakeEngineClient, Replay


class MortalEngine(FakeEngineClient):
    async def start(self) -> None:
        import asyncio

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.die, "killed by a signal")
        await super().start()


def main() -> int:
    directory, port, replay, settings = sys.argv[1:]
    engine = MortalEngine(replay=Replay(**json.loads(replay)))
    configure_logging("info", "json")
    return serve(engine, Settings(model=directory, port=int(port), served_model_name=("tiny",), **json.loads(settings)))


if __name__ == "__main__":
    sys.exit(main())
