import asyncio
import threading

import pytest

from server import body_parser
from server.body_parser import MAX_INLINE_BODY_BYTES, MAX_INLINE_VALUES, BodyParser
from server.errors import InvalidRequestError
from server.tokenization import DetokenizeRequest

SMALL = b'{"tokens": [1, 2]}'
LONG = SMALL + b" " * MAX_INLINE_BODY_BYTES
MANY = b'{"tokens": [%b1]}' % (b"1," * MAX_INLINE_VALUES)


class Steps:
    """Stands in for `validated`: says who is in it, in which thread, and waits until it is told to go on."""

    def __init__(self) -> None:
        self.running: list[bytes] = []
        self.is_inline: list[bool] = []
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self, request_type: type[DetokenizeRequest], body: bytes) -> DetokenizeRequest:
        self.running.append(body)
        self.is_inline.append(threading.current_thread() is threading.main_thread())
        if not self.is_inline[-1]:
            self.has_begun.release()
            assert self.may_end.acquire(timeout=20)
        self.running.remove(body)
        return request_type(tokens=[])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setattr(body_parser, "validated", steps)
    return steps


async def begun(steps: Steps) -> None:
    assert await asyncio.to_thread(steps.has_begun.acquire, timeout=20)


def test_small_bodies_are_parsed_at_once_and_large_ones_in_a_thread(steps: Steps) -> None:
    async def parse() -> None:
        parser = BodyParser()
        for _ in range(2):
            steps.may_end.release()
        for body in (SMALL, LONG, MANY):
            await parser.parse(DetokenizeRequest, body)

    asyncio.run(parse())
    assert steps.is_inline == [True, False, False]


def test_large_bodies_wait_for_each_other_also_for_those_whose_client_has_left(steps: Steps) -> None:
    async def parse() -> None:
        parser = BodyParser()
        tasks = [asyncio.create_task(parser.parse(DetokenizeRequest, LONG + b" " * i)) for i in range(3)]
        await begun(steps)
        # The first one's client leaves, and so does the second one's, whose body is not kept for that.
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        await parser.parse(DetokenizeRequest, SMALL)
        assert [len(body) for body in steps.running] == [len(LONG)]
        assert not tasks[2].done()
        steps.may_end.release()
        await begun(steps)
        assert [len(body) for body in steps.running] == [len(LONG) + 2]
        steps.may_end.release()
        assert (await tasks[2]).tokens == []

    asyncio.run(parse())


@pytest.mark.parametrize("body", [b"[]", b"x" + b" " * MAX_INLINE_BODY_BYTES, MANY.replace(b"1]", b"-1]")])
def test_what_is_no_request_is_refused_and_the_next_one_parsed(body: bytes) -> None:
    async def parse() -> None:
        parser = BodyParser()
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await parser.parse(DetokenizeRequest, body)
        assert (await parser.parse(DetokenizeRequest, LONG)).tokens == [1, 2]

    asyncio.run(parse())
