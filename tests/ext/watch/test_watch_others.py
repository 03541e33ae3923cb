"""Programs of other projects, watched: what the package index has, with models of random weights. Slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import llama_server
import pytest
from models.diffusion_model import write_diffusion
from models.small import EMBD
from models.upscaler_model import write_upscaler
from models.vision_model import PROJECTORS, write_hearing, write_picture, write_sound, write_vision
from models.whisper_model import write_whisper
from optional import lacks, needs
from places import ROOT
from tools.backends import PARTS
from tools.parts import MissingPartError
from waiting import HANG

from llamadiff.llamacpp.shipped import shipped_model

pytestmark = [needs("cc"), pytest.mark.slow]
PLACES = [str(ROOT), str(ROOT / "reference"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join(PLACES)}
DIFFUSION = "stable-diffusion-cpp-python"

WHISPER = """
import sys
import numpy as np
from pywhispercpp.model import Model
model = Model(sys.argv[1], n_threads=2, print_progress=False, print_realtime=False, audio_ctx=128, max_tokens=4,
              single_segment=True, no_context=True, temperature_inc=0.0)
noise = np.random.default_rng(0).normal(size=32000)
sound = 0.3 * np.sin(2 * np.pi * 440 * np.arange(32000) / 16000) + 0.05 * noise
print([segment.text for segment in model.transcribe(sound.astype(np.float32))])
"""

UPSCALER = """
import hashlib, os, sys
import numpy as np
from PIL import Image
from stable_diffusion_cpp import StableDiffusion
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # how fast weights are read is printed, too
noise = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
program = StableDiffusion(upscaler_path=sys.argv[1], n_threads=2, diffusion_conv_direct=sys.argv[2] == "direct")
for image in program.upscale(Image.fromarray(noise)):
    print(image.size, hashlib.sha256(image.tobytes()).hexdigest(), file=said)
"""

DRAWING = """
import ctypes, hashlib, os, sys
from pathlib import Path
from stable_diffusion_cpp import StableDiffusion
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
program = StableDiffusion(model_path=sys.argv[1], n_threads=2, vae_decode_only=True,
                          diffusion_flash_attn=sys.argv[2] == "flash")

FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
@FROM_FLOAT
def off(x, y, count):
    right(x, y, count)
    ctypes.c_uint16.from_address(y).value ^= 16  # the scale of the first block

if sys.argv[2] == "wrong":  # activations are rounded to Q8_0 a little off
    words = Path("/proc/self/maps").read_text("utf-8").split()
    library = next(word for name in ("/libggml-cpu", "/libstable-diffusion") for word in words if name in word)
    cpu = ctypes.CDLL(library)
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(ctypes.c_void_p)
    place = ctypes.addressof(cpu.ggml_get_type_traits_cpu(8).contents)
    right = FROM_FLOAT(ctypes.c_void_p.from_address(place).value)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place & ~4095), 8192, 3) == 0
    ctypes.c_void_p.from_address(place).value = ctypes.cast(off, ctypes.c_void_p).value

for image in program.generate_image(prompt="a cat", width=64, height=64, sample_steps=2, cfg_scale=1.0, seed=1):
    print(image.size, hashlib.sha256(image.tobytes()).hexdigest(), file=said)
"""


def output(*words, codes=(0,)):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode in codes, done.stderr[-3000:]
    return done.stdout


def watched(tmp_path, *program, code=0):
    """A report of every graph of a program's, whose output is what it is unwatched; ``code`` None: right or wrong."""
    report = tmp_path / "report.json"
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    assert output(*watch, *program, codes=(0, 1) if code is None else (code,)) == output(*program)
    return json.loads(report.read_text("utf-8"))


def watched_python(tmp_path, text, *words, code=0):
    """The same of a program in Python."""
    script = tmp_path / "program.py"
    script.write_text(text, encoding="utf-8")
    return watched(tmp_path, sys.executable, script, *words, code=code)


def verdicts(found):
    return Counter(tap["verdict"] for graph in found.values() for tap in graph["taps"])


def is_summed_in_half(tap):
    """Whether a node is wrong as stable-diffusion.cpp's ggml (0.9.8) is on a CPU that multiplies in float16 (found.md):
    it keeps sums of such products in that.
    """
    cpu = Path("/proc/cpuinfo")
    has = cpu.is_file() and "avx512_fp16" in cpu.read_text("utf-8")
    return has and tap["verdict"] == "wrong" and tap["op"] in ("MUL_MAT", "CONV_2D") and tap["local"]["nmse"] < 1e-6


def drawn(tmp_path, text, *words):
    """A report of stable-diffusion.cpp's graphs without what is known to be wrong of its products."""
    found = watched_python(tmp_path, text, *words, code=None)
    for graph in found.values():
        for tap in filter(is_summed_in_half, graph["taps"]):
            tap["verdict"] = "match"
    return found


