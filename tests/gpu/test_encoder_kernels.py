"""The encoder on a GPU: varlen_attn equals SDPA, compiled equals eager, packed equals single, one graph for all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.executor.cuda_graphs import CudaGraphBackend, TorchCapture
from runtime.executor.encoder_runner import EncoderProgram, StaticEncoderInputs
from runtime.executor.graphs import Bucket, GraphSet
from runtime.model import qwen2_5_vl_vision
from runtime.model.varlen_attention import VarlenEncoderAttention
from tests.gpu.places import CUDA, SmallModel, load_small_model, relative_error

pytestmark = pytest.mark.gpu

SIDE = 28
# bfloat16 keeps 8 bits; four layers of it in another order of summation.
TOLERANCE = 5e-2


@pytest.fixture(scope="module")
def plain(small_model_directory: Path) -> SmallModel:
    return load_small_model(small_model_directory)


@pytest.fixture(scope="module")
def varlen(small_model_directory: Path) -> SmallModel:
    return load_small_model(small_model_directory, encoder_attention=VarlenEncoderAttention())


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    sizes = ((4, 4), (5, 9), (1, 13), (16, 16))
    return [generator.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8) for rows, columns in sizes]


def program(small: SmallModel) -> EncoderProgram:
    return EncoderProgram(small.model.vision, small.config.vision, CUDA)


@torch.inference_mode()
def rows(small: SmallModel, images: list[np.ndarray]) -> Tensor:
    return program(small).eager(images).clone()


def test_varlen_equals_sdpa(plain: SmallModel, varlen: SmallModel) -> None:
    assert relative_error(rows(varlen, pictures()), rows(plain, pictures())) < TOLERANCE


def test_packed_equals_single(varlen: SmallModel) -> None:
    packed = rows(varlen, pictures())
    single = torch.cat([rows(varlen, [image]) for image in pictures()])
    assert relative_error(packed, single) < TOLERANCE


def test_compiled_equals_eager(varlen: SmallModel) -> None:
    expected = rows(varlen, pictures())
    vision = varlen.model.vision
    vision.compile_layers()
    try:
        assert relative_error(rows(varlen, pictures()), expected) < TOLERANCE
        assert relative_error(rows(varlen, pictures()[:1]), expected[:16]) < TOLERANCE
    finally:
        vision.between = qwen2_5_vl_vision.between


@pytest.mark.parametrize("is_compiled", [False, True])
@torch.inference_mode()
def test_graph_serves_any_images_of_its_budget(varlen: SmallModel, is_compiled: bool) -> None:
    images = pictures()
    expected = [rows(varlen, [image]) for image in images]
    vision = varlen.model.vision
    if is_compiled:
        vision.compile_layers()
    try:
        graphs: GraphSet[StaticEncoderInputs] = GraphSet(
            "encoder",
            [Bucket(name="384", tokens=384, max_items=4), Bucket(name="64", tokens=64, max_items=4)],
            backend=CudaGraphBackend(TorchCapture(CUDA, lambda: torch.cuda.memory_reserved(CUDA))),
            strict=True,
        )
        encoder = program(varlen)
        graphs.capture(encoder)
        for chosen in ([0], [0, 1, 2], [3, 0], [1]):
            tokens = sum(encoder.num_tokens(images[index]) for index in chosen)
            bucket = graphs.choose(tokens=tokens, items=len(chosen))
            assert isinstance(bucket, Bucket)
            encoder.fill(bucket, graphs.inputs(bucket), [images[index] for index in chosen])
            output = graphs.replay(bucket, tokens=tokens, items=len(chosen))
            assert torch.isfinite(output).all()
            wanted = torch.cat([expected[index] for index in chosen])
            assert relative_error(output[:tokens], wanted) < TOLERANCE
    finally:
        vision.between = qwen2_5_vl_vision.between
