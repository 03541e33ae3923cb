"""The page in a real browser: what it shows, what it asks for, what a click or a key opens, foreign text as text."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command import run
from faulty import BUGS
from optional import needs, program
from proof.injected.runs import record_faulty
from report.made_up import row
from traces import TOKENS, save
from waiting import HANG

from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.page import page as pages
from llamadiff.ext.page.data import columns_of
from llamadiff.ext.page.page import MOST, checks_to_html, to_html
from llamadiff.report.formats import About
from llamadiff.report.terminal.tap_lines import over_limit
from llamadiff.result.logits import Position, TopToken
from llamadiff.verbs import verbs

COMMAND = About(("llamadiff", "compare", "model.gguf", "it's <b>", "mine.safetensors"))
HOSTILE = (
    "</script><script>window.hit=1</script>", "<script>window.hit=1</script>", "<img src=x onerror=window.hit=1>",
    '" onmouseover="window.hit=1', "' autofocus onfocus='window.hit=1", "<!--<script>", "]]>", "{{ 7 * 7 }}",
    "</style><style>*{display:none}</style>", "&lt;b&gt;", "\u2028\u2029", "</title>", "javascript:window.hit=1",
    "<svg/onload=window.hit=1>", "\ud800", "${window.hit=1}", "\\u003cscript\\u003e",
)  # fmt: skip


@pytest.fixture(scope="module")
def faulty(small_model):
    return record_faulty(BUGS[0], small_model(), TOKENS, name="my-engine")


@pytest.fixture(scope="module")
def wrong(small_model, faulty):
    return verbs.compare(small_model(), Run(tokens=TOKENS), faulty, How(pictures=True))


@pytest.fixture(scope="module")
def right(small_model):
    return verbs.compare(small_model(), Run(tokens=TOKENS, n_predict=3), None, How(pictures=True))


def hostile(result, text):
    """A comparison whose every foreign text is this."""
    rows = tuple(
        replace(each, tap=each.tap if each.verdict == "wrong" else f"{text}{each.tap}", weight=text, weight_type=text)
        for each in result.rows
    )
    tops = tuple(TopToken(n + 1, n, text, 1.0, 2.0, 3) for n in range(3))
    positions = tuple(Position(0.1, False, (1, text), (2, text)) for _ in result.tokens)
    return replace(
        result, headline=text, proof=(text,) * 5, next_steps=(text,), rows=rows, prompt=text,
        tokens=tuple((1, text) for _ in result.tokens), logits=replace(result.logits, top=tops, positions=positions),
        model={**result.model, "file": text, "architecture": text, "weight_types": {text: 1}, "sha256": text},
        baseline={"name": text, "version": text, "settings": {text: text}}, candidate={"name": text, "version": text},
    )  # fmt: skip


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.scripts, self.attributes, self.within = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.within = ""

    def handle_data(self, data):
        if self.within == "script":
            self.scripts[-1] += data


# without a browser


def test_a_page_is_one_file_that_names_nothing_outside(wrong):
    page = to_html(wrong, COMMAND)
    assert len(page.encode()) < MOST
    parsed = Parsed(page)
    links = [value for name, value in parsed.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "@import" not in page
    assert "url(" not in page
    assert "llamadiff compare model.gguf &#39;it&#39;&#34;&#39;&#34;&#39;s &lt;b&gt;&#39; mine.safetensors" in page


def test_the_policy_lets_this_script_run_and_this_style_apply_and_nothing_else(wrong):
    page = to_html(wrong, COMMAND)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    style = page.split("<style>")[1].split("</style>")[0]
    for kind, text in (("script", Parsed(page).scripts[-1]), ("style", style)):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert " style=" not in page


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_opens_nothing(wrong, text):
    plain, parsed = Parsed(to_html(wrong, COMMAND)), Parsed(to_html(hostile(wrong, text), COMMAND))
    assert set(parsed.tags) <= {*plain.tags, "details", "summary"}
    assert parsed.tags.count("script") == 2
    assert parsed.scripts[1] == plain.scripts[1]
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    json.loads(parsed.scripts[0])


def test_the_page_says_all_that_matters_without_a_script(wrong):
    page = to_html(wrong, COMMAND)
    assert "<h1>RoPE, layers 0, 1: rotates (i, i+32); this model needs (2i, 2i+1)</h1>" in page
    assert '<b class="badge wrong"><i>✗</i> WRONG</b>' in page
    assert "<code>rope-layout</code>" in page
    assert "<b>Fix:</b> rotate (2i, 2i+1)" in page
    assert page.count('<span class="chip"') == len(TOKENS)


def test_where_nothing_is_wrong_the_tap_nearest_to_its_limit_comes_first(right):
    page, nearest = to_html(right, COMMAND), max(right.rows, key=lambda row: over_limit(row) or 0).tap
    assert "least headroom below a limit" in page
    assert re.search('<table class="closest">.*?data-opens="([^"]*)"', page, re.DOTALL)[1] == nearest


def test_data_has_a_cell_for_each_tap_and_numbers_that_json_knows(wrong):
    data = json.loads(Parsed(to_html(wrong, COMMAND)).scripts[0])[0]
    assert len(data["cells"]) == len(wrong.rows)
    assert data["cells"][data["leading"]][0] == "Qcur_rope-0"
    assert data["columns"][:3] == ["attn_norm", "Qcur_proj", "Kcur_proj"]
    assert {wrong.rows[int(at)].tap for at in data["closeups"]} >= {each.tap for each in wrong.wrong}


def test_a_page_without_room_has_fewer_closeups(wrong, monkeypatch):
    whole = to_html(wrong, COMMAND)
    monkeypatch.setattr(pages, "MOST", len(whole.encode()) - 1000)
    small = to_html(wrong, COMMAND)
    data = json.loads(Parsed(small).scripts[0])[0]
    assert 0 < len(data["closeups"]) < len(json.loads(Parsed(whole).scripts[0])[0]["closeups"])
    assert str(data["leading"]) in data["closeups"]


def test_of_too_many_reports_the_worst_have_a_map(right, wrong, monkeypatch):
    results = [(Path(f"{number}.safetensors"), wrong if number == 40 else right) for number in range(48)]
    monkeypatch.setattr(pages, "MOST", 600_000)
    page = checks_to_html(results, COMMAND)
    data = json.loads(Parsed(page).scripts[0])
    assert len(page.encode()) <= 600_000
    assert data[40] is not None
    assert data.count(None) > 24
    assert page.count("the page would be too large") == data.count(None)


def test_columns_are_in_the_order_of_layers_that_differ():
    taps = ("embd", "a-0", "b-0", "node_7", "node_9", "d-0", "a-1", "c-1", "d-1", "out")
    rows = [replace(row(tap), layer=None if tap in ("embd", "out") else int(tap[-1] == "1"), op="ADD") for tap in taps]
    labels, places = columns_of(rows)
    assert labels == ["a", "c", "b", "add", "add 2", "d"]
    assert places == [-1, 0, 2, 3, 4, 5, 0, 1, 5, -1]


def test_html_is_an_option_that_keeps_pictures(small_model, faulty, tmp_path):
    target, trace = tmp_path / "report.html", save(faulty, tmp_path / "faulty.safetensors")
    assert run("compare", small_model(), trace, "-o", f"html:{target}").returncode == 1
    assert json.loads(Parsed(target.read_text("utf-8")).scripts[0])[0]["closeups"]
    assert run("backend", small_model(), "--tokens", "1,17,5", "-o", f"html:{target}").returncode == 0
    assert json.loads(Parsed(target.read_text("utf-8")).scripts[0])[0]["closeups"]
    done = run("check", trace, "--model", small_model(), "-o", "html:-")
    assert json.loads(Parsed(done.stdout).scripts[0])[0]["closeups"]


# in a browser


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page, and holds it to errors and requests at the end."""
    opened = []

    def show(text, width=1280, scheme="light"):
        path = tmp_path / f"page-{len(opened)}.html"
        path.write_bytes(text.encode("utf-8", "backslashreplace"))
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=HANG * 1000)
        opened.append((context, said, asked, path.as_uri()))
        return page

    yield show
    for context, said, asked, address in opened:
        context.close()
        assert said == []
        assert asked == [address]


