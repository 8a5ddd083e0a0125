"""The page in a browser, over an engine that replays: what it does with questions, pictures, keys and trouble."""

from pathlib import Path

import pytest

from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import RunningServer, picture, running_server, wait_until
from tests.web.browser import PHONE, Browser, tokens_of
from tests.web.page_acts import (
    answer,
    ask,
    choose,
    drop,
    ended,
    fact,
    has_in_tray,
    opened,
    paste,
    scrolls_sideways,
)

TEXT = "There is a red circle and a blue square."


@pytest.fixture(autouse=True)
def _replay(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> None:
    if "server" in request.fixturenames:
        server: RunningServer = request.getfixturevalue("server")
        server.engine.replay = Replay(token_ids=tokens_of(tiny_checkpoint, TEXT))
        server.engine.requests.clear()
        server.engine.aborted.clear()


def slow(checkpoint: Path) -> Replay:
    return Replay(token_ids=tokens_of(checkpoint, TEXT * 50), delay_seconds=0.02)


def test_answer_is_the_engines_text(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    ask(page, "What do you see?")
    ended(page)
    assert answer(page) == TEXT
    assert page.text(".question p") == "What do you see?"
    assert fact(page, "completion") == str(len(server.engine.replay.token_ids))
    assert fact(page, "image") == ""
    assert page.text("#announcer") == f"Answered with {len(TEXT)} characters."


def test_pictures_come_by_drop_paste_and_choice(server: RunningServer, page: Browser, tmp_path: Path) -> None:
    opened(page, server.url)
    drop(page, picture(56, 56, "red"))
    has_in_tray(page, 1)
    paste(page, picture(56, 56, "blue"))
    has_in_tray(page, 2)
    choose(page, tmp_path, picture(56, 56, "lime"))
    has_in_tray(page, 3)
    page.click("#tray li:nth-child(2) button")
    has_in_tray(page, 2)
    ask(page, "Which colours?")
    ended(page)
    has_in_tray(page, 0)
    (request,) = server.engine.requests
    assert len(request.images) == 2
    reds, limes = [array[0, 0].tolist() for array in server.engine.pixels[-1]]
    assert (reds, limes) == ([255, 0, 0], [0, 255, 0])
    assert page.value("document.querySelectorAll('.question img').length") == 2


def test_following_questions_carry_what_was_said(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    drop(page, picture())
    has_in_tray(page, 1)
    ask(page, "What is it?")
    ended(page)
    ask(page, "Are you sure?")
    ended(page, 2)
    first, second = server.engine.requests
    assert len(first.images) == len(second.images) == 1
    said = len(server.engine.replay.token_ids)
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids) + said
    page.click("#new-chat")
    ask(page, "Something else?")
    ended(page)
    assert server.engine.requests[-1].images == ()


def test_drawn_picture_needs_no_file(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    page.click("#example")
    has_in_tray(page, 1)
    page.wait("document.querySelector('#question').value")
    page.press("Enter")
    ended(page)
    assert len(server.engine.requests[-1].images) == 1


def test_options_reach_the_engine(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    page.click("#options summary")
    page.run("document.querySelector('#max-tokens').value = 3; document.querySelector('#temperature').value = 0.5;")
    ask(page, "Hello?")
    ended(page)
    assert server.engine.requests[-1].sampling.max_tokens == 3
    assert server.engine.requests[-1].sampling.temperature == 0.5
    assert fact(page, "ending") == "token limit reached"


def test_stop_keeps_what_has_come(server: RunningServer, page: Browser, tiny_checkpoint: Path) -> None:
    server.engine.replay = slow(tiny_checkpoint)
    opened(page, server.url)
    ask(page, "Tell me all.")
    page.wait("document.querySelector('.answer .text').textContent.length > 20")
    assert page.value("document.querySelector('.answer').getAttribute('aria-busy')") == "true"
    page.click("#stop")
    ended(page)
    assert fact(page, "ending") == "stopped"
    assert 20 < len(answer(page)) < len(TEXT) * 50
    assert (TEXT * 50).startswith(answer(page))
    wait_until(lambda: len(server.engine.aborted) == 1)
    assert page.value("document.querySelector('#stop').hidden && !document.querySelector('#send').hidden")
    ask(page, "Go on.")
    page.wait("document.querySelectorAll('.answer')[1]?.querySelector('.text').textContent.length > 5")
    page.press("Escape")
    ended(page, 2)
    assert fact(page, "ending", 1) == "stopped"


def test_keyboard_alone_is_enough(server: RunningServer, page: Browser, tiny_checkpoint: Path) -> None:
    server.engine.replay = slow(tiny_checkpoint)
    opened(page, server.url)
    assert page.value("document.activeElement.id") == "question"
    page.run("document.querySelector('.skip').focus()")
    order = []
    while (focused := page.value("document.activeElement.id || document.activeElement.tagName")) != "engine":
        order.append(focused)
        assert len(order) < 20, order
        page.press("Tab")
    assert order == ["A", "transcript", "choose", "example", "question", "attach", "SUMMARY", "send"]
    page.run("document.querySelector('#example').focus()")
    page.press("Enter")
    has_in_tray(page, 1)
    page.wait("document.activeElement.id === 'question' && document.activeElement.value")
    page.press("Enter", held="Shift")
    page.press("x")
    assert page.value("document.querySelector('#question').value").endswith("\nx")
    page.press("Tab", "Tab", "Tab")
    assert page.value("document.activeElement.id") == "send"
    page.press("Enter")
    page.wait("document.querySelector('.answer .text').textContent.length > 5")
    assert page.value("document.activeElement.id") == "stop"
    page.press("Enter")
    ended(page)
    assert page.value("document.activeElement.id") == "question"


def test_everything_to_press_has_a_name(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    drop(page, picture())
    has_in_tray(page, 1)
    nameless = page.value(
        "[...document.querySelectorAll('button, input, textarea, select, summary, img, [role]')].filter((node) =>"
        " !(node.ariaLabel || node.innerText || node.labels?.length || node.hasAttribute('alt') || node.hidden"
        " || node.role === 'alert' || node.closest('[hidden], dialog'))).map((node) => node.outerHTML)"
    )
    assert nameless == []
    assert page.value("document.querySelector('#transcript').role") == "log"
    assert page.value("document.querySelector('#announcer').ariaLive") == "polite"


@pytest.mark.parametrize("size", [PHONE, (320, 568), (768, 1024)])
def test_narrow_windows_never_scroll_sideways(server: RunningServer, page: Browser, size: tuple[int, int]) -> None:
    page.resize(size, scale=2, is_mobile=True)
    opened(page, server.url)
    assert not scrolls_sideways(page)
    drop(page, picture(600, 20), picture(20, 600), picture())
    has_in_tray(page, 3)
    ask(page, "Donaudampfschifffahrtsgesellschaftskapitän" * 8)
    ended(page)
    assert not scrolls_sideways(page)
    assert not page.value("document.querySelector('#engine').checkVisibility()")
    page.click("[data-show=engine]")
    assert page.value("document.querySelector('#ledger').checkVisibility()")
    assert not page.value("document.querySelector('#chat').checkVisibility()")
    assert not scrolls_sideways(page)


def test_dark_and_light_follow_the_reader(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.value(ground)
    page.prefer("dark")
    assert page.value(ground) != light


def test_policy_forbids_what_the_page_never_does(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    page.run(
        "window.violated = []; addEventListener('securitypolicyviolation', (e) => violated.push(e.effectiveDirective))"
    )
    page.run("document.body.setAttribute('style', 'color: red')")
    page.run(
        "const script = document.createElement('script');"
        "try { script.text = 'window.broken = true'; document.body.append(script); } catch {}"
    )
    page.run("const image = new Image(); image.src = 'https://example.invalid/x.png'; document.body.append(image)")
    page.wait("new Set(window.violated).size >= 3")
    assert page.value("window.broken") is None
    assert set(page.value("window.violated")) >= {"style-src-attr", "require-trusted-types-for", "img-src"}
    # Said here, so that the fixture does not complain of it.
    assert len(page.console()) >= 3
    page.requested_urls()
    page.open(server.url)


def test_large_pictures_are_reduced_before_they_are_sent(tiny_checkpoint: Path, page: Browser) -> None:
    with running_server(tiny_checkpoint, max_image_pixels=20_000, max_image_bytes=4000) as server:
        opened(page, server.url)
        drop(page, picture(400, 300, "green"), picture(50, 50))
        has_in_tray(page, 2)
        assert page.text("#tray li:first-child .reduced") == "reduced"
        assert page.value("document.querySelectorAll('.reduced').length") == 1
        ask(page, "What is it?")
        ended(page)
        large = server.engine.pixels[-1][0]
        assert abs(large.shape[1] / large.shape[0] - 4 / 3) < 0.35
        assert abs(large.astype(int) - [0, 128, 0]).max() < 8


def test_what_is_no_picture_is_told(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    drop(page, b"hello", picture())
    has_in_tray(page, 1)
    page.wait("document.querySelector('#notice').innerText.includes('no picture')")


def test_more_pictures_than_the_server_takes_are_told(tiny_checkpoint: Path, page: Browser) -> None:
    with running_server(tiny_checkpoint, limit_mm_per_prompt={"image": 2}) as server:
        opened(page, server.url)
        drop(page, picture())
        has_in_tray(page, 1)
        ask(page, "One?")
        ended(page)
        drop(page, picture(), picture())
        has_in_tray(page, 1)
        page.wait("document.querySelector('#notice').innerText.includes('2 pictures')")


def test_refused_question_comes_back(server: RunningServer, page: Browser) -> None:
    server.engine.replay = Replay(rejection="it is too hot")
    opened(page, server.url)
    drop(page, picture())
    has_in_tray(page, 1)
    ask(page, "How are you?")
    page.wait("document.querySelector('#notice').innerText.includes('it is too hot')")
    has_in_tray(page, 1)
    assert page.value("document.querySelector('#question').value") == "How are you?"
    assert page.value("document.querySelectorAll('.turn').length") == 0
    assert page.value("document.querySelector('#notice').role") == "alert"


def test_answer_that_fails_midway_is_kept_and_told(server: RunningServer, page: Browser, tiny_checkpoint: Path) -> None:
    server.engine.replay = Replay(token_ids=tokens_of(tiny_checkpoint, TEXT), fail_after=10)
    opened(page, server.url)
    ask(page, "What do you see?")
    ended(page)
    assert TEXT.startswith(answer(page))
    assert fact(page, "ending") == "cut off"
    assert "had an error" in page.text("#notice")


def test_server_that_is_gone_is_told(tiny_checkpoint: Path, page: Browser) -> None:
    with running_server(tiny_checkpoint) as server:
        opened(page, server.url)
    page.wait("document.querySelector('#state').innerText === 'not reached'")
    ask(page, "Hello?")
    page.wait("document.querySelector('#notice').innerText.includes('cannot be reached')")
    assert page.value("document.querySelector('#question').value") == "Hello?"
    page.console()


def test_several_names_can_be_chosen_from(tiny_checkpoint: Path, page: Browser) -> None:
    with running_server(tiny_checkpoint, served_model_name=("first", "second")) as server:
        page.open(server.url)
        page.wait("document.querySelector('#models').options.length === 2")
        page.run(
            "const m = document.querySelector('#models'); m.value = 'second'; m.dispatchEvent(new Event('change'))"
        )
        ask(page, "Hello?")
        ended(page)


def test_loading_and_death_are_shown(tiny_checkpoint: Path, page: Browser) -> None:
    engine = FakeEngineClient(is_start_held=True)
    with running_server(tiny_checkpoint, engine, phase=None) as server:
        page.open(server.url)
        page.wait("document.querySelector('#state').innerText === 'loading the model'")
        assert page.value("document.querySelector('#ledger').hidden")
        ask(page, "Hello?")
        page.wait("document.querySelector('#notice').innerText.includes('still loading')")
        server.in_loop(engine.release_start)
        page.wait("document.querySelector('#state').innerText === 'ready'")
        assert page.value("document.querySelector('#ledger').checkVisibility()")
        page.press("Enter")
        ended(page)
        server.in_loop(engine.die)
        page.wait("document.querySelector('#state').innerText === 'the engine has stopped'")


# What a server with keys answers: 401 to everything without the right one.
LOCK = """
const open = window.fetch;
window.asked = [];
window.fetch = (url, options) => {
  const given = options?.headers?.authorization ?? null;
  window.asked.push(given);
  if (given === 'Bearer sesame') return open(url, options);
  const error = { message: 'Wrong.', type: 'invalid_request_error', param: null, code: 'invalid_api_key' };
  return Promise.resolve(new Response(JSON.stringify({ error }), { status: 401 }));
};
"""


def test_key_is_asked_for_and_kept_in_the_tab(server: RunningServer, page: Browser) -> None:
    script = page.devtools("Page.addScriptToEvaluateOnNewDocument", source=LOCK)["identifier"]
    try:
        page.open(server.url)
        page.wait("document.querySelector('#key').open")
        assert page.text("#state") == "needs a key"
        page.press("Escape")
        page.wait("!document.querySelector('#key').open")
        page.click("#key-button")
        page.type("#key-value", "wrong")
        page.press("Enter")
        page.wait("window.asked.includes('Bearer wrong') && document.querySelector('#key').open")
        page.type("#key-value", "sesame")
        page.press("Enter")
        page.wait("document.querySelector('#state').innerText === 'ready'")
        ask(page, "Hello?")
        ended(page)
        page.open(server.url)
        page.wait("document.querySelector('#state').innerText === 'ready'")
        assert not page.value("document.querySelector('#key').open")
        assert page.value("localStorage.length") == 0
        assert page.value("document.cookie") == ""
    finally:
        page.devtools("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_shown_parts_always_add_up(server: RunningServer, page: Browser) -> None:
    opened(page, server.url)
    wrong = page.run(
        """
        return import(new URL('web/format.js', location.href)).then(({ mibParts, mib, mibDigits }) => {
          let state = 7;
          const random = () => (state = (state * 48271) % 2147483647) / 2147483647;
          const wrong = [];
          for (let round = 0; round < 2000; round++) {
            const parts = Array.from({ length: 12 }, () => Math.floor(random() ** 6 * 2 ** 36));
            const total = parts.reduce((sum, part) => sum + part, 0);
            const plain = (text) => Math.round(100 * Number(text.replaceAll(',', '')));
            const sum = mibParts(parts, total).reduce((sum, text) => sum + plain(text), 0);
            if (sum !== plain(mib(total, mibDigits(total)))) wrong.push(parts);
          }
          return wrong;
        });
        """
    )
    assert wrong == []
