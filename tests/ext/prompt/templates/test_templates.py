"""Renderers of prompts against a chat template: a right one is right, and a mistake is found, shown small and named."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from runpy import run_path

import pytest
from command import run
from ext.prompt.answering import answering
from models.tokenized import with_tokenizer
from optional import needs
from places import ROOT
from typer.testing import CliRunner
from waiting import BRIEF, HANG

from llamadiff import UserError
from llamadiff.cli.app import app
from llamadiff.ext.prompt.chat_template import environment, rendered
from llamadiff.ext.prompt.templates import run as verb
from llamadiff.ext.prompt.templates.child import NAMED
from llamadiff.ext.prompt.templates.conversations import choose, usual
from llamadiff.ext.prompt.templates.page import headline, notes
from llamadiff.ext.prompt.templates.rendering import Source
from llamadiff.ext.prompt.templates.run import template
from llamadiff.ext.prompt.templates.traced import Traced

ENGINE = ROOT / "tests/ext/prompt/templates/engine.py"
WRITTEN = (
    re.compile(r'TEMPLATE = """\\\n(.*?)"""', re.DOTALL).search(ENGINE.read_text("utf-8"))[1].replace("\\\\", "\\")
)
HAND = run_path(str(ENGINE))["render"]
USER = {"role": "user", "content": "Hi"}
# A mistake of the engine that is written by hand, and the cause that is named, where that has another name.
MISTAKES = {
    "bos-missing": "bos-removed", "bos-twice": "", "content-stripped": "", "default-system-missing": "",
    "enable_thinking-ignored": "ignored:enable_thinking", "generation-prompt-always": "",
    "generation-prompt-missing": "", "last-only": "turns-ignored", "newline-added": "", "newline-eaten": "silent:2",
    "parts-first": "", "parts-lines": "", "reasoning-kept": "part:1:right", "strftime-missing": "",
    "system-ignored": "condition:0:False", "text-rstripped": "text-rstripped", "thoughts-kept": "", "tojson-ascii": "",
    "tojson-compact": "", "tojson-html": "", "tojson-indent": "", "tojson-indented": "", "tojson-sorted": "",
    "tool-calls-ignored": "", "tools-ignored": "", "trim-ignored": "",
}  # fmt: skip


def engine(*mistakes):
    return shlex.join([sys.executable, str(ENGINE), *mistakes])


@pytest.fixture
def written(tmp_path):
    """A template as a file of its own."""

    def write(text=WRITTEN, name="chat_template.jinja"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def found(path, candidate, patience=HANG):
    return template(path, str(candidate), patience)


# -- right, and wrong --------------------------------------------------------------------------------------------------


def test_an_engine_written_by_hand_is_right(written):
    result = found(written(), engine())
    assert (result.verdict, result.parted, result.places) == ("match", 0, [])
    assert len(result.chosen.conversations) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_named(mistake, written):
    result = found(written(), engine(mistake))
    assert (result.verdict, len(result.places)) == ("wrong", 1)
    assert (MISTAKES[mistake] or mistake) in [cause.name for cause in result.places[0].causes]
    smallest = result.places[0].smallest
    assert smallest.ours[: smallest.offset] == smallest.theirs[: smallest.offset]
    assert smallest.ours[smallest.offset : smallest.offset + 1] != smallest.theirs[smallest.offset :][:1]


def test_all_mistakes_of_the_engine_are_tried():
    assert set(re.findall(r"has\([\"']([\w-]+)", ENGINE.read_text("utf-8"))) == set(MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("made", [("trim-ignored", "parts-lines"), ("bos-twice", "newline-added")])
def test_two_mistakes_are_counted_and_named(made, written):
    result = found(written(), engine(*made))
    assert (result.verdict, result.left, len(result.places)) == ("wrong", 0, 1)
    assert {each.name for each in result.mistakes} == set(made)
    assert headline(result).startswith("2 mistakes: template: the candidate ")


@pytest.mark.parametrize(
    ("mistake", "line", "messages"),
    [
        ("tojson-html", "(call.function.arguments | tojson)", 1),
        pytest.param("trim-ignored", "message.content | trim", 1),
        ("parts-lines", "part.text", 1),
        ("tools-ignored", "Tools:", 1),
        ("reasoning-kept", "eos_token", 2),
    ],
)
def test_the_smallest_conversation_and_the_line(mistake, line, messages, written):
    result = found(written(), engine(mistake))
    smallest = result.places[0].smallest
    assert line in result.source.line(smallest.line)
    assert len(smallest.conversation["messages"]) == messages


def test_shrunk_to_what_matters(written):
    """Of all that was said the one character that is escaped is left."""
    smallest = found(written(), engine("tojson-ascii")).places[0].smallest
    said = [each for each in json.dumps(smallest.conversation, ensure_ascii=False) if not each.isascii()]
    assert len(said) == 1


@pytest.mark.parametrize(("change", "name"), [("trim_blocks", "trim-blocks"), ("lstrip_blocks", "lstrip-blocks")])
def test_white_space_of_blocks(change, name, written, tmp_path):
    """Another set-up of jinja2 as a function of the user's."""
    text = "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    path = written(text)
    (tmp_path / "mine.py").write_text(
        "from jinja2 import Environment\n"
        f"made = Environment(**{{'trim_blocks': True, 'lstrip_blocks': True, '{change}': False}})\n"
        f"def render(messages, **more):\n    return made.from_string({text!r}).render(messages=messages, **more)\n",
        encoding="utf-8",
    )
    result = found(path, f"{tmp_path / 'mine.py'}:render")
    assert name in [cause.name for cause in result.places[0].causes]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("-%}", "%}", "dash-right"), ("{%-", "{%", "dash-left"), ("{{-", "{{", "dash-left"), ("'\\n' +", "", "")],
)
def test_another_template_is_a_candidate(old, new, name, written):
    text = (
        "{%- for m in messages -%}\n\n {{- '\\n' + m.role }}:  {%- if m.content is string -%}\n {{ m.content }}"
        "{% endif -%}\n\n{% endfor %}"
    )
    other = text.replace(old, new)
    other = other.replace("{{-", "{{") if name == "dash-left" else other
    other = other.replace("{%-", "{%") if name == "dash-left" else other
    result = found(written(text), written(other, "other.jinja"))
    assert result.verdict == "wrong"
    assert not name or name in [cause.name for cause in result.places[0].causes]
    assert result.apart.line == text[: _place(text, other)].count("\n") + 1
    assert headline(result).startswith(f"template: parts at line {result.apart.line}: ")
    assert "where one of both is the checkpoint's, convert the file that has the other again" in notes(result)
    right = found(written(text), written(text, "other.jinja"))
    assert (right.verdict, right.apart) == ("match", None)


