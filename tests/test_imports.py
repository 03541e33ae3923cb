"""Who may import what: the way through the code, held."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "llamadiff").rglob("*.py"), *(ROOT / "reference").rglob("*.py")]

ALLOWED = {
    "llama_cpp": ("llamadiff/llamacpp/", "llamadiff/shipped/"),
    "gguf": ("reference/llamaref/", "llamadiff/shipped/"),
    "typer": ("llamadiff/cli/commands.py", "llamadiff/cli/options.py"),
    "rich": ("llamadiff/report/",),
    "pandas": ("llamadiff/comparison/result.py",),
    "jinja2": ("llamadiff/engines/chat_template.py",),
    "torch": ("llamadiff/shipped/", "llamadiff/candidates/torch_modules.py", "llamadiff/candidates/transformers.py"),
    "transformers": ("llamadiff/candidates/transformers.py",),
    "safetensors": ("llamadiff/trace/reader.py", "llamadiff/ggml/", "llamadiff/llamacpp/graph_recorder.py"),
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    where = str(path.relative_to(ROOT))
    for name in imports(path):
        top = name.split(".")[0]
        assert not (where.startswith("reference/") and top in ("llamadiff", "llama_cpp")), name
        if top in ALLOWED:
            assert where.startswith(ALLOWED[top]), name
        if name.startswith("llamadiff.report"):
            assert where.startswith(
                ("llamadiff/report/", "llamadiff/cli/commands.py", "llamadiff/comparison/check_traces.py")
            ), name
        if name.startswith("llamadiff.llamacpp.record_taps"):
            assert where.startswith("llamadiff/llamacpp/"), name


def test_nothing_is_unpickled_or_evaluated():
    for path in FILES:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"eval", "exec", "pickle", "marshal"}, path
