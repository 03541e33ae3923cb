"""The house's rules, held to the source tree: who imports what, how wide a function is, what one file is enough for."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import resolve_name

import pytest
from llamaref import ARCHITECTURES, Engine, ModelError, models
from models.small import write_model
from optional import needs_slices
from places import ROOT, TESTS
from tools.without import CORE as CORE_TESTS

from llamadiff import api, plugins
from llamadiff.candidates.reference import record
from llamadiff.engines.model_file import Runnable
from llamadiff.verbs.verbs import diff

FILES = [*(ROOT / "llamadiff").rglob("*.py"), *(ROOT / "reference").rglob("*.py")]


def name(path):
    return str(path.relative_to(ROOT))


@cache
def tree(path):
    """A file, parsed."""
    return ast.parse(path.read_text("utf-8"))


# -- the core and its slices -------------------------------------------------------------------------------------------

EXT = "llamadiff.ext."
CORE_LINES = 21_030  # of Python in the core; it goes down, and 18,000 are the aim
SLICES = sorted(path.parent.name for path in (ROOT / "llamadiff/ext").glob("*/__init__.py"))
ALLOWED = {
    "llama_cpp": ("llamadiff/llamacpp/",),
    "gguf": ("reference/llamaref/",),
    "typer": ("llamadiff/cli/", *(f"llamadiff/ext/{name}/cli.py" for name in SLICES)),
    "rich": (
        "llamadiff/report/",
        "llamadiff/ext/explain/listing.py",
        "llamadiff/ext/file/report.py",
        "llamadiff/ext/graph/listing.py",
        "llamadiff/ext/state/report.py",
        "llamadiff/ext/watch/report.py",
        "llamadiff/ext/port/page.py",
        "llamadiff/ext/preprocess/page.py",
        "llamadiff/ext/sweep/page.py",
        "llamadiff/ext/prompt/templates/page.py",
        "llamadiff/ext/prompt/tokens/page.py",
    ),
    "pytest": ("llamadiff/ext/captures/pytest_plugin.py",),
    "pandas": ("llamadiff/result/comparison.py",),
    "jinja2": (
        "llamadiff/ext/prompt/chat_template.py",
        "llamadiff/ext/prompt/templates/",  # in its child process
        "llamadiff/ext/page/page.py",
    ),
    "pyarrow": ("llamadiff/ext/sweep/store.py",),
    "distributed": ("llamadiff/ext/sweep/cluster.py",),
    "torch": (
        "llamadiff/ext/pytorch/",
        "llamadiff/ext/port/loading.py",
        "llamadiff/ext/port/tiny_heads.py",
        "llamadiff/ext/port/projector_model.py",
        "llamadiff/ext/port/torch_ops.py",
        "llamadiff/ext/preprocess/text_inputs_child.py",
    ),
    "transformers": (
        "llamadiff/ext/pytorch/transformers.py",
        "llamadiff/ext/preprocess/child.py",
        "llamadiff/ext/preprocess/text_inputs_child.py",
    ),
    "PIL": ("llamadiff/ext/preprocess/child.py", "llamadiff/ext/preprocess/text_inputs_child.py"),
    **dict.fromkeys(
        (
            "fcntl",
            "filelock",
            "grp",
            "msvcrt",
            "platformdirs",
            "posix",
            "psutil",
            "pwd",
            "resource",
            "select",
            "termios",
            "winreg",
        ),
        ("llamadiff/system/",),
    ),
    "safetensors": ("llamadiff/trace/", "llamadiff/ext/graph/", "llamadiff/ext/port/tiny_heads.py"),
}


def imports(path):
    """The names that a file imports, those for type checkers too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    """A file's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def slice_of(module):
    """The slice that a dotted name is in, if it is in one."""
    return module.removeprefix(EXT).partition(".")[0] if module.startswith(EXT) else None


def out_of_place(path):
    """The libraries that a file imports and may not."""
    where = name(path)
    for imported in imports(path):
        top = imported.split(".")[0]
        of_reference = where.startswith("reference/") and top in ("llamadiff", "llama_cpp")
        if of_reference or (top in ALLOWED and not where.startswith(ALLOWED[top])):
            yield imported


def offenders(rule):
    """Each file that breaks a rule, with how."""
    return {name(path): found for path in FILES if (found := list(rule(path)))}


def test_libraries_are_used_in_their_places():
    assert offenders(out_of_place) == {}


WHICH_SYSTEM = {"sys.platform", "os.name", "os.uname", "platform.system", "platform.uname", "platform.win32_ver"}


def knowing_the_system(path):
    """Where a file outside system/ asks which system this is."""
    if not name(path).startswith("llamadiff/system/"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in WHICH_SYSTEM:
                yield f"{ast.unparse(node)}, line {node.lineno}"


def test_one_room_knows_which_system_it_is():
    """What one of three systems lacks is found by mypy, which is run for each."""
    assert offenders(knowing_the_system) == {}


def test_the_core_stays_small():
    core = [path for path in FILES if slice_of(module_of(path)) is None and not name(path).startswith("reference/")]
    assert sum(path.read_text("utf-8").count("\n") for path in core) <= CORE_LINES


def into_slices(path):
    """The slices that a file outside them imports."""
    if slice_of(module_of(path)) is None:
        yield from (imported for imported in imports(path) if slice_of(imported) is not None)


def test_the_core_imports_no_slice():
    assert offenders(into_slices) == {}


def slices_at_collection(path):
    """The slices that a test of the core imports before anybody can skip it, itself or by its helpers."""
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            helper = TESTS / f"{node.module.replace('.', '/')}.py"
            if slice_of(node.module) is not None:
                yield node.module
            elif helper.is_file():
                yield from slices_at_collection(helper)


def test_the_cores_tests_are_collected_without_slices():
    files = [path for folder in CORE_TESTS for path in (TESTS / folder).rglob("test_*.py")]
    assert len(files) > 50
    assert {name(path): found for path in files if (found := list(slices_at_collection(path)))} == {}


def beyond_its_needs(path):
    """What a file imports of slices that its own does not say it needs."""
    own = slice_of(module_of(path))
    if own in plugins.slices():
        needs = {own, *plugins.slices()[own].needs}
        yield from (imported for imported in imports(path) if slice_of(imported) not in (None, *needs))


def test_a_slice_says_which_others_it_needs():
    assert offenders(beyond_its_needs) == {}


def core_modules_used(path):
    """What a slice's file imports of the core, by modules: ``judge.study``."""
    if slice_of(module_of(path)) is not None:
        modules = {module_of(each) for each in FILES}
        named = {imported for imported in imports(path) if imported in modules and slice_of(imported) is None}
        yield from (each.partition(".")[2] for each in named if "." in each and each.startswith("llamadiff."))


