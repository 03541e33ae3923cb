"""The real templates that llama.cpp's sources carry: its own engine of templates (common/jinja) against transformers'.

That engine is in no library of llama-cpp-python's wheel (`llama_chat_apply_template` knows a list of templates, and
reads none): its sources come with the source package, and are compiled with render.cpp.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from once import once
from optional import needs
from places import ROOT
from tools.parts import PACKAGE, sources

from llamadiff.ext.prompt.chat_template import environment, rendered
from llamadiff.ext.prompt.templates.conversations import choose
from llamadiff.ext.prompt.templates.rendering import source_of
from llamadiff.ext.prompt.templates.run import template

pytestmark = [pytest.mark.slow, needs("g++")]
PARTS = ("json", "unicode", *(f"jinja/{name}" for name in ("lexer", "parser", "runtime", "string", "value", "caps")))
# Mistakes of a lexer: what stands in common/jinja/lexer.cpp, and what stands there instead.
LEXERS = {
    "trim-blocks": ("opt_trim_blocks = true", "opt_trim_blocks = false"),
    "lstrip-blocks": ("opt_lstrip_blocks = true", "opt_lstrip_blocks = false"),
    "dash-right": ("if (is_rstrip_block) {", "if (false) {"),
    "dash-left": ("if (is_lstrip_block) {", "if (false) {"),
    "dash-right-one": ('string_lstrip(text, " \\t\\r\\n")', 'string_lstrip(text, " \\t")'),
    "dash-left-newline": ('string_rstrip(text, " \\t\\r\\n")', 'string_rstrip(text, " \\t")'),
}
RIGHT = 53  # templates of which every prompt is the same


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """A folder with the engine, one with each mistake, and the templates."""
    return once(tmp_path_factory, "templates", built)


def built(folder: Path) -> None:
    source = sources(version(PACKAGE))
    shutil.copytree(source / "models/templates", folder / "models")
    options = [f"-I{source / place}" for place in ("common", "vendor", "include", "ggml/include")]
    options += ["-iquote", str(source / "common/jinja")]  # not for <string.h>

    def compiled(name: str, file: Path) -> str:
        target = folder / f"{name}.o"
        subprocess.run(["g++", "-std=c++17", "-O1", "-w", *options, "-c", file, "-o", target], check=True)
        return str(target)

    parts = {name: compiled(Path(name).name, source / "common" / f"{name}.cpp") for name in PARTS}
    parts["main"] = compiled("main", ROOT / "tests/ext/prompt/templates/render.cpp")
    parts["abort"] = compiled("abort", ROOT / "tests/ext/prompt/templates/abort.cpp")
    subprocess.run(["g++", *parts.values(), "-o", folder / "engine"], check=True)
    text = (source / "common/jinja/lexer.cpp").read_text("utf-8")
    for name, (old, new) in LEXERS.items():
        assert old in text
        file = folder / f"{name}.cpp"
        file.write_text(text.replace(old, new), encoding="utf-8")
        subprocess.run(
            ["g++", *{**parts, "jinja/lexer": compiled(name, file)}.values(), "-o", folder / name], check=True
        )


def asked(folder: Path, name: str, path: Path) -> str:
    return shlex.join([str(folder / name), str(path)])


def test_every_difference_has_its_line(llama_cpp):
    """What llama.cpp refuses it gives the line of itself."""
    right = []
    paths = sorted((llama_cpp / "models").glob("*.jinja"))
    for path in paths:
        found = template(path, asked(llama_cpp, "engine", path), 60.0)
        assert found.verdict != "unchecked", path.name
        if found.verdict == "match":
            right.append(path.name)
        for place in found.places:
            part = place.smallest
            assert part.line is not None or " at line " in part.error, path.name
            assert part.line is None or found.source.line(part.line), path.name
    assert len(paths) >= 70
    assert len(right) >= RIGHT


@pytest.mark.parametrize("mistake", LEXERS)
def test_a_mistake_of_a_lexer_is_named(mistake, llama_cpp, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n<u>  {{- m.content -}}  \n\n  </u>\n"
        "    {%- elif m.role == 'system' -%}\n\n  <s>\n{% endif %}\n{% endfor %}\n"
    )
    assert template(path, asked(llama_cpp, "engine", path), 60.0).verdict == "match"
    found = template(path, asked(llama_cpp, mistake, path), 60.0)
    assert (found.verdict, len(found.places)) == ("wrong", 1)
    assert mistake in [cause.name for cause in found.places[0].causes]


def test_a_bug_of_equality(llama_cpp):
    """docs/found.md: Mistral's tools are not written where the last user's content is a list."""
    path = llama_cpp / "models/Mistral-Small-3.2-24B-Instruct-2506.jinja"
    [place] = template(path, asked(llama_cpp, "engine", path), 60.0).places
    part = place.smallest
    assert "[AVAILABLE_TOOLS]" in part.ours
    assert "[AVAILABLE_TOOLS]" not in part.theirs
    assert isinstance(part.conversation["messages"][-1]["content"], list)


def test_a_bug_of_the_first_character(llama_cpp, tmp_path):
    """docs/found.md: one character before the first block is lost."""
    path = tmp_path / "t.jinja"
    path.write_text("[{% for m in messages %}{{ m.role }}{% endfor %}]")
    found = template(path, asked(llama_cpp, "engine", path), 60.0)
    part = found.places[0].smallest
    assert (found.parted, part.line, part.offset) == (len(found.chosen.conversations), 1, 0)
    assert part.ours == f"[{part.theirs}"


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_the_baseline_is_transformers(llama_cpp):
    """Every real template, every conversation that was made for it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    count = 0
    for path in sorted((llama_cpp / "models").glob("*.jinja")):
        source = source_of(path)
        words, branches = source.words()
        chosen = choose(source.told, words, len(branches))
        compiled = environment().from_string(source.template)
        for conversation, told in zip(chosen.conversations, chosen.told, strict=True):
            given = {**source.tokens, **conversation}
            assert rendered(lambda compiled=compiled: compiled, given)["text"] == told["text"]
            messages = given.pop("messages")
            if not any("reasoning" in message or "thinking" in message for message in messages):  # which it copies
                [text], _ = render_jinja_template([messages], chat_template=source.template, **given)
                assert text == told["text"], (path.name, conversation)
                count += 1
    assert count > 10_000
