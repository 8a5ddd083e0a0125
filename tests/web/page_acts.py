"""What a reader does on the page, in the page's own words: drop, paste, ask, wait for the end."""

import base64
from pathlib import Path

from tests.web.browser import Browser

_FILES = """
const transfer = new DataTransfer();
for (const [name, type, data] of arguments[0]) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  transfer.items.add(new File([bytes], name, { type }));
}
"""


def opened(page: Browser, url: str) -> None:
    """Opens the page and waits until the engine's side is there."""
    page.open(url)
    page.wait(
        "document.querySelector('#state').dataset.phase === 'ready' && document.querySelector('#model').innerText"
    )


def drop(page: Browser, *pictures: bytes) -> None:
    page.run(
        f"{_FILES} for (const kind of ['dragenter', 'dragover', 'drop'])"
        " document.querySelector('#chat').dispatchEvent("
        "new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));",
        _named(pictures),
    )


def paste(page: Browser, *pictures: bytes) -> None:
    page.run(
        f"{_FILES} document.querySelector('#question').dispatchEvent("
        "new ClipboardEvent('paste', { clipboardData: transfer, bubbles: true, cancelable: true }));",
        _named(pictures),
    )


def choose(page: Browser, folder: Path, *pictures: bytes) -> None:
    paths = [folder / f"picture-{index}.png" for index in range(len(pictures))]
    for path, data in zip(paths, pictures, strict=True):
        path.write_bytes(data)
    page.type("#files", "\n".join(str(path) for path in paths))


def _named(pictures: tuple[bytes, ...]) -> list[list[str]]:
    return [
        [f"picture-{index}.png", "image/png", base64.b64encode(data).decode()] for index, data in enumerate(pictures)
    ]


def has_in_tray(page: Browser, num_pictures: int) -> None:
    page.wait(f"document.querySelectorAll('#tray img').length === {num_pictures}")


def ask(page: Browser, question: str) -> None:
    page.type("#question", question)
    page.press("Enter")


def ended(page: Browser, num_answers: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.answer[aria-busy=false]').length === {num_answers}", 60)


def answer(page: Browser, number: int = 0) -> str:
    return str(page.value(f"document.querySelectorAll('.answer .text')[{number}].textContent"))


def fact(page: Browser, name: str, number: int = 0) -> str:
    """What is shown of an answer: its TTFT, its tokens, ...; empty where it is not shown."""
    return str(page.value(f"document.querySelectorAll('[data-fact={name}]')[{number}].innerText"))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def scrolls_sideways(page: Browser) -> bool:
    """Whether the window, the conversation or the engine's side is wider than it shows."""
    return bool(
        page.value(
            "['html', '#transcript', '#engine', '#composer'].map((name) => document.querySelector(name))"
            ".some((node) => node.scrollWidth > node.clientWidth)"
        )
    )
