"""The command line's flags, made from `Settings`. Parses only; values are checked by `load_settings`."""

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from server.settings import Settings, SettingsError, load_settings, nearest

# First field of each group of `--help`, in the order of `Settings`.
GROUPS: tuple[tuple[str, str], ...] = (
    ("device", "engine"),
    ("max_model_len", "limits of a request and of a step"),
    ("block_size", "KV cache"),
    ("gpu_memory_utilization", "memory"),
    ("enforce_eager", "graphs"),
    ("host", "HTTP server"),
    ("api_keys", "keys, origins, and pictures from elsewhere"),
)

METAVARS = {
    "host": "ADDRESS",
    "revision": "REVISION",
    "limit_mm_per_prompt": "image=N",
    "served_model_name": "NAME[,NAME]",
    "root_path": "PATH",
    "api_keys": "KEY[,KEY]",
    "api_keys_file": "FILE",
    "cors_origins": "ORIGIN[,ORIGIN]",
    "allowed_media_domains": "HOST[,HOST]",
    "allowed_media_addresses": "NETWORK[,NETWORK]",
    "encoder_graph_budgets": "N[,N]",
    "decoder_graph_sizes": "N[,N]",
}

# Defaults that are computed at the start, in words.
COMPUTED_DEFAULTS = {
    "max_model_len": "the model's, at most 32768",
    "min_pixels": "the model's",
    "max_pixels": "the model's",
    "request_memory_bytes": "what the largest request may bring, at least 32MiB",
    "memory_bytes": "a quarter of the machine's or container's, at most 4GiB",
    "image_workers": "1, or 2 where there are more than 2 cores",
}


class FlagParser(argparse.ArgumentParser):
    """An argument parser that names the nearest known flag when it meets an unknown one."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Subcommands are parsed through this method: the error should come from the parser that knows the flags.
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"unknown argument {name}{nearest(name, [*self._option_string_actions])}")
        return values, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


def add_settings_flags(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--config` and a flag for each setting; only flags that were given appear in the namespace."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_help("model"))
    parser.add_argument("--config", metavar="FILE", type=Path, default=None, help="YAML file with these settings")
    group: Any = parser
    titles = dict(GROUPS)
    for name, field in Settings.model_fields.items():
        if name == "model":
            continue
        if name in titles:
            group = parser.add_argument_group(titles[name])
        _add_flag(group, name, field)


def settings_from(namespace: argparse.Namespace, parser: argparse.ArgumentParser) -> Settings:
    """Reads environment and file beside the flags; a wrong setting ends the process as a wrong flag does."""
    flags = {name: value for name, value in vars(namespace).items() if name in Settings.model_fields}
    try:
        return load_settings(flags, config=namespace.config)
    except SettingsError as error:
        parser.error(str(error))


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    keywords: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(name)}
    if name == "reserve_graph_memory":
        group.add_argument(flag, nargs="?", const="on", metavar="{on,off,skip}", **keywords)
        group.add_argument(
            f"--no-{flag[2:]}", dest=name, action="store_const", const="off", default=argparse.SUPPRESS,
            help="the same as --reserve-graph-memory=off",
        )  # fmt: skip
    elif field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
    else:
        group.add_argument(flag, metavar=_metavar(name, field), **keywords)


def _metavar(name: str, field: FieldInfo) -> str:
    choices = re.findall(r"'([^']+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
    if choices and name != "limit_mm_per_prompt":
        return "{" + ",".join(choices) + "}"
    if name.endswith("_bytes"):
        return "BYTES"
    return METAVARS.get(name, "SECONDS" if name.endswith("_seconds") else "N")


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    text = (field.description or "").replace("%", "%%")
    if name in COMPUTED_DEFAULTS:
        return f"{text} [{COMPUTED_DEFAULTS[name]}]"
    if field.default is None or field.default == () or name == "limit_mm_per_prompt":
        return text
    default: Any = field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif name.endswith("_bytes"):
        default = f"{default >> 20}MiB"
    return f"{text} [{default}]"
