"""`fovea serve` over an engine that breaks on request (`faulty_engine`): the same command line, signals, exit code."""

import argparse
import sys

from runtime.process_client import ProcessEngineClient
from server.flags import FlagParser, add_settings_flags, settings_from
from server.log import configure_logging
from server.serve import serve


def main() -> int:
    parser: argparse.ArgumentParser = FlagParser(prog="faulty_serve")
    add_settings_flags(parser)
    settings = settings_from(parser.parse_args(), parser)
    log_format = configure_logging(settings.log_level, settings.log_format)
    client = ProcessEngineClient(
        settings.engine_config(), factory="tests.integration.faulty_engine:build", log_format=log_format
    )
    return serve(client, settings)


if __name__ == "__main__":
    sys.exit(main())
