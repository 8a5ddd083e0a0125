"""The flags of `fovea bench`. Parses only."""

import argparse
import re
from pathlib import Path

from server.flags import add_settings_flags


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True, parser_class=type(parser))
    serve = kinds.add_parser("serve", help="load on a running server, Fovea or any other with OpenAI's chat API")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is [%(default)s]")
    serve.add_argument("--model", help="name of the model [the first that the server lists]")
    serve.add_argument("--api-key", help="sent as a bearer token")
    serve.add_argument("--requests", type=positive, default=64, metavar="N", help="measured requests [%(default)s]")
    serve.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before them [%(default)s]")
    serve.add_argument("--concurrency", type=positive, default=8, metavar="N", help="at a time [%(default)s]")
    images = serve.add_mutually_exclusive_group()
    images.add_argument(
        "--image", type=sizes, default=((224, 224),), metavar="WxH[,WxH]", help="sizes, in turns [224x224]"
    )
    images.add_argument("--no-image", dest="image", action="store_const", const=(), help="text only")
    serve.add_argument("--images-per-request", type=positive, default=1, metavar="N", help="[%(default)s]")
    serve.add_argument("--text", default="What is in the picture?", help="the question [%(default)s]")
    serve.add_argument("--max-tokens", type=positive, default=32, metavar="N", help="of the answer [%(default)s]")
    serve.add_argument("--ignore-eos", action="store_true", help="ask for answers of full length")
    serve.add_argument("--seed", type=int, default=0, help="of the noise in the pictures [%(default)s]")
    serve.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of a request [%(default)s]")

    throughput = kinds.add_parser("throughput", help="the engine without a server, on the reference's workload")
    throughput.add_argument("--preset", choices=("pair", "pair-graphs", "load"), default="pair", help="[%(default)s]")
    throughput.add_argument("--requests", dest="num_requests", type=positive, metavar="N", help="measured requests")
    throughput.add_argument("--warmup", dest="num_warmups", type=int, metavar="N", help="requests before them")
    throughput.add_argument("--concurrency", type=positive, metavar="N", help="requests at a time")
    throughput.add_argument("--image", dest="image_sizes", type=sizes, metavar="WxH[,WxH]", help="sizes, in turns")
    throughput.add_argument("--no-image", dest="image_sizes", action="store_const", const=(), help="text only")
    throughput.add_argument("--text-tokens", dest="num_text_tokens", type=positive, metavar="N", help="in a prompt")
    throughput.add_argument("--output-tokens", dest="num_output_tokens", type=positive, metavar="N", help="an answer")
    throughput.add_argument("--engine-log-level", default="warning", help="of the engine's process [%(default)s]")
    add_settings_flags(throughput)
    throughput.set_defaults(parser=throughput)

    startup = kinds.add_parser("startup", help="time from the start of the process until it is ready")
    startup.add_argument("--runs", type=positive, default=3, metavar="N", help="[%(default)s]")
    startup.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one start [%(default)s]")
    startup.add_argument("--config", type=Path, help="as for serve")
    startup.add_argument("serve_arguments", nargs="*", metavar="ARG", help="for serve; put flags behind --")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def sizes(text: str) -> tuple[tuple[int, int], ...]:
    """`224x224,448x336` -> ((224, 224), (448, 336)), width first."""
    found = [re.fullmatch(r"(\d+)x(\d+)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError("must be as 224x224 or 224x224,448x448")
    return tuple((int(match[1]), int(match[2])) for match in found if match)