def becomes(page, condition):
    """Whether a condition comes true; the page's policy does not let the driver wait for it within."""
    for _ in range(200):
        if page.evaluate(condition):
            return True
        page.wait_for_timeout(100)
    return False


@needs("chromium", "playwright")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_every_width_and_theme_fits_and_shows_every_part(show, wrong, right, width, scheme):
    for result in (wrong, right):
        page = show(to_html(result, COMMAND), width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("[data-tap]").count() == len(result.rows)
        for part in ("curves", "logits", "timeline", "slots"):
            assert page.locator(f"[data-place={part}]").is_visible()
        assert page.locator(".verdict h1").inner_text() == result.headline
    ink = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) < 200) == (scheme == "dark")


@needs("chromium", "playwright")
def test_wrong_cells_are_outlined_and_the_first_is_open_and_in_sight(show, wrong):
    page = show(to_html(wrong, COMMAND))
    assert page.locator(".map .glyph").all_text_contents().count("✗") == len(wrong.wrong)
    assert page.locator(".closeup h2").inner_text() == "Qcur_rope-0"
    box = page.locator("[data-tap=Qcur_rope-0]").bounding_box()
    assert 0 < box["y"] < 900
    assert {"errors", "values", "histogram", "profile"} <= set(
        page.locator(".closeup [data-figure]").evaluate_all("all => all.map(each => each.dataset.figure)")
    )
    worst = page.locator("table.values td.worst").all_inner_texts()
    first = wrong.rows[[each.tap for each in wrong.rows].index("Qcur_rope-0")].local
    assert [float(text) for text in worst] == [pytest.approx(first.expected, rel=0.01),
                                               pytest.approx(first.recorded, rel=0.01)]  # fmt: skip


