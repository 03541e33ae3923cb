"""llama.cpp of any build: the installed one, through its headers and the shim; and builds with something wrong."""

from __future__ import annotations

import io
import os
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
from builds import HEADERS, compiled, other_library
from command import run
from optional import needs

from llamadiff import UserError
from llamadiff.cli.inputs import settings_of
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.builds.build_tree import find
from llamadiff.ext.builds.compiled import loaded
from llamadiff.ext.graph.backend import judge_graph, list_nodes
from llamadiff.llamacpp.capture import probe
from llamadiff.llamacpp.request import Settings
from llamadiff.report.terminal.report import make_console, render
from llamadiff.verbs.verbs import compare, record

TOKENS = (1, 17, 5, 40)
pytestmark = [
    needs("cc"),
    pytest.mark.skipif(not HEADERS.is_dir(), reason="this llama-cpp-python was installed without llama.cpp's headers"),
]


def asked(folder: Path | str, **settings: object) -> Run:
    return Run(tokens=TOKENS, settings=Settings(llama_cpp=str(folder), **settings), n_predict=2)


# -- one worker serves both ways in ------------------------------------------------------------------------------------


Q8 = {"type_k": "Q8_0", "type_v": "Q8_0", "flash_attn": True}


@pytest.mark.parametrize("settings", [{}, {"flash_attn": True}, Q8])
def test_both_ways_record_the_same(settings, small_model, build, tmp_path):
    by_shim = record(small_model(), asked(build, **settings), tmp_path / "a.safetensors")
    plain = Run(tokens=TOKENS, settings=Settings(**settings), n_predict=2)
    by_package = record(small_model(), plain, tmp_path / "b.safetensors")
    assert list(by_shim) == list(by_package)
    assert by_shim.info.tokens == by_package.info.tokens
    assert all(np.array_equal(by_shim[tap], by_package[tap], equal_nan=True) for tap in by_shim)
    said = by_shim.info.producer
    assert said["version"].startswith("llama.cpp in checkout, ggml ")
    assert str(build) not in (tmp_path / "a.safetensors").read_bytes().decode("latin-1")
    assert said["settings"] == by_package.info.producer["settings"]


def test_every_node_is_judged(small_model, build):
    found, wanted = (judge_graph(small_model("mamba2"), asked(folder)) for folder in (build, ""))
    assert found.verdict == "match"
    assert [(row.tap, row.verdict) for row in found.rows] == [(row.tap, row.verdict) for row in wanted.rows]


def test_its_graph_is_an_engine(small_model, build):
    result = compare(small_model(), asked(build), how=How(engine="graph"))
    assert result.verdict == "match"
    assert {check.op for check in list_nodes(small_model(), 2, Settings(llama_cpp=str(build)))} >= {"ROPE", "MUL_MAT"}


def test_the_commands_take_it(small_model, build, tmp_path):
    for words in (
        ["compare", small_model(), "--tokens", "1,2"], ["backend", small_model(), "--tokens", "1,2"],
        ["capture", small_model(), "--tokens", "1,2", "-o", tmp_path / "t.safetensors"], ["graph", small_model()],
    ):  # fmt: skip
        done = run(*words, "--llama-cpp", build)
        assert (done.returncode, done.stderr.partition(":")[0] == "llamadiff") == (0, False), done.stderr
    done = run("doctor", "--llama-cpp", build)
    assert "llama.cpp in checkout, ggml " in done.stdout
    assert "type at 0, buffer at 8" in done.stdout
    assert "CPU (" in done.stdout


# -- the shim is compiled once, and nothing is loaded from where others can write --------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/llamadiff/shims"


def test_a_shim_is_compiled_once_and_again_when_a_header_changes(build, cache, monkeypatch):
    probe(Settings(llama_cpp=str(build)))
    (kept,) = cache.iterdir()
    monkeypatch.setenv("PATH", "")  # no compiler is found, and none is needed
    before = kept.stat().st_ino
    probe(Settings(llama_cpp=str(build)))
    assert [path.stat().st_ino for path in cache.iterdir()] == [before]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    (build / "include").unlink()
    shutil.copytree(HEADERS, build / "include")
    with (build / "include/ggml.h").open("a", encoding="utf-8") as header:
        header.write("// changed\n")
    probe(Settings(llama_cpp=str(build)))
    assert len(list(cache.iterdir())) == 2


def test_shims_are_few(build, cache, monkeypatch):
    monkeypatch.setattr("llamadiff.ext.builds.shims.MOST", 2)
    cache.mkdir(parents=True)
    for number in range(4):
        (cache / f"{number}.so").touch()
        os.utime(cache / f"{number}.so", (number, number))
    tree = find(build)
    loaded(tree)
    assert len(list(cache.iterdir())) == 2
    assert "3.so" in {path.name for path in cache.iterdir()}