def _place(text, other):
    return next(i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)


def test_texts_that_part_where_no_conversation_shows_it(written):
    text = "{{ messages[0].content }}"
    result = found(written(text), written(f"{{#- a note #}}{text}", "other.jinja"))
    assert (result.verdict, result.apart.line) == ("match", 1)
    assert notes(result)[-1].endswith("no conversation that was made shows it")


def test_a_fix_names_no_option():
    """`template` has none that changes what is right."""
    assert [each.name for each in NAMED if "--" in each.says + each.fix] == []


# -- branches and lines ------------------------------------------------------------------------------------------------


def chosen(text):
    source = Source(Path("t.jinja"), text, {"bos_token": "<s>", "eos_token": "</s>"})
    words, branches = source.words()
    made = choose(source.told, words, len(branches))
    return made, [branch for number, branch in enumerate(branches) if number not in made.reached]


@pytest.mark.parametrize(
    "condition",
    [
        "messages[0].role == 'system'", "tools", "m.tool_calls", "m.content is not string", "add_generation_prompt",
        "not add_generation_prompt", "enable_thinking is defined and enable_thinking is false", "m.reasoning_content",
        "m.role == 'developer'", "reasoning_effort == 'high'", "m.role == 'tool' and loop.previtem.role == 'tool'",
        "m.content is none", "'/no_think' in m.content", "m.content is string and '</think>' in m.content",
        "m.content and m.content[0].type == 'text'", "messages | length > 4", "m.content == ''", "documents_here",
        "m.tool_calls and m.tool_calls[0].function.arguments is string", "m.content and m.content[-1].type == 'image'",
        "tools and tools[0].function.parameters.properties.one.oneOf", "m.role == 'assistant' and loop.last",
    ],
)  # fmt: skip
def test_conversations_reach_a_branch(condition):
    made, unreached = chosen(
        f"{{% for m in messages %}}{{% if {condition} %}}a{{% else %}}b{{% endif %}}{{% endfor %}}"
    )
    assert unreached == []
    assert made.needed <= 2


def test_what_cannot_be_reached_is_told(written):
    result = found(written("a\n{% if 1 > 2 %}b{% endif %}\n{{ messages[0].content }}"), engine())
    assert result.unreached == [(2, "then")]


def test_a_few_conversations_reach_what_all_do():
    made, unreached = chosen(WRITTEN)
    reached = {branch for told in made.told[: made.needed] for branch in told["reached"]}
    assert reached == {branch for told in made.told for branch in told["reached"]}
    assert made.needed <= 6
    assert len(unreached) <= 2


