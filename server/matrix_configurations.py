"""The configurations of `fovea matrix`, and its flags. Data only; `server.matrix` runs them.

The first nine are the reference's, in its order (docs/decisions.md); their settings lie over the reference's own.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BACKINGS = ("vmm", "torch")
RESULTS = Path("benchmarks/results")

ONE_BUDGET: dict[str, Any] = {"encoder_graph_budgets": (1024,)}
NO_GRAPHS: dict[str, Any] = {"encoder_graphs": False, "decoder_graphs": "none"}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One line of the matrix: its settings beside the reference's, and which families capture."""

    settings: Mapping[str, Any]
    has_encoder: bool = False
    has_decoder: bool = False
    is_reserved: bool = True
    backings: tuple[str, ...] = field(default=BACKINGS)


CONFIGURATIONS: dict[str, Configuration] = {
    "encoder": Configuration(settings={**ONE_BUDGET, "decoder_graphs": "none", "compile": "auto"}, has_encoder=True),
    "encoder-uncompiled": Configuration(
        settings={**ONE_BUDGET, "decoder_graphs": "none", "compile": "off"}, has_encoder=True
    ),
    "no-graphs": Configuration(settings={**NO_GRAPHS, "compile": "auto"}),
    "no-graphs-uncompiled": Configuration(settings={**NO_GRAPHS, "compile": "off"}),
    "both": Configuration(
        settings={**ONE_BUDGET, "decoder_graphs": "decode", "compile": "auto"}, has_encoder=True, has_decoder=True
    ),
    "decoder": Configuration(
        settings={"encoder_graphs": False, "decoder_graphs": "decode", "compile": "auto"}, has_decoder=True
    ),
    "opt-out": Configuration(
        settings={**ONE_BUDGET, "decoder_graphs": "none", "compile": "auto", "reserve_graph_memory": "off"},
        has_encoder=True,
        is_reserved=False,
    ),
    "eager": Configuration(settings={**ONE_BUDGET, "enforce_eager": True, "compile": "off"}),
    "three-budgets": Configuration(settings={"decoder_graphs": "none", "compile": "auto"}, has_encoder=True),
    "full": Configuration(settings={"decoder_graphs": "full", "compile": "auto"}, has_encoder=True, has_decoder=True),
    "follow-decoder": Configuration(
        settings={"encoder_graph_policy": "follow-decoder", "decoder_graphs": "none", "compile": "auto"}
    ),
    # There is no KV cache to back.
    "encoder-only": Configuration(
        settings={"mm_encoder_only": True, "compile": "auto"}, has_encoder=True, backings=("vmm",)
    ),
}


def add_matrix_flags(parser: argparse.ArgumentParser) -> None:
    """The matrix's own flags, beside those of the settings, which win over a configuration's."""
    group = parser.add_argument_group("matrix")
    group.add_argument(
        "--only", action="append", choices=CONFIGURATIONS, metavar="NAME", help="a configuration; repeat"
    )
    group.add_argument("--backing", action="append", choices=BACKINGS, help="a backing of the KV cache; repeat [both]")
    group.add_argument("--resume", action="store_true", help="keep the file's rows and measure what is missing")
    group.add_argument("--requests", type=int, default=200, metavar="N", help="after the compared ones [%(default)s]")
    group.add_argument("--output", type=Path, metavar="FILE", help=f"[{RESULTS}/matrix-DEVICE-MODEL.json]")
    group.add_argument("--row-timeout", type=float, default=480, metavar="SECONDS", help="of a process [%(default)s]")
    group.add_argument("--row-log-level", default="warning", metavar="LEVEL", help="[%(default)s]")
