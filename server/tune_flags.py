"""The flags of `fovea plan --tune`. Parses only; `server.tune` runs it."""

import argparse
from pathlib import Path

from server.bench_flags import sizes


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the tuning, beside those of the settings."""
    group = parser.add_argument_group("tuning the encoder's ladder")
    group.add_argument("--tune", action="store_true", help="measure budgets, and propose a ladder for --sizes")
    group.add_argument(
        "--sizes",
        type=sample,
        default=(),
        metavar="WxH[,WxH]|@FILE",
        help="pictures as they come, in a file one a line [every area from min_pixels to max_pixels]",
    )
    group.add_argument("--save", type=Path, metavar="FILE", help="write the ladder as a file for --config")


def sample(text: str) -> tuple[tuple[int, int], ...]:
    """`224x224,448x336`, or the lines of `@FILE`; a size that comes twice counts twice."""
    if not text.startswith("@"):
        return sizes(text)
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8").split()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]} cannot be read: {error.strerror}") from error
    if not lines:
        raise argparse.ArgumentTypeError(f"{text[1:]} is empty")
    return sizes(",".join(lines))
