"""A program that computes ggml graphs, watched: judged node by node, and the same program as before."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from glob import glob
from pathlib import Path

import numpy as np
import pytest
from builds import compiled
from command import in_process_of_its_own, processes_of, run
from optional import needs
from places import ROOT
from waiting import HANG, eventually

from llamadiff.ext.graph.node import Node
from llamadiff.ext.watch import watch_run
from llamadiff.ext.watch.graph_names import GraphNames, part_of
from llamadiff.llamacpp import library
from llamadiff.llamacpp.layout import ggml_context
from llamadiff.llamacpp.tensors import HOST, Ggml, Words, describe_in_full
from llamadiff.system import libraries

pytestmark = needs("cc")
PROGRAMS = ROOT / "tests/ext/watch/watched_programs.py"
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": f"{ROOT}:{ROOT / 'reference'}"}


def program(name, model="", *more):
    """The words that run a program."""
    return [sys.executable, str(PROGRAMS), name, str(model), *map(str, more)]


def alone(*words):
    """What a program prints when nobody watches it."""
    return alone_by(program(*words))


def alone_by(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.stdout, done.stderr
    return done.stdout


def watched(*words, options=(), **environment):
    """What ``llamadiff watch`` comes to, in a process of its own."""
    return watched_by(program(*words), options, **environment)


def watched_by(words, options=(), **environment):
    command = [sys.executable, "-m", "llamadiff", "watch", *map(str, options), "--", *words]
    more = {**ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=more, timeout=HANG)


def read(path):
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_1"])
def test_every_node_of_a_program_is_judged_and_its_output_is_its_own(kind, small_model, tmp_path):
    path, report = small_model("llama", kind), tmp_path / "report.json"
    done = watched("text", path, 3, options=("--every", 1, "-o", report))
    assert (done.returncode, done.stdout) == (0, alone("text", path, 3)), done.stderr
    (name, text), *others = read(report).items()
    assert (name, text["verdict"], others) == ("text", "match", [])
    taps = {tap["tap"]: tap for tap in text["taps"]}
    assert {"attn_norm-0", "ffn_out-1", "result_output"} <= set(taps)
    assert all(tap["verdict"] == "match" for tap in taps.values())
    assert taps["ffn_out-0"]["weight_type"] == kind
    assert "4 of 4 graphs were judged" in done.stderr
    assert re.search(r"[12]\.\d\d times as long as unwatched", done.stderr)


def has_amx():
    """Repacked for it, weights end llama.cpp's process (llama_server.py)."""
    cpu = Path("/proc/cpuinfo")
    return cpu.is_file() and "amx_tile" in cpu.read_text("utf-8")


@pytest.mark.skipif(has_amx(), reason="no repacked weights here: llama.cpp dies of AMX")
def test_weights_in_a_memory_that_gives_nothing_back(small_model, tmp_path):
    path, report = small_model("llama", "Q4_0"), tmp_path / "report.json"
    done = watched("repacked", path, options=("--every", 1, "-o", report))
    assert (done.returncode, done.stdout) == (0, alone("repacked", path)), done.stderr
    taps = read(report)["text"]["taps"]
    assert {tap["verdict"] for tap in taps} == {"match"}
    assert any(tap["weight_type"] == "Q4_0" and tap["op"] == "MUL_MAT" for tap in taps)


def test_with_nothing_watched_it_is_the_same_program(small_model):
    path = small_model("llama", "Q8_0")
    done = watched("text", path, 3, 5, options=("--graphs", "100"))
    assert (done.returncode, done.stdout) == (2, alone("text", path, 3, 5))
    assert "none of 4 graphs was judged" in done.stderr
    assert "ended with exit code 5" in done.stderr


def test_the_programs_failure_is_said_and_is_not_the_verdict(small_model):
    done = watched("text", small_model(), 0, 7)
    assert done.returncode == 0
    assert "the program itself ended with exit code 7" in done.stderr


def test_a_callback_of_the_programs_own_goes_on(small_model):
    path = small_model("llama", "Q8_0")
    done = watched("observed", path, options=("--every", 1))
    assert (done.returncode, done.stdout) == (0, alone("observed", path)), done.stderr
    assert "3 of 3 graphs were judged" in done.stderr


def test_graphs_of_several_threads(small_model):
    path = small_model("llama", "Q8_0")
    done = watched("threads", path, options=("--every", 1))
    assert (done.returncode, done.stdout) == (0, alone("threads", path)), done.stderr
    assert done.stdout.startswith("True")
    assert "14 of 14 graphs were judged" in done.stderr