@needs("chromium", "playwright")
def test_a_click_opens_the_tap_and_the_pointer_tells_its_numbers(show, wrong):
    page = show(to_html(wrong, COMMAND))
    for tap in ("kq-1", "ffn_up-0", "result_output", "embd"):
        page.locator(f"[data-tap={tap}]").hover()
        assert page.locator("#tip b").inner_text() == tap
        page.locator(f"[data-tap={tap}]").click()
        assert page.locator(".closeup h2").inner_text() == tap
    own = next(each for each in wrong.rows if each.tap == "Kcur_rope-1").local.nmse
    page.locator(".taps [data-opens=Kcur_rope-1]").click()
    assert page.locator(".closeup h2").inner_text() == "Kcur_rope-1"
    shown = page.locator(".closeup .numbers dd").first.inner_text()
    assert float(shown) == pytest.approx(own, rel=0.1)


@needs("chromium", "playwright")
def test_the_map_goes_by_keyboard(show, wrong):
    page = show(to_html(wrong, COMMAND))
    page.locator(".map svg[role=application]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip b").inner_text() == "Kcur_rope-0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator(".closeup h2").inner_text() == "Kcur_rope-1"
    page.keyboard.press("Escape")
    assert page.locator(".closeup").is_hidden()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    assert page.locator("#tip b").inner_text() in ("result_norm", "result_output")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


@needs("chromium", "playwright")
def test_switches_change_what_colours_say(show, wrong):
    page = show(to_html(wrong, COMMAND))
    fill = "document.querySelector('[data-tap=\"l_out-1\"]').style.fill"
    own, drifts = page.evaluate(fill), {}
    for name in ("drift", "rounding", "cosine", "rms", "mean"):
        page.locator(f"[data-metric={name}]").click()
        assert page.locator(f"[data-metric={name}]").get_attribute("aria-pressed") == "true"
        drifts[name] = page.evaluate(fill)
    assert own != drifts["drift"]
    assert len(set(drifts.values())) > 2


@needs("chromium", "playwright")
def test_a_change_of_theme_or_width_draws_anew(show, wrong):
    page = show(to_html(wrong, COMMAND))
    fill = "document.querySelector('[data-tap=\"l_out-1\"]').style.fill"
    light = page.evaluate(fill)
    page.emulate_media(color_scheme="dark")
    assert becomes(page, f"{fill} !== '{light}'")
    page.set_viewport_size({"width": 390, "height": 800})
    assert becomes(page, "document.querySelector('.map svg').clientWidth < 390")
    assert becomes(page, "document.documentElement.scrollWidth <= 390")


@needs("chromium", "playwright")
def test_foreign_text_is_shown_as_text(show, wrong):
    from llamadiff.report.terminal.escape import escape_line, quote

    texts = [HOSTILE[number % len(HOSTILE)] for number in range(len(wrong.rows))]
    rows = tuple(each if each.verdict == "wrong" else replace(each, tap=text + each.tap)
                 for each, text in zip(wrong.rows, texts, strict=True))  # fmt: skip
    result = replace(hostile(wrong, HOSTILE[0]), rows=rows, tokens=tuple(enumerate(HOSTILE)), next_steps=HOSTILE[:8])
    page = show(to_html(result, COMMAND))
    assert page.locator("h1").text_content() == HOSTILE[0]
    assert page.locator(".chip").all_text_contents() == [quote(text, 24)[1:-1] for text in HOSTILE]
    assert page.locator(".steps li").all_text_contents() == [escape_line(text) for text in HOSTILE[:8]]
    taps = page.locator("[data-tap]").evaluate_all("all => all.map(each => each.dataset.tap)")
    assert sorted(taps) == sorted(escape_line(each.tap, 60) for each in rows)
    page.locator("[data-tap]").first.hover()
    assert page.locator("#tip b").text_content() in taps
    page.locator("[data-tap]").first.click()
    assert page.locator(".closeup h2").text_content() in taps
    assert page.evaluate("window.hit") is None


