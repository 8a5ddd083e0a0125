"""Finds a checkpoint and reads its JSON files. Reads no weights and imports no torch, so that the server may use it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEMO_MODEL = "demo"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Dtype = Literal["float32", "bfloat16", "float16"]


class CheckpointError(ValueError):
    """The checkpoint is missing, incomplete, or of a kind that this runtime does not serve."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Hyper-parameters of the vision encoder and its projector (Hugging Face names)."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int
    fullatt_block_indexes: tuple[int, ...]

    @property
    def pixels_per_token_side(self) -> int:
        """Side, in pixels, of the square that becomes one output token: 28 in the published models."""
        return self.patch_size * self.spatial_merge_size


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Hyper-parameters of the text decoder (Hugging Face names)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the whole runtime needs to know of a checkpoint's `config.json` and `generation_config.json`."""

    model_type: Literal["qwen2_5_vl"]
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """What `preprocessor_config.json` says of pictures. Pixels are height x width after resizing. The sizes of patches
    stand in the model's configuration, too; `None` where the file does not say them again."""

    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    patch_size: int | None = None
    merge_size: int | None = None
    temporal_patch_size: int | None = None


def locate_model(model: str, revision: str | None = None) -> Path:
    """The directory of MODEL: `demo`, a directory, or a hub name (downloaded unless `HF_HUB_OFFLINE` forbids it).

    `revision`: commit, tag or branch of a hub name; a directory has none.

    Raises:
        CheckpointError: there is no such directory, and the hub does not give it.
    """
    if model == DEMO_MODEL:
        return Path(__file__).parent / "demo"
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"model {model!r} is neither a directory, nor a hub name (owner/name), nor {DEMO_MODEL!r}"
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        reason = type(error).__name__
        if constants.HF_HUB_OFFLINE:
            reason = "it is not in the cache here, and HF_HUB_OFFLINE forbids to fetch it; unset it to download"
        elif isinstance(error, LocalEntryNotFoundError):
            reason = "the hub cannot be reached, and it is not in the cache here"
        raise CheckpointError(f"model {model!r}{at} could not be had from the hub: {reason}") from error


