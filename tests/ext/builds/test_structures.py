"""The table of llama.h's structures: what its rows say is so, and a row that is off by a field is refused."""

from __future__ import annotations

import ctypes
import json
from contextlib import suppress
from itertools import chain

import pytest
from builds import HEADERS
from optional import needs
from places import ROOT
from tools.structures import TABLE, layout, main

from llamadiff import UserError
from llamadiff.ext.builds import structures
from llamadiff.ext.builds.structures import BATCH, CONTEXT, MODEL, declare_by_layout, layout_of, structure_of
from llamadiff.llamacpp.library import LLAMA, LLAMA_CPP_PYTHON, behind, set_fields
from llamadiff.system.libraries import Loaded
from llamadiff.trace.stated import read_toml

RELEASE = LLAMA_CPP_PYTHON.release
ROW = layout_of([RELEASE])
# What llamadiff sets: where one of these stands elsewhere, a run is another than was asked for.
SET = {
    MODEL: ("devices", "n_gpu_layers", "vocab_only", "use_extra_bufts"),
    CONTEXT: ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch", "flash_attn_type",
              "rope_freq_base", "rope_freq_scale", "cb_eval", "type_k", "type_v", "embeddings", "op_offload",
              "kv_unified"),
    BATCH: ("n_tokens", "token", "pos", "n_seq_id", "seq_id", "logits"),
}  # fmt: skip
pytestmark = pytest.mark.skipif(ROW is None, reason=f"{RELEASE} has no row: tests/tools/structures.py makes one")


@pytest.fixture
def lib() -> Loaded:
    """The installed llama.cpp, with no types declared: each is an object of its own."""
    llama = LLAMA_CPP_PYTHON.find(LLAMA)
    return Loaded(llama, behind(llama))


@pytest.fixture(params=["x86_64", "arm"])
def machine(request, monkeypatch) -> str:
    """A machine where the bytes that a library writes can be seen, and one where its defaults must do."""
    monkeypatch.setattr(structures.platform, "machine", lambda: request.param)
    return request.param


def places(structure: str, fields: dict[str, str]) -> dict[str, int]:
    """Where the fields stand that are set; -1: nowhere."""
    kind = structure_of(structure, fields)
    return {name: getattr(kind, name).offset if name in fields else -1 for name in SET[structure]}


def with_row(structure: str, fields: dict[str, str]) -> dict[str, dict[str, str]]:
    return {**ROW, structure: fields}


def without(fields: dict[str, str], name: str) -> dict[str, str]:
    return {field: kind for field, kind in fields.items() if field != name}


def inserted(fields: dict[str, str], before: str, kind: str) -> dict[str, str]:
    pairs = ([("more", kind), (field, of)] if field == before else [(field, of)] for field, of in fields.items())
    return dict(chain.from_iterable(pairs))


def moved(structure: str) -> list[dict[str, str]]:
    """The structure with a field less, or a field more, where all that are set are there, not all in their place."""
    fields = ROW[structure]
    changed = [without(fields, name) for name in fields]
    changed += [inserted(fields, name, kind) for name in fields for kind in ("bool", "int32", "pointer")]
    right = places(structure, fields)
    return [each for each in changed if -1 not in (there := places(structure, each)).values() and there != right]


def are_refused(lib: Loaded, structure: str, changed: list[dict[str, str]]) -> bool:
    taken = []
    for fields in changed:
        with suppress(UserError):
            declare_by_layout(lib, with_row(structure, fields), "llama.cpp")
            taken.append(list(fields))
    assert not taken
    return bool(changed)


def test_a_library_fits_its_row(lib, machine):
    declare_by_layout(lib, ROW, "llama.cpp")
    assert lib.llama_context_default_params().n_ctx == 512


@pytest.mark.parametrize("structure", [MODEL, CONTEXT, BATCH])
def test_a_row_that_is_off_by_a_field_is_refused(structure, lib, monkeypatch):
    monkeypatch.setattr(structures.platform, "machine", lambda: "x86_64")
    assert are_refused(lib, structure, moved(structure))


@pytest.mark.parametrize(("structure", "last"), [(MODEL, "use_extra_bufts"), (CONTEXT, "kv_unified")])
def test_so_it_is_by_its_defaults_where_what_is_written_cannot_be_seen(structure, last, lib, monkeypatch):
    """Of the last field that is set they say nothing: what stands behind it is anything."""
    monkeypatch.setattr(structures.platform, "machine", lambda: "arm")
    right = places(structure, ROW[structure])
    more = [each for each in moved(structure) if {**places(structure, each), last: 0} != {**right, last: 0}]
    assert are_refused(lib, structure, more)


