"""The model families that the runtime serves, by `model_type`. Knows their classes, and no files."""

from dataclasses import dataclass

from runtime.checkpoint import CheckpointError
from runtime.model.qwen2_5_vl_text import TextDecoder
from runtime.model.qwen2_5_vl_vision import VisionEncoder


@dataclass(frozen=True, kw_only=True)
class Family:
    """Classes of one family, and how its checkpoints name their tensors.

    `renamed_prefixes`: prefixes that some checkpoints use (transformers 5 calls its modules so), and published ones.
    """

    vision: type[VisionEncoder]
    text: type[TextDecoder]
    vision_prefix: str
    renamed_prefixes: tuple[tuple[str, str], ...]

    def published_name(self, name: str) -> str:
        """The name that the published checkpoints give the tensor `name`."""
        for prefix, published in self.renamed_prefixes:
            if name.startswith(prefix):
                return published + name[len(prefix) :]
        return name


def family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        CheckpointError: this runtime does not serve it.
    """
    if model_type != "qwen2_5_vl":
        raise CheckpointError(f"model_type is {model_type!r}; this runtime serves 'qwen2_5_vl'")
    return Family(
        vision=VisionEncoder,
        text=TextDecoder,
        vision_prefix="visual",
        renamed_prefixes=(("model.language_model.", "model."), ("model.visual.", "visual.")),
    )
