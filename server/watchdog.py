"""Whether the engine still gives signs of life, as the probes and the metrics see it. Knows no HTTP."""

from runtime.client import EngineClient

# Traffic is kept away (readiness) well before the process is given up (liveness): a long step ends by itself.
READY_SHARE = 1 / 3


def is_hung(client: EngineClient, watchdog_seconds: float) -> bool:
    """Whether the engine was silent for so long that only a restart will help."""
    return client.state == "ready" and client.seconds_since_heartbeat > watchdog_seconds


def is_responsive(client: EngineClient, watchdog_seconds: float) -> bool:
    """Whether the engine is there and was heard of lately."""
    return client.state == "ready" and client.seconds_since_heartbeat <= watchdog_seconds * READY_SHARE