def test_a_row_that_lacks_a_field_that_is_set_is_refused_when_it_is(lib):
    declare_by_layout(lib, with_row(CONTEXT, without(ROW[CONTEXT], "kv_unified")), "llama.cpp")
    with pytest.raises(UserError, match="has no kv_unified in its llama_context_params"):
        set_fields(lib.llama_context_default_params(), kv_unified=True)


def test_a_field_of_another_size_is_refused(lib, machine):
    for structure, name in ((MODEL, "n_gpu_layers"), (CONTEXT, "n_ctx"), (CONTEXT, "type_k"), (CONTEXT, "embeddings")):
        assert are_refused(lib, structure, [{**ROW[structure], name: "size_t"}])


def test_a_field_more_at_the_end_is_refused_by_what_is_written(lib, monkeypatch):
    """No default stands there: a release that appends one is told by its size alone."""
    monkeypatch.setattr(structures.platform, "machine", lambda: "x86_64")
    (*_, last) = ROW[CONTEXT]
    with pytest.raises(UserError, match="llama_context_default_params writes 160 bytes, not 152"):
        declare_by_layout(lib, with_row(CONTEXT, without(ROW[CONTEXT], last)), "llama.cpp")
    with pytest.raises(UserError, match="does not write all of more"):
        declare_by_layout(lib, with_row(CONTEXT, {**ROW[CONTEXT], "more": "pointer"}), "llama.cpp")


def test_the_message_says_whose_and_what(lib):
    with pytest.raises(UserError) as caught:
        declare_by_layout(lib, with_row(CONTEXT, inserted(ROW[CONTEXT], "n_threads", "int32")), "xllamacpp 1.2")
    assert str(caught.value) == (
        "xllamacpp 1.2: llama_context_default_params gives n_threads_batch 0, not 4: it is not laid out as its "
        "release's llama.h says; pip install 'llama-cpp-python>=0.3.36'"
    )


def test_what_is_installed_by_the_extra_has_a_row():
    stated = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]["prebuilt"]
    pinned = [text.partition(";")[0].replace("==", " ") for text in stated]
    assert len(pinned) == 2
    assert all(layout_of([release]) for release in pinned)


def test_no_row_for_a_release_that_nobody_made_one_of():
    assert layout_of(["xllamacpp 1.2", "ggml 9.9.9 (abcdef0)"]) is None


def test_no_release_has_two_rows():
    releases = [name for row in json.loads(TABLE.read_text("utf-8")) for name in row["releases"]]
    assert len(releases) == len(set(releases)) > 3


# -- how a row is made -------------------------------------------------------------------------------------------------


@needs("cc")
@pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without llama.cpp's headers")
def test_the_compiler_makes_the_row_that_is_there():
    assert layout(HEADERS) == ROW
    assert all(list(layout(HEADERS)[name]) == list(ROW[name]) for name in ROW)  # the order is the layout


@needs("cc")
@pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without llama.cpp's headers")
def test_a_release_is_added_to_the_row_of_its_layout_or_has_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.structures.TABLE", table := tmp_path / "table.json")
    main(str(HEADERS), "a 1")
    main(str(HEADERS), "a 2")
    for name in ("llama.h", "ggml.h", "ggml-cpu.h", "ggml-backend.h", "ggml-opt.h", "ggml-alloc.h", "gguf.h"):
        (tmp_path / name).write_bytes((HEADERS / name).read_bytes())
    header = (tmp_path / "llama.h").read_text("utf-8")
    (tmp_path / "llama.h").write_text(header.replace("bool embeddings;", "bool more; bool embeddings;"), "utf-8")
    main(str(tmp_path), "a 2", "b 1")
    rows = json.loads(table.read_text("utf-8"))
    assert [row["releases"] for row in rows] == [["a 1"], ["a 2", "b 1"]]
    assert list(rows[1]["structures"][CONTEXT])[-10:-7] == ["more", "embeddings", "offload_kqv"]


def test_a_structure_stands_as_c_has_it():
    kind = structure_of(CONTEXT, {"a": "bool", "b": "int32", "c": "bool", "d": "pointer", "e": "int32**"})
    assert [getattr(kind, name).offset for name in "abcde"] == [0, 4, 8, 16, 24]
    assert ctypes.sizeof(kind) >= 32 + 256