def answers(address, clients, requests=200):
    """What a server says to requests of so many clients, by their number."""
    found = dict[int, str]()

    def ask(client):
        for number in range(client, requests, clients):
            words = {"prompt": "once upon a time " * (1 + number % 12), "n_predict": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{address}/completion", json.dumps(words | {"cache_prompt": False}).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=HANG) as answer:
                found[number] = json.load(answer)["content"]

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_server_at_work(tmp_path):
    """No request is lost, and one after the other they are answered alike.

    Of two clients' requests it depends on the moment which are one batch, and on that how products are rounded.
    """
    model, report = shipped_model(quantized=True), tmp_path / "report.json"
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "50", "-o", str(report), "--"]
    with llama_server.started(model) as address:
        wanted = answers(address, 1)
    with llama_server.started(model, under=watch) as address:
        found, together = answers(address, 1), answers(address, 2)
    assert found == wanted
    assert len(found) == len(together) == 200
    text = json.loads(report.read_text("utf-8"))["text"]
    assert text["verdict"] == "match", text["summary"]


@pytest.mark.skipif(lacks("pywhispercpp"), reason="no pywhispercpp here: pip install pywhispercpp")
def test_whisper(tmp_path):
    """Its encoder, the keys and values of what that gives, and its decoder; in ggml its weights have no names."""
    found = watched_python(tmp_path, WHISPER, write_whisper(tmp_path / "w.bin"))
    assert {name.partition(" ")[0] for name in found} == {"encoder", "cache", "decoder"}
    assert set(verdicts(found)) == {"match"}
    assert verdicts(found).total() > 250


@pytest.mark.skipif(lacks("stable_diffusion_cpp"), reason="no stable-diffusion.cpp here: pip install " + DIFFUSION)
@pytest.mark.parametrize(("way", "op", "nodes"), [("direct", "CONV_2D", 101), ("by products", "IM2COL", 227)])
def test_an_upscaler(way, op, nodes, tmp_path):
    """Convolutions by ggml's own kernel, or as products; its weights have no names in ggml."""
    found = drawn(tmp_path, UPSCALER, write_upscaler(tmp_path / "u.safetensors"), way)
    assert [*found] == ["upscaler"]
    assert verdicts(found) == {"match": nodes}
    assert sum(tap["op"] == op for tap in found["upscaler"]["taps"]) == 21


@pytest.mark.skipif(lacks("stable_diffusion_cpp"), reason="no stable-diffusion.cpp here: pip install " + DIFFUSION)
@pytest.mark.parametrize("way", ["plain", "flash", "wrong"])
def test_a_drawing(way, tmp_path):
    """A prompt is read, an image drawn in two steps, and decoded: 1,364 nodes, or more with flash attention."""
    is_wrong = way == "wrong"
    found = drawn(tmp_path, DRAWING, write_diffusion(tmp_path / "d.gguf"), way)
    assert {*found} == {"text encoder", "diffusion transformer", "VAE"}
    assert verdicts(found).total() > 1300
    wrong = {(name, tap["op"]) for name, graph in found.items() for tap in graph["taps"] if tap["verdict"] == "wrong"}
    products = {("text encoder", "MUL_MAT"), ("diffusion transformer", "MUL_MAT")}
    assert wrong == (products if is_wrong else set())
    assert set(verdicts(found)) == ({"match", "wrong"} if is_wrong else {"match"})


def chatted(program, lines):
    """What a program says to lines, each written when it asks for it: what it says last is lost when it ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": ENVIRONMENT}
    with subprocess.Popen([*map(str, program)], **pipes) as running:
        said = b""
        for line in (*lines, b""):
            while not said.endswith(b"\n> "):
                part = running.stdout.read1()
                assert part, said
                said += part
            running.stdin.write(line)
            running.stdin.flush()
            said += b"|" if line else b""
        running.communicate()
    assert running.returncode == 0
    return said


def asked_about(eye_or_ear, word, path, *more):
    """How llama-mtmd-cli is started, and what it is told: to look at a picture or to listen, and to answer."""
    program = [
        llama_server.binary("llama-mtmd-cli"), "--model", shipped_model(), "--mmproj", eye_or_ear, "-n", "6",
        "-c", "512", "--temp", "0", "-t", "2", "--chat-template", "vicuna", "--no-warmup", *llama_server.unpacked(),
        *more,
    ]  # fmt: skip
    return program, (b"/%s %s\n" % (word, bytes(path)), b"what\n")


def shown(folder, projector, *more):
    vision, picture = write_vision(folder / "v.gguf", projector, EMBD), write_picture(folder / "p.png")
    return asked_about(vision, b"image", picture, *more)


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("attention", ["on", "off"])
def test_a_picture(projector, attention, tmp_path):
    """llama-mtmd-cli is shown one, and answers: nodes of both models are judged, the picture's without logits too."""
    report = tmp_path / "report.json"
    program, lines = shown(tmp_path, projector, "-fa", attention)
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    assert chatted(watch + program, lines) == chatted(program, lines)
    found = json.loads(report.read_text("utf-8"))
    assert {*found} == {"vision", "text"}
    assert set(verdicts(found)) == {"match"}
    assert {tap["op"] for tap in found["vision"]["taps"]} >= {"IM2COL", "NORM", "GELU", "MUL_MAT"}


