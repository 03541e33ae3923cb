"""Who may import what: the rooms, in their order, held."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from places import ROOMS, ROOT

FILES = [*(ROOT / "llamadiff").rglob("*.py"), *(ROOT / "reference").rglob("*.py")]

ABOVE = ("__init__", "__main__")  # the ways in
ALLOWED = {
    "llama_cpp": ("llamadiff/llamacpp/",),
    "gguf": ("reference/llamaref/",),
    "typer": ("llamadiff/cli/",),
    "rich": ("llamadiff/report/",),
    "pytest": ("llamadiff/pytest_plugin/",),
    "pandas": ("llamadiff/comparison/result.py",),
    "jinja2": ("llamadiff/engines/chat_template.py", "llamadiff/report/html/page.py"),
    "pyarrow": ("llamadiff/sweep/store.py",),
    "distributed": ("llamadiff/sweep/cluster.py",),
    "torch": ("llamadiff/candidates/torch_modules.py", "llamadiff/candidates/transformers.py"),
    "transformers": ("llamadiff/candidates/transformers.py",),
    "safetensors": ("llamadiff/trace/", "llamadiff/ggml/", "llamadiff/llamacpp/graph_recorder.py"),
}


def imports(path):
    """The names that a file imports, those for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    """A file's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name):
    """The room that a dotted name of the package is in, if it is in one."""
    parts = name.split(".")
    return parts[1] if parts[0] == "llamadiff" and len(parts) > 1 and parts[1] in ROOMS else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_libraries_are_used_in_their_places(path):
    where = str(path.relative_to(ROOT))
    for name in imports(path):
        top = name.split(".")[0]
        assert not (where.startswith("reference/") and top in ("llamadiff", "llama_cpp")), name
        assert top not in ALLOWED or where.startswith(ALLOWED[top]), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = room_of(module_of(path))
    if own is not None:
        rooms = [(name, room) for name in imports(path) if (room := room_of(name)) is not None]
        assert [name for name, room in rooms if ROOMS.index(room) < ROOMS.index(own)] == []


def test_every_file_is_in_a_room():
    files = {path.relative_to(ROOT / "llamadiff").parts for path in (ROOT / "llamadiff").rglob("*.py")}
    assert {parts[0] for parts in files if len(parts) > 1} == set(ROOMS)
    assert {parts[0].removesuffix(".py") for parts in files if len(parts) == 1} == set(ABOVE)


def test_no_imports_go_in_a_circle():
    modules = {module_of(path): path for path in FILES}
    arrows = {
        module: {name for name in imports(path) if name in modules} - {module} for module, path in modules.items()
    }
    while leaves := {module for module, names in arrows.items() if not names}:
        arrows = {module: names - leaves for module, names in arrows.items() if module not in leaves}
    assert arrows == {}


def test_only_the_child_process_records():
    """What imports llama.cpp is imported by its child process alone."""
    for path in FILES:
        if not str(path.relative_to(ROOT)).startswith("llamadiff/llamacpp/"):
            assert not [name for name in imports(path) if name.startswith("llamadiff.llamacpp.record_taps")], path


def test_nothing_is_unpickled_or_evaluated():
    for path in FILES:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "pickle", "marshal"}, path


def test_one_word_is_one_class():
    """A name stands for one class in the whole package, but for what is pasted into engines, and what llamaref has."""
    names = Counter(
        node.name
        for path in FILES
        if not str(path.relative_to(ROOT)).startswith("llamadiff/writers/")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == {"Tap"}  # what llamaref calls, and what a tap is