PUBLIC = {f"{folder}.{module}" for folder, (_, modules) in api.API.items() for module in modules}


def used_by_slices():
    """The modules of the core that slices import."""
    used = {each for path in FILES for each in core_modules_used(path)} - {"plugins"}
    return {each for each in used if not (ROOT / "llamadiff" / each / "__init__.py").exists()}


def test_slices_use_of_the_core_what_is_meant_for_them():
    assert used_by_slices() <= PUBLIC


@pytest.mark.skipif(not (ROOT / "tests" / "ext").is_dir(), reason="slices are deleted (tools/without.py)")
def test_what_is_meant_for_slices_is_used():
    assert used_by_slices() >= PUBLIC


# They name for type checkers what slices are given, and import the rest of it where it is asked for.
LAZY = {"llamadiff", "llamadiff.plugins", *(EXT + name for name in SLICES)}


def test_no_imports_go_in_a_circle():
    modules = {module_of(path): path for path in FILES}
    arrows = {
        module: {name for name in imports(path) if name in modules} - {module, *LAZY}
        for module, path in modules.items()
        if module not in LAZY
    }
    while leaves := {module for module, names in arrows.items() if not names}:
        arrows = {module: names - leaves for module, names in arrows.items() if module not in leaves}
    assert arrows == {}


def test_only_the_child_process_records():
    """What imports llama.cpp is imported by its child process alone."""
    for path in FILES:
        if not name(path).startswith("llamadiff/llamacpp/"):
            assert not [name for name in imports(path) if name.startswith("llamadiff.llamacpp.record_taps")], path


RUNS_PROGRAMS = "llamadiff/ext/record/python_agent.py"  # a user's own, in the user's own Python, as that would


def test_nothing_is_unpickled_or_evaluated():
    for path in (path for path in FILES if name(path) != RUNS_PROGRAMS):
        names = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "pickle", "marshal"}, path


# -- one place that makes a Comparison, no question which engine it is -------------------------------------------------

ENGINES = {"Model", "ModelFile", "Runnable", "GraphModel", "Engine", "GraphEngine"}


