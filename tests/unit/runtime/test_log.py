import json
import logging

from runtime.log import JsonFormatter, TextFormatter


def record() -> logging.LogRecord:
    return logging.makeLogRecord({"msg": "startup %s", "args": ("phase",), "levelname": "INFO", "phase": "plan"})


def test_json_line_holds_message_and_facts() -> None:
    line = json.loads(JsonFormatter().format(record()))
    assert (line["message"], line["phase"], line["level"]) == ("startup phase", "plan", "info")
    assert "args" not in line


def test_text_line_ends_with_the_facts_and_traceback_follows() -> None:
    assert TextFormatter().format(record()).endswith(" INFO    startup phase phase=plan")
    broken = record()
    try:
        raise ValueError("broken")
    except ValueError as error:
        broken.exc_info = (type(error), error, error.__traceback__)
    first, *rest = TextFormatter().format(broken).splitlines()
    assert first.endswith("startup phase phase=plan")
    assert rest[-1] == "ValueError: broken"
