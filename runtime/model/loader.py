"""Loads a checkpoint's weights into our modules. Reads safetensors, memory-mapped; knows no family's architecture.

Each tensor is copied from the mapping straight to its place, cast on the way: no second copy of the model exists.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from runtime.checkpoint import CheckpointError, ModelConfig, ProcessorConfig, read_processor_config, weight_files
from runtime.config import LoadFormat
from runtime.model.attention import EncoderAttention
from runtime.model.layers import Linear, Place, WeightTargets
from runtime.model.packed import PackedWeight
from runtime.model.qwen2_5_vl_text import TextDecoder
from runtime.model.qwen2_5_vl_vision import VisionEncoder
from runtime.model.random_weights import fill_randomly
from runtime.model.registry import family
from runtime.model.sdpa import SdpaEncoderAttention

# Old checkpoints hold these tables, which are computed from the configuration.
COMPUTED_SUFFIX = ".inv_freq"

# How many names an error shows.
MAX_NAMES = 5

# A decoder with more in its products is not packed: the copy would cost more memory than it is worth.
MAX_SECOND_COPY_BYTES = 256 << 20

# The width that cuBLAS wants of the encoder's MLP (docs/decisions.md).
CUDA_MLP_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run. `text` is None when only the encoder was asked for."""

    vision: VisionEncoder
    text: TextDecoder | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and tables; a tied table counts once."""
        tensors = [
            tensor for module in self._modules for part in (module.parameters(), module.buffers()) for tensor in part
        ]
        return sum(tensor.nbytes for tensor in tensors) + sum(packed.nbytes for packed in self._packed)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that multiplies, the head apart."""
        return tuple(module for tower in self._modules for module in tower.modules() if isinstance(module, Linear))

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return (self.vision,) if self.text is None else (self.vision, self.text)

    @property
    def _packed(self) -> list[PackedWeight]:
        packed = [linear.packed for linear in self.linears if linear.packed is not None]
        if self.text is not None and self.text.packed_head is not None:
            packed.append(self.text.packed_head)
        return packed

    def compile_layers(self, *, has_fused_text: bool = False) -> None:
        """Both towers run through Inductor from now on, or the encoder alone; the first forward of each compiles it."""
        self.vision.compile_layers()
        if self.text is not None and not has_fused_text:
            self.text.compile_layers()

    def pack_products(self) -> None:
        """Products go through oneDNN from now on. The encoder's weights are packed in their place; the decoder's are
        packed beside them, if that takes no more than `MAX_SECOND_COPY_BYTES`: its products of one row want them plain.
        """
        for module in self.vision.modules():
            if isinstance(module, Linear):
                module.pack(keep=False)
        if self.text is not None and self.text.product_bytes <= MAX_SECOND_COPY_BYTES:
            self.text.pack_products()


def load_model(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    processor: ProcessorConfig | None = None,
    encoder_attention: EncoderAttention | None = None,
    parts: Literal["all", "vision"] = "all",
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> LoadedModel:
    """The model of a checkpoint, on `device` in `dtype`.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
        processor: mean and deviation of pixels; read from the directory by default.
        encoder_attention: SDPA by default.
        parts: `vision` leaves the decoder out and does not look at its weights.
        load_format: `random` makes weights up from `seed`, and the directory needs no weight files.

    Raises:
        CheckpointError: a file is missing or broken, or tensors are missing, unexpected, or of another shape.
    """
    kind = family(config.model_type)
    place = Place(dtype=dtype, device=device)
    vision = kind.vision(
        config.vision,
        processor or read_processor_config(directory),
        encoder_attention or SdpaEncoderAttention(),
        mlp_multiple=mlp_multiple(device),
        **place,
    )
    text = kind.text(config.text, **place) if parts == "all" else None
    targets = vision.targets(kind.vision_prefix)
    if text is not None:
        targets |= text.targets()

    def is_wanted(name: str) -> bool:
        if name.endswith(COMPUTED_SUFFIX) or (name == "lm_head.weight" and config.text.tie_word_embeddings):
            return False
        return text is not None or name.startswith(f"{kind.vision_prefix}.")

    if load_format == "random":
        fill_randomly(targets, dtype=dtype, device=device, seed=seed)
    else:
        _fill(targets, directory, kind.published_name, is_wanted)
    return LoadedModel(vision=vision, text=text)


def mlp_multiple(device: torch.device) -> int:
    """What the width of the encoder's MLP is padded to a multiple of."""
    return 1 if device.type == "cpu" else CUDA_MLP_MULTIPLE


def _fill(
    targets: WeightTargets, directory: Path, published_name: Callable[[str], str], is_wanted: Callable[[str], bool]
) -> None:
    missing = set(targets)
    unexpected: list[str] = []
    with torch.no_grad():
        for name, read in _tensors(directory):
            published = published_name(name)
            if not is_wanted(published):
                continue
            if published not in targets:
                unexpected.append(name)
                continue
            tensor = read()
            target = targets[published]
            if tuple(tensor.shape) != target.shape or not tensor.is_floating_point():
                raise CheckpointError(
                    f"tensor {name} of {directory} is {tensor.dtype} of shape {list(tensor.shape)}; "
                    f"config.json asks for floating point of shape {list(target.shape)}"
                )
            target.write(tensor)
            missing.discard(published)
    if missing or unexpected:
        problems = f"tensors {_names(missing, 'missing')}, {_names(unexpected, 'unexpected')}"
        raise CheckpointError(f"{directory} does not fit its config.json: {problems}")


def _tensors(directory: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names, and what maps the tensor of that name into memory, file by file."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names: list[str] = file.keys()
                for name in names:
                    yield name, partial(file.get_tensor, name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no complete safetensors file: {error}") from error


def _names(names: Collection[str], what: str) -> str:
    """`2 missing (a, b)`, with the first few names."""
    shown = sorted(names)[:MAX_NAMES]
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"{len(names)} {what}" + (f" ({', '.join(shown)}{more})" if shown else "")