CONVERSATIONS = [{"messages": [USER], "bos_token": "<s>", "eos_token": "</s>"}]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n{{ messages[0].content }}\nb", [(1, "a\n"), (2, "Hi"), (2, "\n"), (3, "b")]),
        ("{% macro m(x) %}\n[{{ x }}]\n{% endmacro %}\n{{ m('1') }}{{ m('1') }}",
         [(2, "["), (2, "1"), (2, "]\n"), (2, "["), (2, "1"), (2, "]\n")]),
        ("{% macro m(x) %}\n {{ x }}\n{% endmacro %}\n{{ m('1') | trim }}", [(4, "1")]),
        ("{% macro m(x) %}{{ x }}{% endmacro %}\n{% if m('1') == '1' %}\nx\n{% endif %}", [(3, "x\n")]),
        ("{% set a %}b{% endset %}\n{{ a }}{{ a }}", [(2, "b"), (2, "b")]),
        ("{% for i in range(2) %}\n{{ i }}\n{% endfor %}", [(2, "0"), (2, "\n"), (2, "1"), (2, "\n")]),
        ("{{ none }}{{ nothing }}{{ true }}", [(1, "None"), (1, "True")]),
    ],
)  # fmt: skip
def test_each_character_has_its_line(text, lines):
    told = Traced(environment(), text).told(CONVERSATIONS[0])
    assert told["pieces"] == lines
    assert told["text"] == rendered(lambda: environment().from_string(text), CONVERSATIONS[0])["text"]


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_it_renders_as_transformers_does():
    from transformers.utils.chat_template_utils import render_jinja_template

    source = Source(Path("t.jinja"), WRITTEN, {"bos_token": "<s>", "eos_token": "</s>"})
    words, _ = source.words()
    conversations = list(usual(words))[:200]
    same = 0
    for conversation, told in zip(conversations, source.told(conversations), strict=True):
        given = {**source.tokens, **conversation}
        messages = given.pop("messages")
        if "text" in told:
            [text], _ = render_jinja_template([messages], chat_template=WRITTEN, **given)
            assert text == told["text"]
            same += 1
    assert same > 150


def test_tokenizing_adds_bos(tmp_path):
    """Where the file says so, a prompt without it is right; where it does not, the prompt is wrong."""
    for adds, verdict in ((True, "match"), (False, "wrong")):
        path = with_tokenizer(tmp_path / f"{adds}.gguf", WRITTEN, adds)
        assert found(path, engine("bos-missing")).verdict == verdict


# -- a server ------------------------------------------------------------------------------------------------------


def as_llama_server(path, asked, mistakes):
    """llama-server's /apply-template, under /v: no BOS token, no answer that is last, errors as codes."""
    if path != "/v/apply-template":
        return 404, {"error": {"code": 404, "message": "File Not Found"}}
    if asked["messages"][-1]["role"] == "assistant":
        return 200, {"prompt": "it goes on with the answer"}
    if not isinstance(asked.get("chat_template_kwargs", {}).get("enable_thinking", True), bool):
        return 400, {"error": {"message": "invalid type for enable_thinking"}}
    if "refuses" in mistakes and asked.get("tools"):
        return 500, {"error": {"code": 500, "message": "tools param requires\x1b --jinja flag"}}
    given = {**asked, "bos_token": "<s>", "eos_token": "</s>"}
    return 200, {"prompt": HAND(given, mistakes.__contains__).removeprefix("<s>")}


@pytest.fixture
def serving():
    """The address of such a server with mistakes."""
    with ExitStack() as stack:
        yield lambda *mistakes: stack.enter_context(answering(partial(as_llama_server, mistakes=mistakes))) + "/v"


def test_a_server_is_right(serving, tmp_path):
    """It writes no BOS token, since tokenizing adds it."""
    result = found(with_tokenizer(tmp_path / "m.gguf", WRITTEN, adds_bos=True), serving())
    assert (result.verdict, result.parted) == ("match", 0)
    assert result.lacking_bos == len(result.chosen.conversations) > 100


@pytest.mark.parametrize("mistake", ["newline-eaten", "tojson-indent", "trim-ignored"])
def test_a_mistake_of_a_server(mistake, serving, tmp_path):
    result = found(with_tokenizer(tmp_path / "m.gguf", WRITTEN, adds_bos=True), serving(mistake))
    assert (MISTAKES[mistake] or mistake) in [cause.name for cause in result.places[0].causes]
    assert result.places[0].smallest.conversation["messages"][-1]["role"] != "assistant"


