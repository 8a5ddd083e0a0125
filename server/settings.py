"""Every knob of the service: the engine's and the server's own. Knows flags' values, `FOVEA_*`, YAML and defaults.

Precedence: flags, then environment, then the file given by `--config`, then the defaults. Unknown names are errors.
"""

import difflib
import json
import logging
import os
import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from runtime.config import MIB, ConfigError, EngineConfig
from server.media_url import MediaUrlError, parse_allowed_host

ENV_PREFIX = "FOVEA_"
KIB = 1 << 10
# Shorter ones are guessed; the longest that people use are far from it.
MIN_KEY_CHARS = 8
# Their values are never printed.
SECRET_NAMES = frozenset({"api_keys"})
DECIMAL_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_SUFFIXES = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
SUFFIXES = {"": 1, **DECIMAL_SUFFIXES, **BINARY_SUFFIXES}
# Kubernetes puts the address of a Service named `fovea` into the environment of every pod beside it.
SERVICE_LINK = re.compile(r"^FOVEA_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)$")

logger = logging.getLogger(__name__)


class SettingsError(ValueError):
    """A setting is unknown or has a value that it cannot have; the message is for the operator."""


def parse_bytes(value: Any) -> Any:
    """`4GiB`, `512M`, `1048576` -> bytes.

    Raises:
        ValueError: neither a number nor a number with a known suffix.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError("must be a number of bytes, as 1048576, 512MiB or 4GiB")
    return int(float(match[1]) * SUFFIXES[(match[2] or "").lower()]) if match[2] or "." in match[1] else int(match[1])


def parse_list(value: Any) -> Any:
    """`64,128` or `64 128` -> a tuple of the parts."""
    if isinstance(value, str):
        return tuple(part for part in re.split(r"[,\s]+", value.strip("[] ")) if part)
    return tuple(value) if isinstance(value, list) else value


def parse_limits(value: Any) -> Any:
    """`image=4`, `{"image": 4}` -> a mapping from modality to limit."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    pairs = [part.partition("=") for part in re.split(r"[,\s]+", value.strip())]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("must be as image=4")
    return {name: limit for name, _, limit in pairs}


def parse_root_path(value: Any) -> Any:
    """`/fovea/` -> `/fovea`.

    Raises:
        ValueError: it does not begin with a slash.
    """
    if not isinstance(value, str) or not value.strip("/"):
        return ""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+/?", value):
        raise ValueError("must be as /fovea")
    return value.rstrip("/")


