"""The loader through its real worker processes: limits, refusals, deaths, and what a worker imports."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from server import image_pool
from server.image_decode import DecodeOptions, decode
from server.images import ImageError, ImageLoader, ImagePoolClosedError, LoadedImage


def png(*, size: tuple[int, int] = (84, 56), colour: Any = (200, 0, 0)) -> bytes:
    stream = BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return stream.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@asynccontextmanager
async def loader(**options: Any) -> AsyncIterator[ImageLoader]:
    images = ImageLoader(**{"factor": 28, "min_pixels": 3136, "max_pixels": 200_704, "num_workers": 1, **options})
    await images.start()
    try:
        yield images
    finally:
        await images.close()


OPTIONS = {"max_source_pixels": 10**6, "factor": 28, "min_pixels": 3136, "max_pixels": 200_704}


async def refusal(images: ImageLoader, bad_url: str) -> ImageError:
    with pytest.raises(ImageError) as caught:
        await images.load(bad_url)
    assert "0x" not in caught.value.message
    return caught.value


def test_picture_comes_back_as_decoding_in_process_gives_it() -> None:
    async def run() -> LoadedImage:
        async with loader() as images:
            return await images.load(url(data))

    generator = np.random.default_rng(0)
    stream = BytesIO()
    Image.fromarray(generator.integers(0, 256, (300, 401, 3), dtype=np.uint8)).save(stream, "PNG")
    data = stream.getvalue()
    got = asyncio.run(run())
    expected = decode(data, DecodeOptions(**OPTIONS))
    np.testing.assert_array_equal(got.pixels, expected.pixels)
    assert got.pixels.dtype == np.uint8
    assert got.image_hash == expected.image_hash
    assert (got.format, got.num_source_bytes) == ("png", len(data))
    assert (got.original_height, got.original_width) == (300, 401)
    assert (got.height, got.width) == got.pixels.shape[:2]


def test_refusals_name_their_reason_and_the_next_picture_works() -> None:
    async def run() -> None:
        async with loader(max_bytes=5000, max_source_pixels=10_000) as images:
            for bad, code, words in [
                (url(b"rubbish"), "invalid_image", "not an image"),
                (url(png()[:60]), "invalid_image", "damaged"),
                (url(b"<svg/>"), "unsupported_image_format", "PNG, JPEG"),
                (url(png(size=(200, 200))), "image_too_large", "40000 pixels"),
                (url(b"\0" * 5001), "image_too_large", "5001 bytes; at most 5000"),
                (url(b"\0" * 50_000), "image_too_large", "more than 5000 bytes"),
                ("data:image/png;base64,A", "invalid_image_url", "cut off"),
                ("data:image/png,abc", "invalid_image_url", "not in base64"),
                (base64.b64encode(png()).decode(), "invalid_image_url", "bare base64"),
                ("", "invalid_image_url", "empty"),
                ("not a url", "invalid_image_url", "must be a data URL"),
                ("file:///etc/passwd", "invalid_image_url", "must be a data URL"),
                ("FILE://x", "invalid_image_url", "must be a data URL"),
                ("ftp://example.com/x.png", "invalid_image_url", "must be a data URL"),
                ("http://127.0.0.1:9/x.png?sig=secret", "invalid_image_url", "disabled"),
                (" HTTPS://example.com/x.png", "invalid_image_url", "disabled"),
            ]:
                error = await refusal(images, bad)
                assert (error.code, words in error.message) == (code, True), (bad[:40], error.message)
                assert "secret" not in error.message
            assert (await images.load(url(png()))).pixels.shape == (56, 84, 3)
            assert len(images.worker_pids) == 1

    asyncio.run(run())


def test_low_detail_gives_fewer_pixels() -> None:
    async def run() -> tuple[LoadedImage, ...]:
        async with loader() as images:
            return (
                await images.load(url(png(size=(800, 800))), "low"),
                await images.load(url(png(size=(800, 800))), "high"),
                await images.load(url(png(size=(800, 800)))),
            )

    low, high, auto = asyncio.run(run())
    assert low.height * low.width < high.height * high.width
    assert auto.image_hash == high.image_hash != low.image_hash


def test_fetched_bytes_take_the_same_way() -> None:
    async def fetch(address: str) -> bytes:
        assert address == "https://example.com/x.png"
        return png()

    async def fetch_too_much(_: str) -> bytes:
        return b"\0" * 6000

    async def run() -> None:
        async with loader(fetch=fetch) as images:
            assert (await images.load("https://example.com/x.png")).pixels.shape == (56, 84, 3)
        async with loader(fetch=fetch_too_much, max_bytes=5000) as images:
            assert (await refusal(images, "https://example.com/x.png")).code == "image_too_large"

    asyncio.run(run())


def test_many_pictures_at_once_keep_their_own_pixels() -> None:
    async def run() -> list[LoadedImage]:
        async with loader(num_workers=2) as images:
            return await asyncio.gather(*(images.load(url(png(colour=(i, 0, 0)))) for i in range(24)))

    assert [int(image.pixels[0, 0, 0]) for image in asyncio.run(run())] == list(range(24))


def test_worker_killed_before_a_picture_is_replaced() -> None:
    async def run() -> None:
        async with loader() as images:
            await images.load(url(png()))
            [pid] = images.worker_pids
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            await images.load(url(png()))
            assert images.worker_pids != [pid]

    asyncio.run(run())


def test_worker_killed_over_a_picture_fails_that_one_only() -> None:
    async def run() -> None:
        async with loader() as images:
            await images.load(url(png()))
            [pid] = images.worker_pids
            os.kill(pid, signal.SIGSTOP)
            stuck = asyncio.create_task(images.load(url(png())))
            waiting = asyncio.create_task(images.load(url(png(colour=(9, 9, 9)))))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ImageError, match="its decoder ended"):
                await stuck
            assert (await waiting).pixels[0, 0].tolist() == [9, 9, 9]

    asyncio.run(run())


def test_worker_that_takes_too_long_is_killed() -> None:
    async def run() -> None:
        async with loader(timeout_seconds=5.0) as images:
            await images.load(url(png()))
        async with loader(timeout_seconds=0.2) as images:
            [pid] = images.worker_pids
            os.kill(pid, signal.SIGSTOP)
            error = await refusal(images, url(png()))
            assert "within 0.2 seconds" in error.message
            assert pid not in images.worker_pids

    asyncio.run(run())


def test_caller_who_leaves_gives_the_worker_back() -> None:
    async def run() -> None:
        async with loader() as images:
            await images.load(url(png()))
            [pid] = images.worker_pids
            os.kill(pid, signal.SIGSTOP)
            left = asyncio.create_task(images.load(url(png())))
            await asyncio.sleep(0.05)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            os.kill(pid, signal.SIGCONT)
            assert (await images.load(url(png(colour=(1, 2, 3))))).pixels[0, 0].tolist() == [1, 2, 3]
            assert images.worker_pids == [pid]

    asyncio.run(run())


def test_close_ends_the_processes_and_what_is_in_flight() -> None:
    async def run() -> int:
        images = ImageLoader(factor=28, min_pixels=3136, max_pixels=200_704, num_workers=1)
        await images.start()
        await images.load(url(png()))
        [pid] = images.worker_pids
        os.kill(pid, signal.SIGSTOP)
        loads = [asyncio.create_task(images.load(url(png()))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await images.close()
        await images.close()
        for load in loads:
            with pytest.raises(ImagePoolClosedError):
                await load
        assert images.worker_pids == []
        return pid

    pid = asyncio.run(run())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_worker_ends_with_its_input_and_not_by_the_groups_signals() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server.image_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        body = json.dumps({"num_bytes": 3, "encoding": "raw", "max_bytes": 9, **OPTIONS}).encode()
        request = len(body).to_bytes(4) + body + b"abc"
        process.stdin.write(request)
        process.stdin.flush()
        assert process.stdout.read(4)  # it runs, and its signals are set
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.stdin.write(request)
        process.stdin.close()
        assert process.stdout.read().count(b'"code": "invalid_image"') == 2
        assert process.wait(timeout=10) == 0


def test_worker_imports_only_what_it_needs(tmp_path: Path) -> None:
    # After a picture has been decoded, so that late imports count too.
    script = (
        "import sys, json; from server.image_worker import answer\n"
        "header, _ = answer(json.loads(sys.argv[1]), sys.stdin.buffer.read())\n"
        "assert header['num_bytes'], header\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    header = {"num_bytes": 0, "encoding": "raw", "max_bytes": 10**6, **OPTIONS}
    root = Path(image_pool.__file__).parent.parent
    output = subprocess.run(
        [sys.executable, "-c", script, json.dumps(header)],
        input=png(),
        capture_output=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    ).stdout
    allowed = {"PIL", "numpy", "server", "runtime", "sitecustomize", "usercustomize", "defusedxml", "olefile"}
    foreign = set(json.loads(output)) - set(sys.stdlib_module_names) - allowed
    assert {name for name in foreign if not name.startswith("_")} == set()


def test_loader_and_processing_import_no_torch() -> None:
    script = (
        "import sys, server.images, runtime.processing.prompt, runtime.processing.detokenizer\n"
        "import runtime.processing.positions\n"
        "print({'torch', 'transformers', 'fastapi', 'httpx'} & set(sys.modules))"
    )
    root = Path(image_pool.__file__).parent.parent
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=root).stdout
    assert output == b"set()\n"


def test_worker_count_leaves_cores_to_the_engine() -> None:
    assert image_pool.default_num_workers() in (1, 2)
