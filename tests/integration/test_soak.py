"""Hundreds of different pictures, good and bad: memory and file descriptors of every process stay where they were."""

import io
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.http_server import MODEL, chat, data_url, image_part, picture
from tests.served_process import Fovea, ProcessUsage, serving

# The KV cache is planned memory of which untouched pages cost nothing: a small one is touched wholly before we look.
FLAGS = (
    *("--kv-cache-memory-bytes", "4MiB"),
    *("--memory-bytes", "1GiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--max-model-len", "512"),
    *("--served-model-name", MODEL, "--max-queue-len", "16"),
)
SIDE = 224
NUM_PICTURES = 500
# Their pixels have 75 MB, and their files as much in base64. What one process may grow by is a fifth of it.
MAX_GROWTH_BYTES = 15 << 20


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint, *FLAGS) as server:
        yield server


def noise_file(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def ask(fovea: Fovea, seed: int, max_tokens: int = 2) -> int:
    return fovea.post(chat([image_part(noise_file(seed))], max_tokens=max_tokens, stream=seed % 2 == 0)).status_code


def settled(fovea: Fovea) -> dict[str, ProcessUsage]:
    fovea.wait_idle()
    return fovea.usage()


def assert_flat(before: dict[str, ProcessUsage], after: dict[str, ProcessUsage]) -> None:
    for name, usage in after.items():
        assert usage.pss_bytes - before[name].pss_bytes < MAX_GROWTH_BYTES, (name, before, after)
        # Idle connections of the test's own client come and go.
        assert usage.num_descriptors - before[name].num_descriptors <= 8, (name, before, after)


def test_different_pictures_leave_memory_flat(fovea: Fovea) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda seed: ask(fovea, seed), range(150))) == {200}
        before = settled(fovea)
        assert set(pool.map(lambda seed: ask(fovea, seed), range(1000, 1000 + NUM_PICTURES))) == {200}
    after = settled(fovea)
    metrics = fovea.metrics()
    assert metrics["fovea_images_encoded_total", ()] >= NUM_PICTURES + 150
    assert metrics["fovea_encoder_cache_used_tokens", ()] <= metrics["fovea_encoder_cache_tokens", ()]
    assert metrics["fovea_kv_cache_used_blocks", ()] == 0
    assert_flat(before, after)


def test_waiting_pictures_stay_within_the_memory_plan(tiny_checkpoint: Path) -> None:
    """A hundred streams at a time whose pixels have four times the room that the plan has for those in the engine."""
    flags = (*FLAGS, "--request-memory-bytes", "4MiB", "--max-queue-len", "128")
    with serving(tiny_checkpoint, *flags) as fovea, ThreadPoolExecutor(100) as pool:
        assert fovea.metrics()["fovea_memory_bytes", ("requests",)] == 4 << 20
        answers = pool.map(lambda seed: ask(fovea, seed, max_tokens=16), range(5000, 5400))
        readings = []
        for number, status in enumerate(answers):
            assert status == 200
            if number % 40 == 0:
                readings.append(fovea.metrics()["fovea_memory_unplanned_bytes", ()])
        fovea.wait_idle()
        readings.append(fovea.metrics()["fovea_memory_unplanned_bytes", ()])
        assert max(readings) <= 0


def test_bad_pictures_leave_memory_flat(fovea: Fovea) -> None:
    whole = noise_file(1)
    bad = [data_url(data) for data in (whole[:-5000], b"x" * 100_000, whole[:100], picture(2000, 5))]

    def refuse(number: int) -> int:
        url = bad[number % len(bad)]
        return fovea.post(chat([{"type": "image_url", "image_url": {"url": url}}])).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(refuse, range(50))) == {400}
        before = settled(fovea)
        assert set(pool.map(refuse, range(500))) == {400}
    assert_flat(before, settled(fovea))


def test_clients_that_leave_leave_memory_flat(fovea: Fovea) -> None:
    def leave(seed: int) -> None:
        body = chat([image_part(noise_file(seed))], stream=True, ignore_eos=True)
        with fovea.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            next(response.iter_lines())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(3000, 3060)))
        before = settled(fovea)
        list(pool.map(leave, range(4000, 4200)))
    assert_flat(before, settled(fovea))