def test_a_conversation_that_a_server_refuses_is_wrong(serving, tmp_path):
    done = run(
        "template", with_tokenizer(tmp_path / "m.gguf", WRITTEN, adds_bos=True), "--candidate", serving("refuses")
    )
    assert done.returncode == 1
    assert "the candidate refuses what the template renders" in " ".join(done.stdout.split())
    assert r"tools param requires\x1b --jinja flag" in done.stdout


def test_a_server_that_renders_no_prompts(serving, written):
    address = serving().removesuffix("/v")
    done = run("template", written(), "--candidate", address)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"llamadiff: {address}: answers /apply-template with code 404: File Not Found; only llama-server renders "
        "prompts, give its address, or a command\n"
    )


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_page(written):
    done = run("template", written(), "--candidate", engine("tojson-ascii"))
    assert done.returncode == 1
    first, *lines = done.stdout.splitlines()
    assert first.startswith("WRONG  template: the candidate escapes in tojson what is not ASCII")
    shown = [line for line in lines if line.startswith(("template ", "yours "))]
    assert len(shown) == 2
    mark = lines[lines.index(shown[1]) + 1].index("^")
    assert shown[0][:mark].split()[1:] == shown[1][:mark].split()[1:]
    assert shown[1][mark:].startswith(r"\\u00")
    asked = next(line for line in lines if line.startswith("messages "))
    assert json.loads(asked.removeprefix("messages "))["messages"]


def test_a_right_one(written):
    done = run("template", written(), "--candidate", engine())
    assert (done.returncode, done.stdout.split()[0]) == (0, "MATCH")


def test_as_json(written, tmp_path):
    out = tmp_path / "report.json"
    assert run("template", written(), "--candidate", engine("tools-ignored"), "-o", out).returncode == 1
    report = json.loads(out.read_text("utf-8"))
    assert (report["schema"], report["verdict"]) == ("llamadiff.extras.templates/1", "wrong")
    place = report["places"][0]
    assert place["causes"][0]["name"] == "tools-ignored"
    assert place["line"]["text"] == report["places"][0]["line"]["text"].strip()
    assert place["conversation"]["tools"]


def test_the_template_of_a_template_is_shown_as_it_is(written):
    done = run("template", written("{{ messages[0].content }}\x1b[2J"), "--candidate", engine())
    assert "\x1b" not in done.stdout


# -- hostile templates and candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import signal; signal.pause()", "did not answer"),
        ("import sys; print(5, flush=True); sys.stdin.read()", "expected the prompt as a JSON string"),
        ("import sys, json; print(json.dumps('x' * (2 << 20)), flush=True); sys.stdin.read()", "2097152 characters"),
    ],
)
def test_a_hostile_candidate_is_one_line(code, said, written):
    with pytest.raises(UserError) as caught:
        found(written(), shlex.join([sys.executable, "-c", code]), BRIEF if said == "did not answer" else HANG)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_that_nobody_reads_are_no_words_of_the_candidates(written):
    """Python tells of a pipe that is broken when it lets go of it (3.13; others in development mode)."""
    nobody = "os.readlink(f'/proc/{os.getppid()}/fd/0') == os.devnull"  # its supervisor does not read, either
    code = f"import os\nos.close(0)\nwhile not {nobody}: pass\nprint('\"\"', flush=True)\nos._exit(3)"
    with pytest.raises(UserError, match=r"ended with exit code 3 before it answered .*; it printed nothing$"):
        found(written(), shlex.join([sys.executable, "-X", "dev", "-c", code]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 2 s"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ " + "-" * 100_000 + "1 }}", "RecursionError"),
        ("x" * 300_000, "300000 characters"),
    ],
    ids=["endless", "no template", "deep", "long"],
)
def test_a_hostile_template_is_one_line(text, said, written, monkeypatch):
    monkeypatch.setattr("llamadiff.ext.prompt.templates.rendering.AT_WORK", 2.0)
    with pytest.raises(UserError) as caught:
        found(written(text), engine())
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_template_that_refuses_all_is_unchecked(written):
    result = found(written("{{ raise_exception('no') }}"), engine())
    assert (result.verdict, result.chosen.conversations) == ("unchecked", [])
    done = CliRunner().invoke(app, ["template", str(written("{{ raise_exception('no') }}")), "--candidate", engine()])
    assert done.exit_code == 2


def test_an_engine_that_refuses_is_wrong(written):
    result = found(written("{{ messages[0].content }}"), shlex.join(
        [sys.executable, "-c", "import json\nwhile True: input(); print(json.dumps({'error': 'no'}), flush=True)"]
    ))  # fmt: skip
    assert (result.verdict, result.places[0].smallest.error) == ("wrong", "no")


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        found(tmp_path / "nowhere.jinja", engine())
    assert verb.FEW == 3
