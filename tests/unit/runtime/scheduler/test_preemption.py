"""Requests that lose their blocks, and go on where they were."""

from tests.unit.runtime.scheduler.builders import parts, picture, request, run_until_done, scheduler, stats, step


def test_the_newest_request_is_preempted_and_resumes_with_its_output() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=6))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    step(target)
    # The next token of both needs a fourth block, and there are none: "b" gives up its three.
    output, _ = step(target)
    assert parts(output) == [("a", 12, 1)]
    assert stats(target).num_preemptions == 1
    assert (stats(target).num_waiting, stats(target).num_running) == (1, 1)
    assert len(run_until_done(target)["b"]) == 4
    assert stats(target).num_blocks_used == 0


def test_a_preempted_request_computes_prompt_and_output_again_before_the_next_token() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    seen = [parts(step(target)[0]) for _ in range(5)]
    assert seen[-1] == [("b", 0, 13)]
    assert step(target)[0].requests[0].num_computed_tokens == 13


def test_a_preempted_request_stands_before_those_that_never_ran() -> None:
    target = scheduler(num_blocks=7, max_num_seqs=2, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    target.add(request("c", range(300, 303), max_tokens=6))
    for _ in range(4):
        step(target)
    assert [part[0] for part in parts(step(target)[0])] == ["b", "c"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    step(target)
    target.add(request("c", 2))
    assert parts(step(target)[0]) == [("a", 12, 1)]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    target = scheduler(num_blocks=7)
    target.add(request("a", 11, max_tokens=2))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    target._preempt(target._running.pop())
    step(target)
    assert parts(step(target)[0]) == [("b", 12, 1)]
    assert stats(target).prefix_cache_query_tokens == 22


def test_a_preempted_request_lets_go_of_its_pictures() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("a", 30, images=[picture("x", 2, 20)]))
    step(target)
    target._preempt(target._running.pop())
    target.check_integrity()
    output, _ = step(target)
    assert (parts(output), output.images) == ([("a", 8, 8)], ())


def test_a_request_waits_until_all_that_is_known_of_it_fits() -> None:
    target = scheduler(num_blocks=9, max_num_batched_tokens=12)
    target.add(request("a", 16, max_tokens=1))
    target.add(request("b", range(200, 220), max_tokens=2))
    step(target)
    # Four blocks are free and the next chunk of "b" would take two, but its prompt needs five.
    assert parts(step(target)[0]) == [("a", 12, 4)]
    assert parts(step(target)[0]) == [("b", 0, 12)]
