"""The engine process's log lines on standard error: JSON for machines, plain for a terminal. Holds no rule of what may
be logged, and does not choose the form: the process that starts this one does.
"""

import logging
import sys
import time
from typing import Any, Literal

import msgspec

LogFormat = Literal["json", "text"]

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time (UTC), level, logger and message, then whatever `extra` brought, then the traceback in `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_facts(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Time (local), level and message, then `name=value` of whatever `extra` brought; a traceback on lines below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in _facts(record).items())])


def configure_logging(level: str, kind: LogFormat = "json") -> None:
    """Sends the process's log lines of `level` ("info", ...) and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if kind == "text" else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
