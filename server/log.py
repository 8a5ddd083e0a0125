"""Log lines: JSON for machines, plain for a terminal. No line holds a payload, a prompt, an answer or an image's URL.

Loggers name events and put facts into `extra`; only the fields listed here are printed.
"""

import logging
import sys
import time
from typing import Literal

import msgspec

from runtime.log import LogFormat

FIELDS = ("request_id", "request", "method", "handler", "status", "seconds", "phase", "reason")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; exceptions with their traceback in `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name in FIELDS if (value := getattr(record, name, None)) is not None})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        facts = [f"{name}={value}" for name in FIELDS if (value := getattr(record, name, None)) is not None]
        return " ".join([super().format(record), *facts])


def configure_logging(level: str, kind: Literal["auto", "json", "text"]) -> LogFormat:
    """Sends all log lines of the process to standard error; uvicorn's loggers too.

    Returns: the form that `kind` came to, for the processes that this one starts.
    """
    handler = logging.StreamHandler(sys.stderr)
    resolved: LogFormat = ("text" if sys.stderr.isatty() else "json") if kind == "auto" else kind
    handler.setFormatter(TextFormatter() if resolved == "text" else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # uvicorn tells of its own start and end, which `server.serve` and `server.service` tell in the service's words.
    logging.getLogger("uvicorn.error").setLevel("DEBUG" if level == "debug" else "WARNING")
    # Libraries that log URLs or every request at INFO.
    for name in ("httpx", "httpcore", "httpx2", "httpcore2", "PIL", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return resolved