def test_nothing_is_kept_where_others_can_write(build, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "ggml" in probe(Settings(llama_cpp=str(build))).version
    assert not list(cache.iterdir())


# -- what is wrong with a build is said in one line --------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        probe(Settings(llama_cpp=str(folder)))
    return str(caught.value)


def other_headers(build: Path, name: str, old: str, new: str) -> None:
    (build / "include").unlink()
    shutil.copytree(HEADERS, build / "include")
    header = build / "include" / name
    assert old in header.read_text("utf-8")
    header.write_text(header.read_text("utf-8").replace(old, new), encoding="utf-8")


def test_no_directory(tmp_path):
    assert refused(tmp_path / "none").endswith("none: is not a directory; give a build or an install of llama.cpp")


def test_no_library(build):
    (build / "build/bin").unlink()
    assert "checkout: no libllama.so in it (nor in lib, bin, build/bin); build llama.cpp with" in refused(build)


def test_headers_that_are_not_all_there(build):
    (build / "include").unlink()
    (build / "include").mkdir()
    shutil.copy(HEADERS / "llama.h", build / "include")
    assert "checkout: no ggml.h in it (nor in include, ggml/include); give a checkout" in refused(build)


def test_a_library_of_another_machine(build):
    (build / "build/bin").unlink()
    (build / "build/bin").mkdir()
    (build / "build/bin/libllama.so").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xb7\x00" + bytes(200))
    assert "libllama.so: cannot be loaded on this machine (" in refused(build)


def test_a_copy_of_a_build_loads_its_originals_libraries(build, tmp_path):
    """Whoever changes the copy and builds nothing anew would judge the original, and read that all is right."""
    original, calls = build / "build/bin", "void ggml_backend_load_all(void); void f(void) { ggml_backend_load_all(); }"
    original.unlink()
    original.mkdir()
    compiled(original / "libggml.so", "void ggml_backend_load_all(void) {}")
    compiled(original / "libllama.so", calls, str(original / "libggml.so"), f"-Wl,-rpath,{original}")
    copy = tmp_path / "copy"
    shutil.copytree(build, copy)
    assert f"libllama.so: loads {original}/libggml.so, not the one beside it" in refused(copy)


def test_a_library_that_lacks_functions(build):
    other_library(build, "int nothing;")
    assert "libllama.so: has no llama_" in refused(build)
    assert refused(build).endswith(", or give the headers that belong to it")


def test_headers_that_the_shim_does_not_compile_against(build):
    other_headers(build, "llama.h", "void * cb_eval_user_data;", "void * cb_eval_user_data; no_such_type oops;")
    said = refused(build)
    assert "checkout: the shim does not compile against its headers: llama.h:" in said
    assert "no_such_type" in said
    assert "\n" not in said


def test_headers_without_a_field_without_which_nothing_is_seen(build):
    other_headers(build, "llama.h", "cb_eval", "cb_look")
    assert "its llama.h has no cb_eval, which a run needs" in refused(build)


@pytest.mark.parametrize("field", ["use_extra_bufts", "n_seq_max", "kv_unified", "op_offload"])
def test_a_field_that_a_fork_has_not_is_left_out(field, build, small_model):
    """It is where it was, under a name that nobody knows: llama.cpp's own value of it changes no float32 model."""
    other_headers(build, "llama.h", field, "of_its_own")
    assert compare(small_model("llama", "F32"), asked(build)).verdict == "match"


def test_a_setting_that_a_fork_has_no_field_for_is_refused(build, small_model):
    other_headers(build, "llama.h", "use_extra_bufts", "of_its_own")
    with pytest.raises(UserError, match=r"repack=on: .*in checkout has no use_extra_bufts in its llama.h"):
        judge_graph(small_model(), asked(build, repack=True))


@pytest.mark.parametrize("name", ["llama_model_n_layer", "llama_model_n_ctx_train", "llama_model_free"])
def test_a_function_of_later_versions_is_made_of_an_earlier_one(name, build, small_model):
    other_headers(build, "llama.h", name, "llama_of_its_own")
    assert judge_graph(small_model(), asked(build)).verdict == "match"


SIZES = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sizes are seen on x86-64 alone")


@pytest.mark.parametrize(("field", "others", "said"), [
    pytest.param("bool vocab_only;", "bool vocab_only, more[8];",
                 "llama_model_default_params fills in 78 bytes, and its headers have 88", marks=SIZES),
    pytest.param("bool kv_unified;", "size_t more; bool kv_unified;",
                 "llama_context_default_params fills in 160 bytes, and its headers have 176", marks=SIZES),
    ("uint32_t n_ubatch;", "uint32_t n_ubatch, more;", "has no n_seq_max where its headers have it"),
    ("int32_t  n_threads_batch;", "int32_t n_threads_batch, more[2];",
     "has no rope_freq_base where its headers have it"),
    ("bool embeddings;", "bool more, embeddings;", "has no embeddings where its headers have it"),
    ("enum ggml_type type_k;", "int more; enum ggml_type type_k;", "has no type_k where its headers have it"),
])  # fmt: skip
def test_headers_of_another_release(field, others, said, build):
    """The library of one release, the llama.h of another: settings would be written where it has other fields."""
    other_headers(build, "llama.h", field, others)
    assert f"libllama.so: {said}: they are of another version; give those that belong to it" in refused(build)


def test_no_compiler(build, cache, monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert refused(build).startswith("--llama-cpp: /no/such/compiler is not installed, and a C compiler is needed")


@pytest.mark.parametrize("folder", ["", "build"])
def test_a_device_that_is_not_there(folder, build, small_model):
    folder = str(build) if folder else ""
    with pytest.raises(UserError, match=r"device=Vulkan7: this llama.cpp has no such device; it has CPU \(.+\)"):
        judge_graph(small_model(), Run(tokens=TOKENS, settings=Settings(llama_cpp=folder, device="Vulkan7")))


def test_the_cpu_is_a_device(small_model):
    run = Run(tokens=TOKENS, settings=Settings(device="cpu", gpu_layers=9999))
    assert judge_graph(small_model(), run).verdict == "match"


def test_devices_are_listed(build, small_model):
    for words in ([], ["--llama-cpp", build]):
        done = run("backend", small_model(), "--llama-cpp", "device=list", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[0] for line in done.stdout.splitlines()] == ["CPU"]


def test_a_server_that_this_llama_cpp_cannot_ask(small_model):
    with pytest.raises(UserError, match=r"device=rpc:127.0.0.1:1: this llama.cpp has no RPC backend; build it with"):
        judge_graph(small_model(), Run(tokens=TOKENS, settings=Settings(device="rpc:127.0.0.1:1", gpu_layers=99)))


def test_a_candidate_is_of_the_build_that_is_asked_for(build, small_model):
    result = compare(small_model(), Run(tokens=TOKENS, settings=Settings(llama_cpp=str(build))), "llama.cpp:kv=f16")
    assert result.verdict == "match"
    assert {side["version"].partition(",")[0] for side in (result.baseline, result.candidate)} == {
        "llama.cpp in checkout"
    }
    other = compare(small_model(), Run(tokens=TOKENS), f"llama.cpp:dir={build}")
    assert other.verdict == "match"
    assert other.baseline["version"].startswith("llama-cpp-python ")
    assert other.candidate["version"].startswith("llama.cpp in checkout, ")
    page = io.StringIO()
    render(other, make_console(page, 200))
    assert "llama.cpp (llama-cpp-python " in page.getvalue()  # two versions are told apart
    assert "and llama.cpp (llama.cpp in checkout, " in page.getvalue()


# -- named once, in the environment ------------------------------------------------------------------------------------


def test_the_demo_runs_any_build(build, monkeypatch):
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", str(build / "missing"))
    done = run("demo")
    assert (done.returncode, done.stderr.count("\n"), "missing: is not a directory" in done.stderr) == (2, 1, True)
    done = run("demo", "--llama-cpp", build)  # what is given wins
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MATCH ")
    done = run("demo", "--llama-cpp", build / "other")
    assert (done.returncode, "other: is not a directory" in done.stderr) == (2, True)


@pytest.mark.parametrize("words", [("backend", "{model}", "--tokens", "1,5"), ("graph", "{model}"), ("doctor",)])
def test_a_variable_stands_for_the_option_in_every_command(words, build, small_model, monkeypatch):
    """And what an option says of something else is added to it."""
    monkeypatch.chdir(build)
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", "missing")  # a long one is cut in doctor's table
    words = [word.format(model=small_model()) for word in words]
    for more in ((), ("--llama-cpp", "threads=1")):
        done = run(*words, *more)
        said = "".join((done.stdout + done.stderr).split())  # a table breaks lines anywhere
        assert (done.returncode, "missing:isnotadirectory" in said) == (2, True)
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", f"dir={build},threads=1")
    assert run(*words).returncode == 0


def test_what_the_variable_says_is_read_as_the_option_is(monkeypatch):
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", "flash_attn=on,kv=q8_0")
    assert settings_of(["kv=f16"]) == Settings(type_k="F16", type_v="F16", flash_attn=True)
    assert settings_of(["kv=f16"], environment=False) == Settings(type_k="F16", type_v="F16")
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", "flash_attn=maybe")
    with pytest.raises(UserError, match="LLAMA_CPP=flash_attn=maybe: expected on or off"):
        settings_of(None)
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", " ")
    assert settings_of(None) == Settings()


def test_doctor_says_where_a_build_came_from(build, monkeypatch):
    assert "LLAMADIFF_LLAMA_CPP" not in run("doctor", "--llama-cpp", build).stdout
    monkeypatch.chdir(build.parent)
    monkeypatch.setenv("LLAMADIFF_LLAMA_CPP", build.name)
    said = "".join(run("doctor").stdout.split())
    assert f"{build.name},byLLAMADIFF_LLAMA_CPP" in said
    assert "llama.cppincheckout" in said