@pytest.fixture(scope="module")
def made_of(tmp_path_factory):
    """made_of("graphs.c"): a program of C, linked with llama-cpp-python's ggml."""
    folder = library.LLAMA_CPP_PYTHON.folder

    def get(name):
        target = tmp_path_factory.mktemp("made") / Path(name).stem
        words = [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-lggml", "-lggml-base", "-lggml-cpu"]
        subprocess.run(["cc", "-o", target, PROGRAMS.with_name(name), *words], check=True)
        return target

    return get


@pytest.fixture(scope="module")
def graphs(made_of):
    return made_of("graphs.c")


def test_what_an_encoder_is_fed_is_kept_and_said_not_to_be_judged(graphs, tmp_path):
    done = watched_by([graphs], ("--keep", tmp_path / "kept"))
    said = " ".join(done.stderr.split())
    assert "what was fed to the encoder (inp_raw) was not judged" in said
    assert "llamadiff preprocess CHECKPOINT FILE --candidate DIR/0-inp_raw.npy" in said
    fed = np.load(tmp_path / "kept/0-inp_raw.npy")
    right = (7 * np.arange(64 * 5) % 13 - 6) / np.float32(13)
    np.testing.assert_allclose(fed.reshape(-1), right, rtol=1e-6)


@pytest.fixture(scope="module")
def large(made_of):
    return made_of("large.c")


@pytest.mark.parametrize(("room", "in_part"), [("1G", 0), ("200K", 13), ("100K", 15)])
def test_of_nodes_that_are_too_large_a_part_is_judged(room, in_part, large, tmp_path):
    """Convolutions away from their edges, products, copies, and ops row by row."""
    report = tmp_path / "report.json"
    done = watched_by([large], ("--max-node", room, "-o", report))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert {tap["verdict"] for tap in read(report)["graph"]["taps"]} == {"match"}
    said = re.search(r"(\d+) nodes were judged by as many of their rows", done.stderr)
    assert int(said[1] if said else 0) == in_part


def test_a_node_of_which_there_is_room_for_no_row_is_unchecked(large):
    done = watched_by([large], ("--max-node", "20K"))
    assert done.returncode == 2
    assert "not looked at: larger than --max-node: IM2COL (1), CONV_2D (1), SOFT_MAX (1)" in " ".join(
        done.stderr.split()
    )


def test_a_part_that_is_wrong_is_found_where_it_is(large, tmp_path):
    """At its place in the whole; what is kept of it is run alone."""
    report, kept = tmp_path / "report.json", tmp_path / "kept"
    done = watched_by([large, "wrong"], ("--max-node", "200K", "-o", report, "--keep", kept))
    assert done.returncode == 1, done.stderr
    (wrong,) = (tap for tap in read(report)["graph"]["taps"] if tap["verdict"] == "wrong")
    assert (wrong["tap"], wrong["shape"][:3]) == ("pixels", [1, 1, 16])
    assert wrong["local"]["index"][3] < 64 * 48
    assert "judged   by its own graph" in done.stderr
    assert "tokens" not in done.stderr
    assert run("replay", *kept.glob("*.safetensors")).returncode == 0


@pytest.mark.parametrize("axis", range(4))
def test_the_place_of_a_value_in_the_whole(axis):
    part, whole = Node({"begins": (axis, 5)}), Node({})
    assert whole.place_of((1, 2, 3, 4)) == (1, 2, 3, 4)
    assert part.place_of((1, 2, 3, 4)) == tuple(at + 5 * (3 - axis == i) for i, at in enumerate((1, 2, 3, 4)))


def test_graphs_without_a_scheduler(graphs, tmp_path):
    report = tmp_path / "report.json"
    done = watched_by([str(graphs)], ("--every", "1", "-o", str(report)))
    assert (done.returncode, done.stdout) == (0, alone_by([str(graphs)])), done.stderr
    assert done.stdout.startswith("same")
    (found,) = read(report).values()
    assert [(tap["op"], tap["verdict"]) for tap in found["taps"]] == [("MUL_MAT", "match"), ("SOFT_MAX", "match")]
    assert "3 of 3 graphs were judged, 6 nodes" in done.stderr


def test_a_wrong_op_is_found_at_its_node_and_can_be_replayed(small_model, tmp_path):
    report, kept = tmp_path / "report.json", tmp_path / "kept"
    done = watched("faulty", small_model("llama", "Q5_1"), options=("-o", report, "--keep", kept))
    assert done.returncode == 1, done.stderr
    found = read(report)["text"]
    assert found["verdict"] == "wrong"
    (wrong,) = (tap for tap in found["taps"] if tap["verdict"] == "wrong")
    assert (wrong["tap"], wrong["op"], wrong["weight_type"]) == ("embd", "GET_ROWS", "Q5_1")
    (op,) = kept.glob("*.safetensors")
    again = run("replay", op)  # by a ggml that nobody has tampered with
    assert again.returncode == 0, again.stdout


@pytest.mark.parametrize("wrong", ["", "wrong"])
def test_rows_written_into_a_large_cache(wrong, small_model, tmp_path):
    """Of the cache only the rows around those that are written are handed over."""
    path, report = small_model("llama", "Q8_0"), tmp_path / "report.json"
    done = watched("cached", path, *[wrong] * bool(wrong), options=("--every", 1, "-o", report))
    assert done.stdout == alone("cached", path, *[wrong] * bool(wrong))
    found = read(report)["text"]
    ops = {tap["op"] for tap in found["taps"] if tap["verdict"] == "wrong"}
    assert ops <= {"SET_ROWS", "FLASH_ATTN_EXT"}  # the kernel of attention rounds queries by the same function
    assert (done.returncode, "SET_ROWS" in ops) == ((1, True) if wrong else (0, False)), done.stderr
    written = [tap["shape"] for tap in found["taps"] if tap["op"] == "SET_ROWS"]
    assert written
    assert all(shape[-2] < 16 for shape in written)


@pytest.mark.parametrize(("op", "change"), [
    ("PERMUTE", {}), ("TRANSPOSE", {}), ("RESHAPE", {}), ("PERMUTE", {"nb": [4, 8, 64, 512]}),
    ("TRANSPOSE", {"ne": [4, 8, 2, 1]}), ("RESHAPE", {"nb": [4, 8, 256, 256]}), ("RESHAPE", {"ne": [2, 32, 1, 1]}),
])  # fmt: skip
def test_how_a_look_at_a_large_memory_steps(op, change):
    source = Node({"ne": [8, 4, 2, 1], "nb": [4, 32, 128, 256]})
    right = {
        "PERMUTE": {"ne": [8, 2, 4, 1], "nb": [4, 128, 32, 256]},
        "RESHAPE": {"ne": [32, 2, 1, 1], "nb": [4, 128, 256, 256]},
        "TRANSPOSE": {"ne": [4, 8, 2, 1], "nb": [32, 4, 128, 256]},
    }[op]  # fmt: skip
    params = np.array([0, 2, 1, 3], np.int32).tobytes().hex()
    is_other = any(right[key] != value for key, value in change.items())
    node = Node({"op": op, "params": params, "memory": 256, **right, **change}, sources=(source,))
    assert node.steps_rightly() is not is_other


def test_only_some_graphs_and_nodes(small_model, tmp_path):
    report = tmp_path / "report.json"
    done = watched("text", small_model(), 5, options=("--graphs", "2-3", "--nodes", "ffn*", "-o", report))
    assert done.returncode == 0, done.stderr
    assert "2 of 6 graphs were judged" in done.stderr
    assert {tap["tap"].partition("_")[0] for tap in read(report)["text"]["taps"]} == {"ffn"}


@pytest.mark.parametrize(("options", "judged"), [
    (("--first", 0, "--every", 0), 2),  # a prefill and a decode step: each is like none before
    (("--first", 3, "--every", 0), 3),
    (("--first", 0, "--every", 5), 4),
    (("--every", 1), 12),
])  # fmt: skip
def test_how_many_graphs_are_judged(options, judged, small_model):
    done = watched("text", small_model(), 11, options=options)
    assert f"{judged} of 12 graphs were judged" in done.stderr


@pytest.mark.parametrize(("options", "said"), [
    (("--max-node", "2K"), "not looked at: larger than --max-node"),
    (("--max-weights", "1K"), "not looked at: its weight is beyond --max-weights"),
])  # fmt: skip
def test_what_was_not_looked_at_is_said(options, said, small_model):
    done = watched("text", small_model(), 0, options=options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_little_room_makes_the_program_wait_and_loses_nothing(small_model):
    path = small_model("llama", "Q8_0")
    done = watched("text", path, 8, options=("--every", 1, "--max-waiting", "64K"))
    assert (done.returncode, done.stdout) == (0, alone("text", path, 8)), done.stderr
    assert "9 of 9 graphs were judged" in done.stderr


def test_every_format(small_model, tmp_path):
    files = [tmp_path / f"report.{ending}" for ending in ("json", "csv", "xml", "md", "html")]
    done = watched("text", small_model(), 0, options=[word for file in files for word in ("-o", file)])
    assert done.returncode == 0, done.stderr
    assert all("ffn_out-0" in file.read_text("utf-8") or file.suffix in (".xml", ".md") for file in files)


def test_a_program_without_graphs():
    done = in_process_of_its_own("watch", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no graph of ggml's was seen" in done.stderr


def test_a_ggml_without_a_function_is_named(tmp_path):
    """Its program runs on, as it does unwatched."""
    compiled(tmp_path / "libother.so", "int ggml_graph_compute(void *graph, void *plan) { return 7; }"
             "int ggml_graph_n_nodes(void *graph) { return 1; }")  # fmt: skip
    code = "int ggml_graph_compute(void *, void *); int main(void) { return ggml_graph_compute(0, 0) - 7; }"
    (tmp_path / "program.c").write_text(code, encoding="utf-8")
    subprocess.run(
        [
            "cc",
            "program.c",
            "-o",
            "program",
            "-L.",
            "-lother",
        ],
        cwd=tmp_path,
        check=True,
    )
    done = watched_by([str(tmp_path / "program")], LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "libother.so: its tensors cannot be read: this ggml has no ggml_graph_node; use another" in done.stderr


def test_a_program_that_is_not_there():
    done = in_process_of_its_own("watch", "--", "no-such-program-anywhere")
    assert done.returncode == 2
    assert "no-such-program-anywhere: cannot be run (No such file" in done.stderr


def test_streams_are_the_programs_own():
    command = [sys.executable, "-m", "llamadiff", "watch", "--", "cat"]
    done = subprocess.run(command, input=b"\x00\xff\n", capture_output=True, check=False, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (2, b"\x00\xff\n")


def test_a_system_that_puts_nothing_before(monkeypatch):
    monkeypatch.setattr(libraries, "HERE", libraries.WINDOWS)
    done = run("watch", "--", "true")
    assert done.returncode == 2
    assert "this system puts no library before a program's own" in done.stderr


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    done = run("watch", "--", "true")
    assert done.returncode == 2
    assert "watch: no-such-compiler is not installed, and a C compiler is needed" in done.stderr


@pytest.mark.parametrize("graphs", ["0", "5-3", "x", "1-"])
def test_graphs_that_are_none(graphs):
    done = run("watch", "--graphs", graphs, "--", "true")
    assert done.returncode == 2
    assert f"--graphs {graphs}: expected two numbers such as 3-5" in done.stderr


# -- signals and kills -------------------------------------------------------------------------------------------------


class Started:
    """A watched program that goes on until it is stopped."""

    def __init__(self, folder, model):
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        environment = {**ENVIRONMENT, "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": str(folder / "cache")}
        command = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "--max-waiting", "16M", "--",
                   *program("text", model, 10**6)]  # fmt: skip
        heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may be deaf to it
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True)  # fmt: skip
        signal.signal(signal.SIGINT, heard)

    def begin(self):
        """When a third graph comes, one is there to be judged."""
        seen = set()
        eventually(lambda: seen.update(self.graphs()) or len(seen) > 2, self.process)

    def graphs(self):
        return self.files("graph-*")

    def files(self, pattern):
        """Path.glob fails where a folder goes meanwhile."""
        return glob(str(self.temporary / "*" / pattern))

    def pid_of(self, word):
        found = [line for line in processes_of(self.temporary, word) if "llamadiff watch" not in line]
        return int(found[0].split()[0])

    def is_clean(self):
        return not processes_of(self.temporary) and not list(self.temporary.iterdir())


@pytest.fixture
def started(small_model, tmp_path):
    made = Started(tmp_path, small_model())
    try:
        made.begin()
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_the_command_killed_leaves_nothing(started):
    started.process.kill()
    started.process.communicate()
    eventually(started.is_clean)


def test_the_program_killed_is_said_and_leaves_nothing(started):
    os.kill(started.pid_of("watched_programs.py text"), signal.SIGKILL)
    _, errors = started.process.communicate(timeout=HANG)
    assert b"the program itself was killed by signal 9 (SIGKILL)" in errors
    assert started.process.returncode == 0
    eventually(started.is_clean)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_programs(number, started):
    started.process.send_signal(number)
    _, errors = started.process.communicate(timeout=HANG)
    assert b"graphs were judged" in errors
    assert (b"the program itself was killed by signal 15" in errors) == (number == signal.SIGTERM)
    eventually(started.is_clean)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "nodes", "part"), [
    (["blk.0.attn_q.weight", "output_norm.weight"], [], "text"),
    (["v.blk.0.attn_q.weight", "mm.0.weight", "v.patch_embd.weight"], [], "vision"),
    (["a.blk.0.attn_q.weight", "mm.a.mlp.1.weight"], [], "audio"),
    (["first_stage_model.decoder.conv_in.weight"], [], "VAE"),
    (["model.diffusion_model.input_blocks.0.0.weight"], [], "UNet"),
    (["cond_stage_model.transformer.text_model.embeddings.weight"], [], "text encoder"),
    (["leaf_7"], ["node_0", "mel"], "encoder"),
    (["leaf_7"], ["node_0", "KQ_mask"], "decoder"),
    ([], ["cache_k_l0 (view)"], "cache"),
    ([], ["node_0", "ggml_runner_cut:esrgan.prelude|feat"], "upscaler"),
    ([], ["node_0", "ggml_runner_cut:unet.middle_block|h"], "UNet"),
    ([], ["node_0", "ggml_runner_cut:wan_vae.decode.prelude|x"], "VAE"),
    ([], ["bench-start", "node_1", "bench-end"], "VAE"),
    ([], ["ggml_runner_cut:clip_text.prelude|x"], "text encoder"),
    ([], ["ggml_runner_cut:llm.text.layers.0|x"], "text encoder"),
    ([], ["ggml_runner_cut:clip_vision.prelude|x"], "vision"),
    ([], ["ggml_runner_cut:flux.double_blocks.0|img"], "diffusion transformer"),
    ([], ["node_0"], "graph"),
])  # fmt: skip
def test_parts_of_models(weights, nodes, part):
    assert part_of(weights, nodes) == part


def test_a_graph_that_only_fills_a_memory_is_a_cache():
    assert part_of(["leaf_0"], ["node_0"], fills=True) == "cache"
    assert part_of(["leaf_0"], ["node_0", "KQ_mask"], fills=True) == "decoder"


def test_a_second_model_has_a_number():
    names = GraphNames()
    assert names.name(["a"], ["blk.0.x"], []) == "text"
    assert names.name(["b"], ["blk.0.x"], []) == "text 2"
    assert names.name(["a", "c"], ["blk.0.x", "output.weight"], []) == "text"
    assert names.name(["c"], ["output.weight"], []) == "text"
    assert names.name([], [], ["node_0"]) == names.name([], [], ["node_1"]) == "graph"


def test_what_both_sides_share_has_one_layout():
    """Plan and struct plan: the fields in one order."""
    text = Path(watch_run.__file__).with_name("watch.c").read_text("utf-8")
    body = re.sub(r"//.*", "", text.partition("struct plan {")[2].partition("};")[0])
    lines = ["".join(line) for line in re.findall(r"u?int64_t ([^;]+);|char (nodes)\[", body)]
    names = [word for line in lines for word in line.split(", ")]
    assert names == [name.rstrip("_") for name, _ in watch_run.Plan._fields_]


def test_a_tensor_is_described_alike_where_it_lies_and_in_a_file():
    """As llama.cpp's process tells of one, and as watch.c writes one down: one description."""
    ggml = Ggml()
    with ggml_context(ggml.lib) as context:
        a, b = (ggml.lib.ggml_new_tensor_4d(context, 0, 4, 2, 1, 1) for _ in range(2))
        for address in (a, ggml.lib.ggml_add(context, a, b), ggml.lib.ggml_view_1d(context, a, 4, 16)):
            tensor = ggml.node(address)
            lying, word = tensor.said_in_full(), ggml.op_name(tensor.tensor.op)
            copied = ggml.structure.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(ggml.structure)))
            words = Words(tensor.op, tensor.type, tensor.memory, tensor.where, tensor.device)
            assert describe_in_full(copied, address, words, word) == {
                key: value for key, value in lying.items() if key not in ("numbers", "looks")
            }
            assert lying["where"] == HOST


def test_a_program_needs_no_dashes_before_it():
    """Its own options are not taken for llamadiff's."""
    done = run("watch", "--every", "3", "no-such-program", "-m", "model.gguf", "--verbose")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llamadiff: no-such-program: cannot be run")