def weight_files(directory: Path) -> list[Path]:
    """The files of weights: `model.safetensors`, or those that the index names.

    Raises:
        CheckpointError: one of them is missing.
    """
    if (directory / INDEX_FILE).exists():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map")
        paths = [directory / str(name) for name in sorted(set(weight_map.values()))]
    else:
        paths = [directory / SINGLE_FILE]
        if not paths[0].exists():
            raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        shown = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        raise CheckpointError(f"{directory} lacks files that {INDEX_FILE} names: {len(absent)} missing ({shown})")
    return paths


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: the file is missing, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing from {path.parent}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def read_model_config(directory: Path) -> ModelConfig:
    """`config.json` (flat as published, or nested in `text_config` as transformers 5 writes it) and the end tokens.

    Raises:
        CheckpointError: a file or field is missing, or the model is of a family that this runtime does not serve.
    """
    raw = read_json(directory / "config.json")
    if raw.get("model_type") != "qwen2_5_vl":
        raise CheckpointError(f"model_type is {raw.get('model_type')!r}; this runtime serves 'qwen2_5_vl'")
    text = {**{k: v for k, v in raw.items() if not isinstance(v, dict)}, **raw.get("text_config", {})}
    for nested in ("rope_scaling", "rope_parameters"):
        text.setdefault(nested, raw.get(nested))
    eos_token_ids = _eos_token_ids(directory, text)
    try:
        return ModelConfig(
            model_type="qwen2_5_vl",
            text=_text_config(text, tied=raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            vision=_vision_config(raw["vision_config"]),
            image_token_id=raw["image_token_id"],
            vision_start_token_id=raw["vision_start_token_id"],
            vision_end_token_id=raw["vision_end_token_id"],
            eos_token_ids=eos_token_ids,
            dtype=_dtype(raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or "float32"),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks the field {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / 'config.json'} is malformed: {error}") from error


def read_processor_config(directory: Path) -> ProcessorConfig:
    """`preprocessor_config.json`, or its part of `processor_config.json` as transformers 5 writes it: pixel limits (old
    names, or `size.shortest_edge` and `longest_edge`), mean and deviation.

    Raises:
        CheckpointError: both files are missing, the limits are no limits, or a size is none; names file and field.
    """
    path = directory / "preprocessor_config.json"
    nested = directory / "processor_config.json"
    if path.exists() or not nested.exists():
        raw = read_json(path)
    else:
        path, raw = nested, read_json(nested).get("image_processor") or {}
    size = raw.get("size") or {}
    min_pixels = raw.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    max_pixels = raw.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    if not (isinstance(min_pixels, int) and isinstance(max_pixels, int) and 0 < min_pixels <= max_pixels):
        raise CheckpointError(f"{path.name}: min_pixels {min_pixels}, max_pixels {max_pixels}")
    mean = _triple(raw, "image_mean", default=(0.48145466, 0.4578275, 0.40821073))
    std = _triple(raw, "image_std", default=(0.26862954, 0.26130258, 0.27577711))
    if min(std) <= 0:
        raise CheckpointError(f"{path.name}: image_std {list(std)} must be positive")
    try:
        sizes = {
            name: _size(raw, name)
            for name in ("patch_size", "merge_size", "temporal_patch_size")
            if raw.get(name, None) is not None
        }
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return ProcessorConfig(min_pixels=min_pixels, max_pixels=max_pixels, image_mean=mean, image_std=std, **sizes)


def _text_config(raw: dict[str, Any], *, tied: bool) -> TextConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    hidden_size = _size(raw, "hidden_size")
    head_dim = _size(raw, "head_dim", default=hidden_size // heads)
    section = tuple(rope.get("mrope_section") or ())
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise CheckpointError(
            f"mrope_section {list(section)} must have three parts that sum to head_dim / 2 = {head_dim // 2}"
        )
    return TextConfig(
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_hidden_layers=_size(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 1e6),
        mrope_section=(section[0], section[1], section[2]),
        vocab_size=_size(raw, "vocab_size"),
        max_position_embeddings=_size(raw, "max_position_embeddings", default=32768),
        tie_word_embeddings=tied,
    )


def _vision_config(raw: Any) -> VisionConfig:
    if not isinstance(raw, dict):
        raise CheckpointError(f"vision_config is {raw!r}; it must be an object")
    return VisionConfig(
        depth=_size(raw, "depth"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        num_heads=_size(raw, "num_heads"),
        in_channels=_size(raw, "in_chans", default=raw.get("in_channels") or 3),
        out_hidden_size=_size(raw, "out_hidden_size"),
        patch_size=_size(raw, "patch_size", default=14),
        temporal_patch_size=_size(raw, "temporal_patch_size", default=2),
        spatial_merge_size=_size(raw, "spatial_merge_size", default=2),
        window_size=_size(raw, "window_size", default=112),
        fullatt_block_indexes=tuple(int(index) for index in raw["fullatt_block_indexes"]),
    )


def _size(raw: dict[str, Any], name: str, *, default: int | None = None) -> int:
    """A positive whole number of the file; `null` is as good as absent.

    Raises:
        KeyError: it is absent and has no default.
        CheckpointError: it is something else.
    """
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise KeyError(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def _eos_token_ids(directory: Path, text: dict[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        path = directory / "config.json"
        value = text.get("eos_token_id")
    if value is None:
        raise CheckpointError(f"neither generation_config.json nor config.json in {directory} names an eos_token_id")
    token_ids = value if isinstance(value, list) else [value]
    if not token_ids or not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be one token id, or several")
    return tuple(token_ids)


def _dtype(name: str) -> Dtype:
    for known in ("float32", "bfloat16", "float16"):
        if name == known:
            return known
    raise CheckpointError(f"dtype {name!r} is none of float32, bfloat16, float16")


def _triple(raw: dict[str, Any], name: str, *, default: tuple[float, float, float]) -> tuple[float, float, float]:
    values = raw.get(name, default)
    try:
        a, b, c = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is {values!r}; it must be three numbers") from error
    if not all(map(math.isfinite, (a, b, c))):
        raise CheckpointError(f"{name} {values!r} is not finite")
    return (a, b, c)
