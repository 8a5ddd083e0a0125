"""Remakes the README's picture of the page: `python -m tests.web.screenshot`.

Serves a model as an operator would, asks about a drawn picture in headless Chromium, and keeps what is then to be seen.
Without MODEL it serves the model inside the package, or a small random one where that is not installed.
"""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runtime.checkpoint import CheckpointError, locate_model, read_model_config
from tests.integration.test_http_engine import serving
from tests.web.browser import PHONE, running_browser
from tests.web.page_acts import ask, ended, has_in_tray, opened

ROOT = Path(__file__).parents[2]
WINDOW = (1320, 960)
QUESTION = "Where is the square?"
# The later flag wins over the one that the tests serve with.
FLAGS = ("--memory-bytes", "1GiB", "--encoder-graph-budgets", "64,96,128,192,256")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="directory of a checkpoint")
    parser.add_argument("--name", default="demo", help="the model's name on the page")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "page.png")
    parser.add_argument("--phone", type=Path, help="also keep the page as a phone shows it")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or _model(Path(folder) / "checkpoint")
        flags = (*FLAGS, "--served-model-name", arguments.name)
        with serving(model, *flags) as fovea, running_browser(Path(folder) / "profile") as browser:
            browser.resize(WINDOW, scale=1.5)
            browser.prefer("dark" if arguments.dark else "light")
            opened(browser, str(fovea.client.base_url))
            browser.run("document.querySelector('#max-tokens').value = arguments[0]", arguments.max_tokens)
            browser.click("#example")
            has_in_tray(browser, 1)
            browser.press("Enter")
            ended(browser, 1)
            ask(browser, QUESTION)
            ended(browser, 2)
            # The next poll has the last counts, and the chart its shape.
            browser.run("return new Promise((done) => setTimeout(done, 2500))")
            browser.screenshot(arguments.output)
            if arguments.phone:
                browser.resize(PHONE, scale=2, is_mobile=True)
                browser.screenshot(arguments.phone)
    print(f"{arguments.output}: {arguments.output.stat().st_size >> 10} KiB")


def _model(scratch: Path) -> Path:
    with contextlib.suppress(CheckpointError):
        directory = locate_model("demo")
        read_model_config(directory)
        return directory
    from tests.checkpoint_factory import build_checkpoint

    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return build_checkpoint(scratch)


if __name__ == "__main__":
    main()