def calls(code, function):
    """The calls of a function by its name, be it imported or an attribute."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", None))
            if called == function:
                yield node


def engines_asked_for(code):
    """The engines that an isinstance or an issubclass asks for."""
    asked = [
        argument for word in ("isinstance", "issubclass") for call in calls(code, word) for argument in call.args[1:]
    ]
    names = {getattr(node, "id", getattr(node, "attr", None)) for argument in asked for node in ast.walk(argument)}
    return names & ENGINES


def test_a_comparison_is_made_in_one_place():
    made = [name(path) for path in FILES for _ in calls(tree(path), "Comparison")]
    assert made == ["llamadiff/result/comparison.py"]


def test_nobody_asks_which_engine_it_is():
    assert offenders(lambda path: engines_asked_for(tree(path))) == {}


@pytest.mark.parametrize(
    "engine", ["engines.reference_model:Model", pytest.param("ext.graph.model:GraphModel", marks=needs_slices("graph"))]
)
def test_both_engines_have_one_interface(engine):
    engine = resolve_name(f"llamadiff.{engine}")
    public = {attribute for attribute in dir(engine) if not attribute.startswith("_")}
    asked = {attribute for attribute in (*dir(Runnable), *Runnable.__annotations__) if not attribute.startswith("_")}
    assert asked >= public


@pytest.mark.parametrize(
    "code", ["isinstance(x, Model)", "isinstance(x, (int, llamaref.Engine))", "isinstance(x.y, A | GraphModel)",
             "issubclass(type(x), Runnable)"],
)  # fmt: skip
def test_questions_for_the_engine_are_seen(code):
    assert engines_asked_for(ast.parse(code))


# -- an architecture is one file, and nothing outside asks for one by name ---------------------------------------------

MODELS = ROOT / "reference/llamaref/models"
TOKENS = (1, 17, 5, 80, 42, 9)

# What toyllama has and llama has not: a line of llama.py, and what stands there instead.
TOY = {
    '"""llama: ': '"""toyllama: windows in every other layer, a scale of its own; otherwise ',
    "import numpy as np\n": "from dataclasses import replace\n\nimport numpy as np\n",
    "import Traits": "import Traits, Windows",
    "rope_pairs=True": 'windows=Windows(length=0, period=2), keys="toy_scale"',
    "TRAITS = ": """def configure(c, read):
    return replace(c, embedding_scale=read.number("toy_scale", 1.0))


TRAITS = """,
    "rope_pairs(": "rope_halves(",
    "m.attention(i, q, k, v, step)": "m.attention(i, q, k, v, step, window=m.config.windows[i])",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A model of an architecture that one new file defines."""
    text = (MODELS / "llama.py").read_text("utf-8")
    for line, instead in TOY.items():
        assert line in text
        text = text.replace(line, instead)
    (tmp_path / "toyllama.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    monkeypatch.setitem(ARCHITECTURES, "toyllama", import_module("llamaref.models.toyllama"))
    yield write_model(tmp_path / "toy.gguf", "toyllama", extra={"attention.sliding_window": 3, "toy_scale": 8.0})
    del sys.modules["llamaref.models.toyllama"]


def test_a_file_adds_an_architecture(toy):
    engine = Engine(toy)
    assert (engine.config.windows, engine.config.embedding_scale) == ((3, 0), 8.0)
    right = record(engine, TOKENS, "right")
    assert diff(right, right, toy).verdict == "match"
    engine.config = replace(engine.config, windows=(0, 0))
    found = diff(right, record(engine, TOKENS, "without its window"), toy)
    assert found.first_divergence.tap == "kq_soft_max-0"


def test_without_its_file_the_architecture_is_not_known(tmp_path):
    with pytest.raises(ModelError, match="architecture 'toyllama' is not implemented; the engine has deepseek2, gemma"):
        Engine(write_model(tmp_path / "toy.gguf", "toyllama"))


# Names of architectures that mean something else: tokenizers, libllama; the model that is trained is a llama. What
# becomes of a checkpoint's tensors and keys is a table by architecture, of converters and not of engines.
OTHERWISE = {
    "llamadiff/trace/token_text.py", "llamadiff/shipped/train.py", "llamadiff/llamacpp/library.py",
    "llamadiff/ext/prompt/tokenizer/rules.py",
}  # fmt: skip
OUTSIDE = [
    path
    for folder in ("llamadiff", "reference/llamaref")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent not in (MODELS, ROOT / "llamadiff/ext/file") and name(path) not in OTHERWISE
]


def named(node):
    """The last part of what an expression is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def asks_for_one(node):
    """Whether an expression names an architecture, or compares what a model's is with a text."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        texts = [side for side in sides if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set)]
        return bool(texts) and "architecture" in map(named, sides)
    return isinstance(node, ast.Constant) and node.value in ARCHITECTURES


def test_no_architecture_is_asked_for_by_name():
    asked = {path: [node.lineno for node in ast.walk(tree(path)) if asks_for_one(node)] for path in OUTSIDE}
    assert {name(path): lines for path, lines in asked.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    ['x.architecture == "phi9"', 'architecture in ("a", "b")', '"gemma2"', '{"olmo2": 1}', 'a.startswith("gemma")'],
)
def test_such_a_question_is_seen(text):
    assert any(asks_for_one(node) for node in ast.walk(ast.parse(text)))
