"""Faults that other servers had, by their numbers in the list of public reports, and the tests that would show them.

Most are in `tests/integration/test_public_reports.py`, on a whole server without a network, where a test's name ends
with its report's number.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HERE = "integration/test_public_reports.py"
ERRORS = "integration/test_http_errors.py"
CHAT = "integration/test_http_chat.py"
ENGINE = "integration/test_http_engine.py"
FAILURES = "integration/test_failures.py"
LIFECYCLE = "integration/test_http_lifecycle.py"
REMOTE = "integration/test_http_remote_images.py"
FETCH = "unit/server/test_image_fetch.py"
SCHEMAS = "unit/server/test_schemas.py"
CHECKPOINT = "unit/runtime/test_checkpoint.py"
TEMPLATE = "unit/runtime/processing/test_chat_template.py"

# What broke, what is right, and where that is tested.
REPORTS: dict[int, tuple[str, str, tuple[str, ...]]] = {
    1: (
        "picture for a model that sees none: 500",
        "such a model is refused at the start, and a part that is not served by its place",
        (f"{CHECKPOINT}::test_what_is_wrong_with_a_config_is_named", f"{SCHEMAS}::test_refused_field_is_named"),
    ),
    2: (
        "URL that nobody answers: 500",
        "400, names the picture",
        (f"{REMOTE}::test_what_is_no_picture_is_the_requests_fault",),
    ),
    3: ("what is no URL: 500", "400, names the picture", (f"{ERRORS}::test_bad_pictures_are_named",)),
    4: (
        "fetch failed: 200 without the picture",
        "400, one try",
        (f"{REMOTE}::test_what_is_no_picture_is_the_requests_fault",),
    ),
    5: (
        "slow host of pictures: 500",
        "a deadline, and nobody else waits",
        (f"{FETCH}::test_slow_server_is_left_after_the_deadline", f"{REMOTE}::test_slow_host_delays_nobody_else"),
    ),
    6: ("file cut off: 500", "400, names the picture", (f"{ERRORS}::test_bad_pictures_are_named",)),
    7: ("500 x 19 pixels: 500", "served", ()),
    8: (
        "one pixel stops the server",
        "served, and so is the next",
        (f"{ENGINE}::test_bad_pictures_leave_the_engine_as_it_was",),
    ),
    9: ("large picture exceeds the encoder's budget", "reduced to it", ()),
    10: ("base64 counted as text", "the picture's tokens only", (f"{ERRORS}::test_base64_of_a_picture_is_no_text",)),
    11: ("nobody can foresee a picture's tokens", "usage tells them exactly", ()),
    12: ("second picture refused", "400 with both numbers beyond the limit", (f"{ERRORS}::test_too_many_pictures",)),
    13: ("too many pictures in a stream: silence", "400, streamed too", (f"{ERRORS}::test_too_many_pictures",)),
    14: ("eleventh picture: 500", "served, or 400 with both numbers", ()),
    15: (
        "refusal within a stream of status 200",
        "400",
        (f"{ERRORS}::test_more_tokens_than_the_context_has_room_for", "integration/test_contract.py::test_refused"),
    ),
    16: ("body taken for a query: 422", "200", (f"{ENGINE}::test_official_client_chats_about_a_picture",)),
    17: ("http(s) URL: unclear error", "400 that says what is disabled", ()),
    18: ("WEBP refused", "served", ()),
    19: ("list of one text refused", "the same as the text", ()),
    20: (
        "error that repeats the whole conversation",
        "400 that repeats nothing",
        (f"{ERRORS}::test_errors_do_not_repeat_what_was_sent", f"{SCHEMAS}::test_refusal_repeats_nothing"),
    ),
    21: ("picture from the official client: 422", "200", (f"{ENGINE}::test_official_client_chats_about_a_picture",)),
    22: ("picture without words, then words: it hangs", "both served", ()),
    23: (
        "pictures moved in front of the texts",
        "the order of the parts",
        (
            f"{CHAT}::test_pictures_reach_the_engine_in_order_with_their_places",
            f"{TEMPLATE}::test_order_of_texts_and_images_is_kept",
        ),
    ),
    24: ("special tokens in a text crash", "they are text", (f"{CHAT}::test_special_tokens_in_text_stay_text",)),
    25: ("the server's own marks in a text: 400", "they are text", (f"{TEMPLATE}::test_text_of_any_role_stays_text",)),
    26: (
        "second picture in the history",
        "served, each with its picture",
        (f"{ENGINE}::test_pictures_matter_and_so_does_their_order",),
    ),
    27: ("third picture answered from the first", "each from its own", ()),
    28: (
        "equal bytes taken for one picture",
        "size and colours count",
        ("unit/server/test_image_decode.py::test_hash_tells_pictures_of_equal_bytes_apart",),
    ),
    29: (
        "pictures at the same time: 500, then it hangs",
        "each as alone",
        (f"{ENGINE}::test_requests_side_by_side_answer_as_alone",),
    ),
    30: ("two streams end the server", "both end", ()),
    31: (
        "goes on when nobody listens",
        "nothing runs within a step",
        (
            f"{LIFECYCLE}::test_client_that_leaves_a_stream_aborts_it",
            f"{LIFECYCLE}::test_client_that_leaves_before_the_answer_aborts_it",
            f"{ENGINE}::test_client_that_leaves_frees_its_blocks",
            f"{FAILURES}::test_clients_that_leave_at_any_time_leave_nothing_behind",
        ),
    ),
    32: (
        "memory grows with different pictures",
        "flat over 500",
        ("integration/test_soak.py::test_different_pictures_leave_memory_flat",),
    ),
    33: ("needs the internet for pictures", "works with all sockets closed", ()),
    34: (
        "picture for a model without a template for them",
        "the start stops",
        (
            f"{TEMPLATE}::test_template_that_drops_images_stops_the_start",
            f"{CHECKPOINT}::test_what_is_wrong_with_a_config_is_named",
        ),
    ),
    35: ("huge picture: minutes, a gigabyte, and its base64 logged", "refused from its header, not logged", ()),
    36: ("URL with its secrets logged", "scheme and host only", (f"{FETCH}::test_log_has_no_path_and_no_query",)),
    37: (
        "stream held up by proxies",
        "headers that tell them, and a first chunk at once",
        (f"{CHAT}::test_sequence_of_a_stream_is_exact",),
    ),
    38: (
        "role or calls null, index missing",
        "never null, always there",
        (
            f"{CHAT}::test_sequence_of_a_stream_is_exact",
            "integration/test_contract.py::test_stream",
            "integration/test_contract.py::test_answer",
            "clients/test_clients.py::test_client_gets_text_picture_and_stream",
        ),
    ),
    39: ("usage without choices", "`choices` is an empty list", (f"{CHAT}::test_sequence_of_a_stream_is_exact",)),
    40: ("no reason at the end", "stop or length", ()),
    41: (
        "orientation ignored",
        "turned upright",
        ("unit/server/test_image_decode.py::test_every_exif_orientation_equals_the_upright_picture",),
    ),
    42: (
        "one resolution for all",
        "`detail` chooses",
        ("integration/test_http_limits.py::test_detail_is_a_budget_of_pixels_down_to_the_usage",),
    ),
    43: (
        "healthy while the engine is dead or hangs",
        "503",
        (
            f"{LIFECYCLE}::test_hung_engine_fails_liveness",
            f"{LIFECYCLE}::test_engine_death_ends_what_is_in_flight",
            f"{FAILURES}::test_hung_engine_fails_the_probes_and_does_not_keep_the_process_from_ending",
        ),
    ),
    44: (
        "signal aborts what is in flight",
        "it ends, and new requests are refused",
        (
            f"{FAILURES}::test_signal_under_load_lets_every_stream_end",
            f"{LIFECYCLE}::test_sigterm_finishes_the_stream_and_exits_with_zero",
        ),
    ),
}


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_every_report_of_the_list_is_here() -> None:
    assert list(REPORTS) == list(range(1, 45))


@pytest.mark.parametrize("number", REPORTS)
def test_report_has_its_tests(number: int) -> None:
    _, _, elsewhere = REPORTS[number]
    by_number = [name for name in names_in(HERE) if name.endswith(f"_{number}")]
    assert by_number or elsewhere
    for place in elsewhere:
        path, _, name = place.partition("::")
        assert name in names_in(path), place


def test_numbers_in_names_are_those_of_reports() -> None:
    for name in names_in(HERE):
        found = re.search(r"_(\d+)$", name)
        assert found, name
        assert int(found[1]) in REPORTS, name