@needs("chromium", "playwright")
def test_nothing_else_could_run_or_be_asked_for(browser, wrong, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        to_html(wrong, COMMAND).replace("</main>", "<script>window.hit=1</script></main>", 1), encoding="utf-8"
    )
    page = browser.new_page()
    blocked, asked = [], []
    page.on("console", lambda message: blocked.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert len(blocked) == 2
    assert all("Content Security Policy" in text for text in blocked)
    assert [address for address in asked if address.startswith("file:")] == [path.as_uri()]
    page.close()


@needs("chromium", "playwright")
def test_decode_steps_have_a_line_before_them(show, right):
    page = show(to_html(right, COMMAND))
    chart = page.locator("[data-figure=klchart]")
    assert chart.locator("rect.fill-soft").count() == len(TOKENS) + 3
    assert "decode →" in chart.locator("text").all_text_contents()
    assert page.locator(".chip.decoded").count() == 3
    assert "Is it normal? Rms of llama.cpp" in page.locator("[data-text=growth]").inner_text()
    page.locator("[data-place=curves] select").select_option("ffn_up")
    assert page.locator("[data-figure=rms] svg").get_attribute("aria-label").startswith("rms of ffn_up-0")


@needs("chromium", "playwright")
def test_of_several_traces_the_first_wrong_one_is_shown_and_each_can_be(show, wrong, right):
    page = show(checks_to_html([(Path("a.safetensors"), right), (Path("b<b>.safetensors"), wrong)], COMMAND))
    assert page.locator("main.report:visible h1").all_inner_texts() == [wrong.headline]
    assert page.locator("nav a[aria-current] code").inner_text() == "b<b>.safetensors"
    page.locator("nav a").first.click()
    assert page.locator("main.report:visible h1").all_inner_texts() == [right.headline]
    assert page.locator("main.report:visible [data-tap]").count() == len(right.rows)


@needs("chromium", "playwright")
def test_what_was_refused_is_listed(show, right):
    about = replace(COMMAND, refused=((Path("c.safetensors"), "is of <b>another</b> model"),))
    page = show(checks_to_html([(Path("a.safetensors"), right)], about))
    assert page.locator("nav li").all_inner_texts()[1].split() == [
        "?", "REFUSED", "c.safetensors", "is", "of", "<b>another</b>", "model",
    ]  # fmt: skip
    assert page.title().startswith("UNCHECKED")


@needs("chromium", "playwright")
def test_two_traces_without_a_model_begin_where_they_part(show, small_model, faulty):
    from llamadiff.verbs.drift_only import drift_only

    result = drift_only(record_faulty(BUGS[1], small_model(), TOKENS, name="other"), faulty, How(pictures=True))
    page = show(to_html(result, COMMAND))
    first = next(each.tap for each in result.rows if each.verdict == "unchecked")
    assert page.locator(".closeup h2").inner_text() == first
    assert page.locator("[data-metric=own]").count() == 0
    assert "could not be judged" in page.locator("[data-text=map-says]").inner_text()


def deep(result, layers=80):
    """A comparison of so many layers, made of one of two; wrong in the last but one."""
    inner = [each for each in result.rows if each.layer == 0]
    rows = [each for each in result.rows if each.tap == "embd"]
    for layer in range(layers):
        for each in inner:
            tap = each.tap.replace("-0", f"-{layer}")
            verdict = "wrong" if tap == f"Qcur_rope-{layers - 2}" else "match"
            rows.append(replace(each, tap=tap, layer=layer, verdict=verdict))
    rows += [each for each in result.rows if each.tap.startswith("result")]
    return replace(result, rows=tuple(rows), diagnosis=())


@needs("chromium", "playwright")
@pytest.mark.parametrize("width", [1280, 390])
def test_of_80_layers_the_first_divergence_is_in_sight_of_its_map(show, wrong, width):
    page = show(to_html(deep(wrong), COMMAND), width)
    box = page.locator("[data-tap=Qcur_rope-78]").bounding_box()
    place = page.locator(".canvas").bounding_box()
    assert place["y"] < box["y"] < place["y"] + place["height"]
    assert box["height"] >= 6
    assert box["width"] >= 9
    assert page.evaluate("performance.now()") < 30_000  # measured: below 2 s