def read_keys(path: Path) -> list[str]:
    """The keys of a file: one a line; empty lines and lines that begin with # are none.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"api_keys_file {path} cannot be read: {type(error).__name__}") from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Sizes = Annotated[tuple[int, ...], NoDecode, BeforeValidator(parse_list)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(parse_list)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(parse_list)]
Networks = Annotated[tuple[IPv4Network | IPv6Network, ...], NoDecode, BeforeValidator(parse_list)]
RootPath = Annotated[str, BeforeValidator(parse_root_path)]
Limits = Annotated[dict[Literal["image", "video", "audio"], int], NoDecode, BeforeValidator(parse_limits)]


class Settings(BaseSettings):
    """The whole configuration. Frozen; made by `load_settings`. Fields named as in `EngineConfig` go to the engine."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    model: str = Field("demo", description="directory, hub name (owner/name), or demo")
    revision: str | None = Field(None, description="commit, tag or branch of a hub name")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the engine runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type of weights and KV cache")
    seed: int = Field(0, description="seed of requests that bring none")
    num_threads: int | None = Field(None, description="threads of one operation on a CPU")
    attention_backend: Literal["auto", "flashinfer-fa2", "flashinfer-fa3", "sdpa"] = Field(
        "auto", description="the decoder's attention"
    )
    encoder_attention_backend: Literal["auto", "varlen", "sdpa"] = Field("auto", description="the encoder's attention")
    one_row_backend: Literal["auto", "triton", "numpy", "torch"] = Field(
        "auto",
        description="what runs decode steps of one sequence (numpy: of a few, too); torch: what runs the others",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compile the layers; auto: on CUDA the encoder's, and fused kernels for the decoder's; off: plain",
    )
    load_format: Literal["auto", "random"] = Field("auto", description="random makes weights up, for measurements")

    # Limits of a request and of a step.
    max_model_len: int | None = Field(None, description="most tokens of prompt and answer together")
    max_num_seqs: int = Field(16, description="most sequences that run at the same time")
    max_num_batched_tokens: int = Field(2048, description="most tokens in one step")
    limit_mm_per_prompt: Limits = Field({"image": 8}, description="most pictures in one request, as image=4")
    min_pixels: int | None = Field(None, description="smaller pictures are enlarged to this many pixels")
    max_pixels: int | None = Field(None, description="larger pictures are reduced to this many pixels")

    # KV cache.
    block_size: int = Field(16, description="tokens in one KV block")
    enable_prefix_caching: bool = Field(True, description="reuse KV blocks of equal prefixes")
    encoder_cache_tokens: int | None = Field(None, description="picture embeddings kept, in tokens")
    run_ahead: Literal["auto", "on", "off"] = Field(
        "auto", description="launch a decode step before the last one's tokens are read; auto: on CUDA"
    )
    encode_ahead: Literal["auto", "on", "off"] = Field(
        "auto", description="encode pictures on a thread beside the steps; auto: on a CPU of two cores or more"
    )
    kv_backing: Literal["vmm", "torch"] = Field(
        "vmm", description="vmm maps memory under fixed addresses; torch measures, releases and captures again"
    )
    mm_encoder_only: bool = Field(False, description="load the vision encoder alone, for embeddings")

    # Memory.
    gpu_memory_utilization: float = Field(0.9, description="part of the device's memory to plan with")
    memory_bytes: Bytes | None = Field(None, description="memory to plan with on a CPU, as 4GiB")
    kv_cache_memory_bytes: Bytes | None = Field(None, description="size of the KV cache, set outright")
    memory_margin_bytes: Bytes = Field(64 * MIB, description="memory left alone")
    request_memory_bytes: Bytes | None = Field(
        None, description="on a CPU: pixels and prompts of the requests in the engine; others wait before it"
    )

    # Graphs.
    enforce_eager: bool = Field(False, description="capture no graphs at all")
    encoder_graphs: bool = Field(True, description="capture the vision encoder")
    encoder_graph_policy: Literal["independent", "follow-decoder"] = Field(
        "independent", description="whether the encoder is captured only if the decoder is"
    )
    encoder_graph_budgets: Sizes | None = Field(None, description="buckets in output tokens, as 64,128")
    encoder_graph_max_items: int = Field(4, description="most pictures in one replay")
    decoder_graphs: Literal["none", "decode", "full"] = Field("decode", description="which steps are captured")
    decoder_graph_sizes: Sizes | None = Field(None, description="batch sizes to capture, as 1,2,4")
    reserve_graph_memory: Literal["on", "off", "skip"] = Field(
        "on", description="subtract the graphs from the KV cache; off only measures, skip does not measure"
    )
    strict_graphs: bool = Field(False, description="a capture that fails stops the start")
    graph_backend: Literal["auto", "emulated"] = Field(
        "auto", description="emulated runs the same buckets without graphs, to compare with"
    )

    # The HTTP server.
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: Names = Field((), description="names of the model in the API; the first one is reported")
    web: bool = Field(True, description="serve the built-in page at /")
    max_body_bytes: Bytes = Field(64 * MIB, ge=1, description="largest request body")
    max_queue_len: int = Field(256, ge=1, description="most requests that wait for the engine; beyond it: 429")
    request_timeout_seconds: float = Field(600, gt=0, description="longest life of a request")
    drain_timeout_seconds: float = Field(30, ge=0, description="time for running requests after SIGTERM")
    watchdog_seconds: float = Field(30, gt=0, description="an engine silent for so long counts as hung")
    max_image_bytes: Bytes = Field(20 * MIB, ge=1, description="largest picture as sent")
    max_image_pixels: int = Field(64_000_000, ge=1, description="largest picture before it is reduced")
    image_workers: int | None = Field(None, ge=1, description="processes that decode pictures")
    body_timeout_seconds: float = Field(30, gt=0, description="longest pause while a request body comes")
    write_timeout_seconds: float = Field(60, gt=0, description="longest pause while a client reads its answer")
    max_header_bytes: Bytes = Field(64 * KIB, ge=1024, description="largest head of a request; beyond it: 431")
    max_in_flight_bytes: Bytes = Field(
        512 * MIB, ge=1, description="bodies and pixels of all requests in work; beyond it: 429"
    )
    max_images_per_turn: int | None = Field(None, ge=1, description="most pictures in one message")
    max_request_pixels: int = Field(256_000_000, ge=1, description="all pictures of a request before they are reduced")
    root_path: RootPath = Field("", description="path under which a proxy shows the server, as /fovea")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serves /metrics there instead of on port")
    metrics_aliases: Literal["none", "vllm"] = Field(
        "none", description="vllm: also export the vllm:* names that gateways, scalers and dashboards query"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe lines logged")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else json")

    # Who may ask, and what is fetched for them.
    api_keys: Secrets = Field((), description="keys that are accepted; better in the environment or a file")
    api_keys_file: Path | None = Field(None, description="file with a key on each line")
    cors_origins: Names = Field((), description="origins whose pages may ask, as https://app.example; * for all")
    allowed_media_domains: Names = Field(
        (), description="hosts from which pictures are fetched, as img.example, *.img.example, img.example:8443 or *"
    )
    allowed_media_addresses: Networks = Field(
        (), description="networks to fetch from although they are not public, as 10.1.2.0/24"
    )
    media_timeout_seconds: float = Field(10, gt=0, description="time for fetching one picture, redirects included")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` merges the file and drops foreign variables: the sources see only what is meant for them.
        return (init_settings,)

    @property
    def max_images_per_prompt(self) -> int:
        return self.limit_mm_per_prompt.get("image", EngineConfig().max_images_per_prompt)

    def all_api_keys(self) -> tuple[str, ...]:
        """The keys given outright and those in the file, which is read now.

        Raises:
            SettingsError: the file cannot be read or has no key, or a key is too short or has spaces.
        """
        keys = [key.get_secret_value() for key in self.api_keys]
        if self.api_keys_file is not None:
            in_file = read_keys(self.api_keys_file)
            if not in_file:
                raise SettingsError(f"api_keys_file {self.api_keys_file} has no key: an empty line is none")
            keys += in_file
        for key in keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingsError(f"an API key must have {MIN_KEY_CHARS} or more printable characters, none a space")
        return tuple(keys)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the API knows the model. A directory goes by its last part."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        return (path.resolve().name if path.is_dir() else self.model,)

    def engine_config(self) -> EngineConfig:
        """The engine's part.

        Raises:
            ConfigError: a knob is out of range or contradicts another.
        """
        own = EngineConfig.__struct_fields__
        values = {name: getattr(self, name) for name in own if name in type(self).model_fields}
        return EngineConfig(max_images_per_prompt=self.max_images_per_prompt, **values)


def load_settings(
    flags: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, config: Path | None = None
) -> Settings:
    """Merges flags over environment over file over defaults.

    Raises:
        SettingsError: an unknown name, or a value out of range, with where it came from.
    """
    environ = os.environ if environ is None else environ
    from_environ = _environment(environ)
    path = config or (Path(file) if (file := from_environ.pop("config", None)) else None)
    from_file = _file(path) if path is not None else {}
    merged = {**from_file, **from_environ, **flags}
    try:
        settings = Settings(**merged)
        settings.engine_config()
        settings.all_api_keys()
        for entry in settings.allowed_media_domains:
            parse_allowed_host(entry)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        source = _flag(name) if name in flags else f"{ENV_PREFIX}{name.upper()}" if name in from_environ else str(path)
        message = first["msg"].removeprefix("Value error, ")
        if name in SECRET_NAMES:
            raise SettingsError(f"{name} (from {source}): {message}") from None
        raise SettingsError(f"{name} (from {source}) is {merged.get(name)!r}: {message}") from error
    except MediaUrlError as error:
        raise SettingsError(f"allowed_media_domains: {error}") from error
    except ConfigError as error:
        raise SettingsError(str(error)) from error
    for modality in ("video", "audio"):
        if settings.limit_mm_per_prompt.get(modality):
            raise SettingsError(f"limit_mm_per_prompt: {modality} is not supported; its limit can only be 0")
    return settings


def nearest(name: str, known: list[str]) -> str:
    """The end of an error message: what was probably meant."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        is_link = SERVICE_LINK.match(variable) or (name == "port" and "://" in value)
        if is_link and name not in set(Settings.model_fields) - {"port"}:
            logger.warning("%s is a Kubernetes service link and was ignored", variable)
        elif name not in Settings.model_fields and name != "config":
            known = [f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields]
            raise SettingsError(f"unknown environment variable {variable}{nearest(variable, known)}")
        elif value != "":
            values[name] = value
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML libraries take the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} comes twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _file(path: Path) -> dict[str, Any]:
    try:
        # As bytes, so that what is no text at all is the parser's error too.
        content = yaml.load(path.read_bytes(), Loader=_StrictLoader)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path} must hold a mapping of names to values")
    values: dict[str, Any] = {}
    for key, value in content.items():
        # Operators copy flags into files: max-model-len is max_model_len.
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields:
            raise SettingsError(f"unknown key {key!r} in {path}{nearest(name, list(Settings.model_fields))}")
        if name in values:
            raise SettingsError(f"{name} comes twice in {path}")
        values[name] = value
    return values


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
