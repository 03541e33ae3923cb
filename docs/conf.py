"""The site of docs/: its theme, its navigation, a page for each known bug. ``make site``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

from llamadiff import __version__
from llamadiff.ext.explain.listing import explanation
from llamadiff.ext.explain.registry import known_bugs

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/" + os.environ.get("GITHUB_REPOSITORY", "OWNER/llamadiff")  # GitHub says which
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
NAMED = re.compile(r"`([a-z0-9-]+)`")
BUG = re.compile(r"^\| `([a-z0-9-]+)`", re.MULTILINE)

project = "llamadiff"
version = release = __version__
extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 3
highlight_language = "text"
smartquotes = False  # what is shown can be searched for
html_theme = "furo"
html_title = "llamadiff"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}  # the sources of some pages are not in the repository
html_copy_source = False


def write_bugs(_app: Sphinx) -> None:
    """A page for each known bug: what ``llamadiff explain`` prints."""
    folder = DOCS / "bugs"
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": bug_page(name) for name in known_bugs()}
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != text:  # what is unchanged is not read again
            path.write_text(text, encoding="utf-8")


def bug_page(name: str) -> str:
    """The page, with what search engines show of it."""
    about = known_bugs()[name].about.replace('"', "'")
    head = f'---\nmyst:\n  html_meta:\n    description: "{about}"\n---\n'
    text = re.sub(r"\n(?=(?:Ops of ggml|Known from): )", "\n\n", explanation(name))
    return f"{head}{text}\n\n[All known bugs](../known-bugs.md). A report names this one as `{name}`.\n"


def prepare(_app: Sphinx, name: str, source: list[str]) -> None:
    """Navigation from the links of index.md, pages of bugs behind their table, links out of docs/ to the repository."""
    text = source[0]
    if name == "index":
        text = "".join(map(with_navigation, re.split("^(?=## )", text, flags=re.MULTILINE)))
    if name == "known-bugs":
        names = BUG.findall(text)
        entries = "".join(f"{bug} <bugs/{bug}>\n" for bug in names)
        text = BUG.sub(r"| [`\1`](bugs/\1.md)", text) + f"\n```{{toctree}}\n:hidden:\n\n{entries}```\n"
    if name.startswith("symptoms/"):
        text = NAMED.sub(lambda match: linked(match) if match[1] in known_bugs() else match[0], text)
    page = DOCS / f"{name}.md"
    source[0] = LINK.sub(lambda match: outside(match, page), text)


def linked(name: re.Match[str]) -> str:
    """A known bug's name, with its page."""
    return f"[{name[0]}](../bugs/{name[1]}.md)"


def with_navigation(section: str) -> str:
    """A section of index.md with its links as a group of the navigation."""
    if not section.startswith("## "):
        return section
    caption = section.partition("\n")[0].removeprefix("## ")
    entries = "".join(f"{words} <{path.removesuffix('.md')}>\n" for words, path, _ in LINK.findall(section)
                      if not path.startswith(".."))  # fmt: skip
    if not entries:
        return section
    return f"{section}\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}```\n\n"


def outside(match: re.Match[str], page: Path) -> str:
    """A link, which leads to the repository where its target is no page of the site."""
    words, path, anchor = match[1], match[2], match[3] or ""
    target = (page.parent / path).resolve()
    if target.is_relative_to(DOCS) and target.suffix == ".md":
        return match[0]
    if not target.exists():
        logging.getLogger(__name__).warning("%s: no such file", path, location=str(page))
    return f"[{words}]({REPOSITORY}/blob/main/{target.relative_to(ROOT).as_posix()}{anchor})"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_bugs)
    app.connect("source-read", prepare)
