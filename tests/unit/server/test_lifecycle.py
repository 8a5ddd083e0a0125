import asyncio

import pytest

from server.lifecycle import AbortReason, Lifecycle, RequestEndedError


async def ended_by(*reasons: AbortReason) -> AbortReason:
    """Why a request ended that was told so for these reasons, one after another."""
    lifecycle = Lifecycle()

    async def work() -> None:
        async with lifecycle.request(60) as life:
            assert lifecycle.num_in_flight == 1
            for reason in reasons:
                asyncio.get_running_loop().call_soon(life.end, reason)
            await asyncio.sleep(60)

    with pytest.raises(RequestEndedError) as caught:
        await work()
    assert lifecycle.num_in_flight == 0
    await asyncio.sleep(0)  # nothing is left to cancel
    return caught.value.reason


def test_ended_request_raises_with_its_reason() -> None:
    assert asyncio.run(ended_by("disconnect")) == "disconnect"


def test_first_reason_counts() -> None:
    assert asyncio.run(ended_by("timeout", "disconnect")) == "timeout"


def test_end_after_the_last_await_strikes_nobody_else() -> None:
    async def run() -> None:
        with pytest.raises(RequestEndedError):
            async with Lifecycle().request(60) as life:
                life.end("disconnect")
        await asyncio.sleep(0)

    asyncio.run(run())


def test_time_is_up() -> None:
    async def run() -> None:
        with pytest.raises(RequestEndedError, match="timeout"):
            async with Lifecycle().request(0.01):
                await asyncio.sleep(60)

    asyncio.run(run())


def test_cancellation_from_outside_stays_a_cancellation() -> None:
    async def run() -> None:
        async def work() -> None:
            async with Lifecycle().request(60):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_drain_waits_for_what_is_in_flight() -> None:
    async def run() -> None:
        lifecycle = Lifecycle()
        lifecycle.become_ready()
        may_end = asyncio.Event()

        async def work() -> str:
            async with lifecycle.request(60):
                await may_end.wait()
            return "done"

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        drain = asyncio.create_task(lifecycle.drain(60))
        await asyncio.sleep(0)
        assert lifecycle.phase == "draining"
        assert not lifecycle.ended.is_set()
        may_end.set()
        await drain
        assert await task == "done"
        assert lifecycle.ended.is_set()

    asyncio.run(run())


def test_drain_cuts_off_what_takes_too_long() -> None:
    async def run() -> None:
        lifecycle = Lifecycle()

        async def work() -> None:
            async with lifecycle.request(60):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await lifecycle.drain(0)
        with pytest.raises(RequestEndedError, match="drain"):
            await task

    asyncio.run(run())


def test_phases_only_move_forward() -> None:
    async def run() -> None:
        lifecycle = Lifecycle()
        lifecycle.die("first")
        lifecycle.become_ready()
        await lifecycle.drain(1)
        lifecycle.die("second")
        assert lifecycle.phase == "dead"
        assert lifecycle.failure == "first"
        assert lifecycle.ended.is_set()

    asyncio.run(run())
