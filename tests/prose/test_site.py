"""The site of docs/ is built without a warning, fits a phone and a screen, and its search finds; its pages hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optional import needs, program
from places import ROOT
from prose import scenes
from prose.walkthrough import carry_out, difference

from llamadiff.ext.explain.registry import known_bugs

DOCS = ROOT / "docs"
SYMPTOMS = sorted((DOCS / "symptoms").glob("*.md"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
WIDTHS = {"a phone": 420, "a screen": 1280}
NEEDS = {
    "my-pytorch-model": ("torch", "transformers"), "my-port": ("torch", "transformers"), "my-c-engine": ("cc",),
    "server-dumber-than-llama-cpp": ("node",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", [
    pytest.param(page, marks=needs(*NEEDS.get(page.stem, ())), id=page.stem) for page in SYMPTOMS + TUTORIALS
])  # fmt: skip
def test_a_page_is_carried_out_line_by_line(page: Path, tmp_path: Path) -> None:
    with scenes.prepared(page.stem, tmp_path) as replaced:
        assert not difference(page, carry_out(page, tmp_path, replaced))


def test_every_symptom_has_its_scene_and_names_known_bugs() -> None:
    assert scenes.SCENES.keys() >= {page.stem for page in SYMPTOMS}
    for page in SYMPTOMS:
        rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
        assert {*re.findall("`([a-z]+(?:-[a-z0-9]+)+)`", "\n".join(rows))} <= known_bugs().keys()


def test_a_page_that_says_otherwise_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\n# greet.sh\necho hello\n```\n\n```console\n$ sh greet.sh; echo 1.0e-05 x\nhello\n...\n```\n"
    )
    assert not difference(page, carry_out(page, tmp_path))
    page.write_text(page.read_text().replace("\nhello\n...", "\nhello\n1.7e-05 x"))
    assert not difference(page, carry_out(page, tmp_path))
    page.write_text(page.read_text().replace("\nhello\n1.7e", "\nhallo\n1.7e"))
    assert {"-hallo", "+hello"} <= {*difference(page, carry_out(page, tmp_path)).splitlines()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make site`` builds it: a warning is an error."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", place / "trees", DOCS, place / "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    return place / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.mark.slow
@needs("sphinx")
def test_every_known_bug_has_a_page(site: Path) -> None:
    assert {path.stem for path in (site / "bugs").glob("*.html")} == known_bugs().keys()
    table = (site / "known-bugs.html").read_text("utf-8")
    assert all(f'href="bugs/{name}.html"' in table for name in known_bugs())
    assert 'href="../bugs/rope-layout.html"' in (site / "symptoms/gibberish-from-the-first-token.html").read_text(
        "utf-8"
    )


@pytest.mark.slow
@needs("sphinx")
def test_every_link_leads_somewhere(site: Path) -> None:
    """To a page of the site, an anchor in it, or a file of the repository."""
    texts = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    names = {path: {*re.findall('id="([^"]+)"', text)} for path, text in texts.items()}
    assert len(texts) > 150
    for path, text in texts.items():
        for link in {*re.findall('<a [^>]*href="([^"]+)"', text)}:
            file, _, anchor = link.partition("#")
            if not link.startswith(("http:", "https:")):
                target = (path.parent / file).resolve() if file else path
                assert target.exists(), (path, link)
                assert not anchor or anchor in names[target], (path, link)
            elif "/llamadiff/blob/main/" in file:
                assert (ROOT / file.partition("/blob/main/")[2]).exists(), (path, link)


@pytest.mark.slow
@needs("sphinx", "playwright", "chromium")
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_no_page_is_wider_than_its_screen(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    wide = {}
    for path in site.rglob("*.html"):
        page.goto(path.as_uri())
        if (reached := page.evaluate("document.documentElement.scrollWidth")) > width:
            wide[path.name] = reached
    assert (wide, errors) == ({}, [])


@pytest.mark.slow
@needs("sphinx", "playwright", "chromium")
@pytest.mark.parametrize(("words", "found"), [
    ("gibberish", "gibberish-from-the-first-token.html"), ("command not found", "install.html"),
    ("rotates halves", "rope-layout.html"), ("NaN", "nan.html"), ("4096 tokens", "right-until-4096-tokens.html"),
    ("CUDA wrong", "right-on-cpu-wrong-on-gpu.html"), ("embedding cosine", "embedding-is-off.html"),
])  # fmt: skip
def test_what_people_search_for_is_found(site: Path, browser: Any, words: str, found: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{site.as_uri()}/search.html?q={words}")
    page.wait_for_selector(f'#search-results a[href*="{found}"]')


@pytest.mark.slow
@needs("sphinx", "playwright", "chromium")
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_navigation_leads_from_the_front_to_a_symptom(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((site / "index.html").as_uri())
    if width < 1000:
        page.click("label.nav-overlay-icon")  # a phone has the navigation in a drawer
    page.click('.sidebar-tree a[href="symptoms/nan.html"]')
    assert page.inner_text("h1").startswith("NaN or Inf")
