"""The command `fovea`. Parses and dispatches; heavy modules are imported by the subcommand that needs them."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from server.bench_flags import add_bench_flags
from server.flags import FlagParser, add_settings_flags, settings_from
from server.matrix_configurations import add_matrix_flags
from server.tune_flags import add_tune_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code of the process."""
    parser = FlagParser(prog="fovea", description="Image chat over the OpenAI HTTP API.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=FlagParser)
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    plan = commands.add_parser("plan", help="start the engine, print its memory plan and graphs, and exit")
    download = commands.add_parser("download", help="fetch a model from the hub, print its directory, and exit")
    for command in (serve, plan, download):
        add_settings_flags(command)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_tune_flags(plan)
    matrix = commands.add_parser("matrix", help="start every configuration of graphs and memory, and judge each")
    add_settings_flags(matrix)
    add_matrix_flags(matrix)
    bench = commands.add_parser("bench", help="measure a server")
    add_bench_flags(bench)
    commands.add_parser("version", help="print the version")

    arguments = parser.parse_args(argv)
    match arguments.command:
        case "serve":
            return run_serve(arguments, serve)
        case "plan":
            return run_plan(arguments, plan)
        case "matrix":
            from server.matrix import run_matrix

            return run_matrix(arguments)
        case "download":
            return run_download(arguments, download)
        case "bench":
            return run_bench(arguments)
        case _:
            from server.service import project_version

            print(f"fovea {project_version()}")
            return 0


def run_serve(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    settings = settings_from(arguments, parser)
    if settings.mm_encoder_only:
        parser.error("--mm-encoder-only has no decoder to serve with: use the offline API")

    from runtime.process_client import ProcessEngineClient
    from server.log import configure_logging
    from server.serve import serve

    log_format = configure_logging(settings.log_level, settings.log_format)
    return serve(ProcessEngineClient(settings.engine_config(), log_format=log_format), settings)


def run_plan(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    settings = settings_from(arguments, parser)
    if arguments.tune:
        from server.tune import run_tune

        return run_tune(arguments, settings)
    if arguments.sizes or arguments.save is not None:
        parser.error("--sizes and --save belong to --tune")

    from runtime.checkpoint import CheckpointError, locate_model
    from runtime.client import EngineDeadError
    from runtime.process_client import ProcessEngineClient
    from server.log import configure_logging
    from server.plan import engine_info, plan_json, plan_tables
    from server.sampling import SamplingDefaults

    log_format = configure_logging("warning", settings.log_format)
    client = ProcessEngineClient(settings.engine_config(), log_format=log_format)
    print(f"starting an engine to measure {settings.model} ...", file=sys.stderr, flush=True)
    try:
        # What the server would read besides: a model that is planned can be served.
        SamplingDefaults.from_checkpoint(locate_model(settings.model, settings.revision))
        info = asyncio.run(engine_info(client))
    except (CheckpointError, EngineDeadError) as error:
        print(f"fovea plan: {error}", file=sys.stderr)
        return 1
    print(plan_json(info) if arguments.json else plan_tables(info))
    return 0


def run_download(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """With the settings of `serve`, so that what is fetched is what will be served with HF_HUB_OFFLINE=1. Where that is
    set here too, nothing is fetched: the exit code says whether the model is there and whole."""
    settings = settings_from(arguments, parser)

    from runtime.checkpoint import CheckpointError, locate_model, weight_files

    try:
        directory = locate_model(settings.model, settings.revision)
        weight_files(directory)
        print(directory)
    except CheckpointError as error:
        print(f"fovea download: {error}", file=sys.stderr)
        return 1
    return 0


def run_bench(arguments: argparse.Namespace) -> int:
    if arguments.bench == "startup":
        from server.bench_startup import measure_startups

        return measure_startups(arguments)
    if arguments.bench == "throughput":
        from server.bench_throughput import measure_throughput
        from server.settings import SettingsError

        try:
            return measure_throughput(arguments)
        except SettingsError as error:
            arguments.parser.error(str(error))

    from server.bench import measure_load

    return asyncio.run(measure_load(arguments))
