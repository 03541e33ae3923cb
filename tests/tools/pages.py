"""Pages as pictures, to be looked at: every case of the gallery, 1280 and 390 pixels wide, light and dark.

``PYTHONPATH=tests python -m tools.pages DIR [CASE ...]``, with chromium and playwright.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from optional import program
from playwright.sync_api import Browser, sync_playwright

import llamadiff
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.page.page import to_html
from llamadiff.report.formats import About
from llamadiff.result.comparison import Comparison
from llamadiff.verbs import verbs

COMMAND = About(("llamadiff", "compare", "model.gguf", "mine.safetensors", "-o", "report.html"))
WIDTHS, THEMES = (1280, 390), ("light", "dark")


def with_pictures(
    model: Path, *, tokens: Any = (), candidate: Any = None, n_predict: int = 0, engine: Any = None
) -> Any:
    """``llamadiff.compare`` as the cases call it, with what a page shows."""
    return verbs.compare(model, Run(tokens=tokens, n_predict=n_predict), candidate, How(engine=engine, pictures=True))


def shoot(browser: Browser, page: Path) -> None:
    """A picture of each width and theme beside a page, and how long it took to open."""
    for width in WIDTHS:
        for theme in THEMES:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
            shown, started = context.new_page(), time.perf_counter()
            shown.goto(page.as_uri())
            shown.wait_for_selector("html[data-ready]")
            opened = time.perf_counter() - started
            picture = page.with_name(f"{page.stem}-{width}-{theme}.png")
            shown.screenshot(path=picture, full_page=True)
            print(f"{picture}: {page.stat().st_size >> 10} KiB, open after {opened:.1f} s")
            context.close()


def main(cases: dict[str, Callable[[], Comparison]], folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox"])
        for name in names or cases:
            page = folder / f"{name}.html"
            page.write_text(to_html(cases[name](), COMMAND), encoding="utf-8")
            shoot(browser, page)


if __name__ == "__main__":
    from tools import gallery_cases

    llamadiff.compare = with_pictures  # type: ignore[assignment]
    llamadiff.diff = partial(verbs.diff, how=How(pictures=True))  # type: ignore[assignment]
    main(gallery_cases.CASES, Path(sys.argv[1]), sys.argv[2:])
