"""Everything one application holds, and how it starts and stops: engine, model side, lifecycle, metrics. No HTTP."""

import asyncio
import gc
import logging
import os
import socket
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from runtime.checkpoint import CheckpointError, locate_model
from runtime.client import EngineClient, EngineDeadError
from runtime.config import ConfigError
from server.api_keys import ApiKeys
from server.body_parser import BodyParser
from server.byte_budget import ByteBudget
from server.chat import ChatService, ModelSide
from server.grammar_checker import GrammarChecker
from server.lifecycle import Lifecycle
from server.metrics import Metrics
from server.prompts import PromptPreparer
from server.sampling import SamplingDefaults
from server.settings import Settings

logger = logging.getLogger(__name__)

# Set by the container image: the commit that it was built from.
REVISION_VARIABLE = "SOURCE_REVISION"


class Service:
    """One application's parts. `start` returns at once; the lifecycle says when requests are taken."""

    def __init__(self, client: EngineClient, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.version = project_version()
        self.created = int(time.time())
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(
            client,
            self.lifecycle,
            model_name=settings.model_names[0],
            version=self.version,
            watchdog_seconds=settings.watchdog_seconds,
            revision=os.environ.get(REVISION_VARIABLE) or "unknown",
            aliases=settings.metrics_aliases,
        )
        self.chat = ChatService(client, settings, self.metrics)
        self.api_keys = ApiKeys(settings.all_api_keys())
        self.url: str | None = None  # where it is served, once that is known
        self.metrics_port: int | None = settings.metrics_port
        self.metrics_sockets: list[socket.socket] = []  # opened before the application starts, or by it
        self.body_budget = ByteBudget(settings.max_in_flight_bytes)
        self.body_parser = BodyParser()
        self._watcher: asyncio.Task[None] | None = None
        self._prompts: PromptPreparer | None = None
        self._grammars = GrammarChecker()

    def start(self) -> None:
        """Starts the engine and loads the tokenizer beside it, in the background."""
        self._watcher = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends engine and workers. Safe in any state."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self.client.shutdown()
        if self._prompts is not None:
            await self._prompts.close()
        await self._grammars.close()

    async def _run(self) -> None:
        """Brings the service up, then waits for the engine's death."""
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.client.start())
                group.create_task(self._load_model_side())
        except* (CheckpointError, ConfigError, EngineDeadError) as failures:
            reason = "; ".join(dict.fromkeys(str(failure) for failure in failures.exceptions))
            logger.error("the service cannot start: %s", reason)
            self.lifecycle.die(reason)
        except* Exception as failures:
            logger.error("the service cannot start", exc_info=failures)
            self.lifecycle.die("the start failed")
        if self.lifecycle.failure is not None:
            return
        # What the start made stays: the collector need not look at it while probes wait.
        gc.collect()
        gc.freeze()
        self.lifecycle.become_ready()
        seconds = round(time.perf_counter() - start, 3)
        name = self.settings.model_names[0] + (f" on {self.url}" if self.url else "")
        logger.info("ready: %s", name, extra={"phase": "ready", "seconds": seconds})
        reason = await self.client.wait_dead()
        logger.error("the engine died: %s", reason, extra={"phase": "dead"})
        self.lifecycle.die(reason)

    async def _load_model_side(self) -> None:
        directory = await asyncio.to_thread(locate_model, self.settings.model, self.settings.revision)
        self._prompts = await PromptPreparer.load(directory, self.settings, self.metrics)
        defaults = await asyncio.to_thread(SamplingDefaults.from_checkpoint, directory)
        self.chat.model_side = ModelSide(prompts=self._prompts, sampling_defaults=defaults, grammars=self._grammars)


def project_version() -> str:
    """Version of the installed distribution; `0` in a bare source tree."""
    try:
        return installed_version("fovea")
    except PackageNotFoundError:
        return "0"