@pytest.mark.parametrize("attention", ["on", "off"])
def test_a_sound(attention, tmp_path):
    """Two seconds of it, in a window of thirty, by a Whisper's encoder."""
    report = tmp_path / "report.json"
    hearing, sound = write_hearing(tmp_path / "h.gguf", EMBD), write_sound(tmp_path / "s.wav")
    program, lines = asked_about(hearing, b"audio", sound, "-fa", attention)
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    assert chatted(watch + program, lines) == chatted(program, lines)
    found = json.loads(report.read_text("utf-8"))
    assert {*found} == {"audio", "text"}
    assert set(verdicts(found)) == {"match"}
    assert {tap["op"] for tap in found["audio"]["taps"]} >= {"IM2COL", "NORM", "GELU_ERF", "SWIGLU", "MUL_MAT"}


def embedding(pooling, *more):
    """How llama-embedding is started."""
    return [
        llama_server.binary("llama-embedding"), "--model", shipped_model(quantized=True), "--prompt", "once upon",
        "--pooling", pooling, "-t", "2", "--embd-output-format", "json", "--no-warmup", *llama_server.unpacked(), *more,
    ]  # fmt: skip


def embedded(*program):
    """What llama-embedding prints: a part of it may be lost when it ends, and then it is asked again."""
    for _ in range(30):
        try:
            return json.loads(output(*program))
        except json.JSONDecodeError:
            continue
    return pytest.fail("never printed all of it")


@pytest.mark.parametrize(("pooling", "op"), [("mean", "MUL_MAT"), ("last", "GET_ROWS")])
def test_an_embedding(pooling, op, tmp_path):
    """llama-embedding's graph gives no logits: its last node is the pooling."""
    report = tmp_path / "report.json"
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    assert embedded(*watch, *embedding(pooling)) == embedded(*embedding(pooling))
    found = json.loads(report.read_text("utf-8"))
    assert [*found] == ["text"]
    assert set(verdicts(found)) == {"match"}
    assert found["text"]["taps"][-1]["op"] == op


@pytest.fixture
def on_device(monkeypatch):
    """Flags with which these programs compute on a device of Vulkan, which another build of llama.cpp brings.

    Unwatched, too, ops are not fused: with that, llama-server dies now and then in a thread of lavapipe's own.
    """
    try:
        backend = PARTS["vulkan"].make() / "lib/libggml-vulkan.so"
    except MissingPartError as error:
        pytest.skip(f"no Vulkan here: {error}")
    beside = llama_server.binary("llama-embedding").parent
    found = {"GGML_BACKEND_PATH": backend, "GGML_VK_VISIBLE_DEVICES": 0, "LD_LIBRARY_PATH": beside,
             "GGML_VK_DISABLE_FUSION": 1}  # fmt: skip
    for name, value in found.items():
        monkeypatch.setenv(name, str(value))
        monkeypatch.setitem(ENVIRONMENT, name, str(value))
    return "-dev", "Vulkan0", "-ngl", "99"


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("attention", ["on", "off"])
def test_a_picture_on_a_device(projector, attention, on_device, tmp_path):
    """What comes of it is read back from the device, node by node."""
    report = tmp_path / "report.json"
    program, lines = shown(tmp_path, projector, "-fa", attention, *on_device)
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    assert chatted(watch + program, lines) == chatted(program, lines)
    found = json.loads(report.read_text("utf-8"))
    assert {*found} == {"vision", "text"}
    assert set(verdicts(found)) == {"match"}
    assert all(graph["headline"].endswith("each computed alone") for graph in found.values())


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_on_a_device(pooling, on_device, tmp_path):
    report = tmp_path / "report.json"
    watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "-o", report, "--"]
    program = embedding(pooling, *on_device)
    assert embedded(*watch, *program) == embedded(*program)
    assert set(verdicts(json.loads(report.read_text("utf-8")))) == {"match"}


def test_a_server_on_a_device(on_device, tmp_path):
    model, report = shipped_model(quantized=True), tmp_path / "report.json"
    watch = [sys.executable, "-m", "llamadiff", "watch", "-o", str(report), "--"]
    with llama_server.started(model, *on_device) as address:
        wanted = answers(address, 1, 10)
    with llama_server.started(model, *on_device, under=watch) as address:
        assert answers(address, 1, 10) == wanted
    found = json.loads(report.read_text("utf-8"))
    assert set(verdicts(found)) == {"match"}
