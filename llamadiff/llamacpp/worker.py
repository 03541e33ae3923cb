"""Runs llama.cpp on one request and writes the trace, in the child process (serve.py)."""

from __future__ import annotations

import ctypes
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp
from llamaref import Weights
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from llamadiff import taps
from llamadiff.errors import UserError
from llamadiff.hashing import file_sha256
from llamadiff.llamacpp.dequantize import Dequantizer
from llamadiff.llamacpp.ggml import Ggml, Node, Tensor
from llamadiff.llamacpp.names import tap_name
from llamadiff.llamacpp.recorder import Alignment, GraphRecorder
from llamadiff.llamacpp.replay import NodeChecker
from llamadiff.llamacpp.request import KV_TYPES, Request, Settings
from llamadiff.llamacpp.serve import Say
from llamadiff.trace import Info, TraceWriter

Array = NDArray[Any]

WEIGHT_ENDINGS = (".weight", ".bias", ".scale")
LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
SMALL_MODEL = 64 << 20  # bytes: below, waking a second thread for every op costs more than it saves


def run(request: Request, say: Say) -> None:
    """Load, tokenize, decode, record."""
    ggml = Ggml()
    misfit = ggml.check_layout()
    if request.output is None:
        say(version=build_version(), build=build_flags(), layout=misfit, done=True)
        return
    if misfit:
        raise UserError(
            f"this llama-cpp-python has another tensor layout ({misfit}); install the version in pyproject.toml"
        )
    os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1"  # a quantized KV cache as everybody knows it, not rotated
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    say(phase="loading the model into llama.cpp")
    with _Quiet():
        model = _load(request)
        tokens = list(request.tokens) or _tokenize(model, request)
        say(tokens=tokens, loaded=time.perf_counter() - started)
        say(phase="running llama.cpp")
        kind = GraphRun if request.graph is not None else NodeRun if request.nodes else Capture
        kind(ggml, model, request, tokens).run(say)
    say(done=True)


class _Quiet:
    """llama.cpp's log reduced to errors, which stay on standard error for the parent to quote."""

    def __enter__(self) -> None:
        def log(level: int, text: bytes, _: Any) -> None:
            if level == LOG_ERROR:
                os.write(2, b"error: " + text)

        self.callback = llama_cpp.llama_log_callback(log)  # kept: a collected callback is a segfault
        llama_cpp.llama_log_set(self.callback, ctypes.c_void_p(0))

    def __exit__(self, *_: object) -> None:
        return None


def _load(request: Request) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = request.settings.gpu_layers
    params.use_extra_bufts = request.settings.repack
    model = llama_cpp.llama_model_load_from_file(os.fsencode(request.model), params)
    if not model:
        raise UserError(f"{request.model}: llama.cpp cannot load the model")
    return model


def _tokenize(model: Any, request: Request) -> list[int]:
    assert request.text is not None
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    if llama_cpp.llama_vocab_type(vocabulary) == 0:  # LLAMA_VOCAB_TYPE_NONE
        raise UserError(f"{request.model}: the file has no tokenizer; give token ids with --tokens 1,2,3")
    text = request.text.encode()
    room = len(text) + 16
    buffer = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), buffer, room, True, True)
    if count <= 0:
        raise UserError(
            f"{request.model}: llama.cpp's tokenizer gave no tokens for the prompt (code {count}); "
            "give token ids with --tokens 1,2,3"
        )
    return list(buffer[:count])


class Capture:
    """One context with an eval callback that copies every wanted tap as it is computed."""

    def __init__(self, ggml: Ggml, model: Any, request: Request, tokens: list[int]) -> None:
        self.ggml, self.model, self.request = ggml, model, request
        self.tokens = tokens
        self.total = len(tokens) + request.n_predict
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.wanted = None if request.wanted is None else set(request.wanted)
        self.weights_read: set[str] = set()
        self.start = self.rows = 0
        small = os.path.getsize(request.model) < SMALL_MODEL
        self.threads = request.settings.threads or (1 if small else max(1, (os.cpu_count() or 1) - 1))
        self.failure: BaseException | None = None
        self._check_sizes()
        self.sha256 = ThreadPoolExecutor(1).submit(file_sha256, request.model)  # while llama.cpp works

    def _check_sizes(self) -> None:
        limit = llama_cpp.llama_model_n_ctx_train(self.model)
        if self.total > limit:
            raise UserError(
                f"{self.request.model}: {self.total} tokens (with --n-predict) are more than the model's context "
                f"of {limit}; give fewer"
            )
        for token in self.tokens:
            if not 0 <= token < self.n_vocab:
                raise UserError(
                    f"{self.request.model}: token id {token} is out of range: the vocabulary has {self.n_vocab} "
                    f"entries, 0 to {self.n_vocab - 1}"
                )

    def run(self, say: Say) -> None:
        """Prefill, then greedy decode steps of one token each; then complete the trace."""
        assert self.request.output is not None
        context = self._context()
        n_prefill = len(self.tokens)
        with TraceWriter(
            self.request.output, expected_taps=40 * (llama_cpp.llama_model_n_layer(self.model) + 1)
        ) as writer:
            self.writer = writer
            prefill_s = self._decode_all(context, say)
            writer.finish(self._info(n_prefill, prefill_s))

    def _decode_all(self, context: Any, say: Say) -> float:
        """Prefill and decode steps -> seconds of the prefill."""
        started = time.perf_counter()
        self._decode(context, self.tokens, 0)
        prefill_s = time.perf_counter() - started
        for step in range(self.request.n_predict):
            say(phase=f"decode step {step + 1} of {self.request.n_predict}")
            self.tokens.append(self._greedy(context))
            self._decode(context, self.tokens[-1:], len(self.tokens) - 1)
        return prefill_s

    def _context(self, settings: Settings | None = None) -> Any:
        settings = settings or self.request.settings
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(256, self.total)
        params.n_batch = params.n_ubatch = max(32, len(self.tokens))
        params.type_k, params.type_v = KV_TYPES[settings.type_k], KV_TYPES[settings.type_v]
        params.flash_attn_type = int(settings.flash_attn)
        params.n_threads = params.n_threads_batch = self.threads
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._observe)  # kept alive with the context
        params.cb_eval = self.callback
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise UserError(f"{self.request.model}: llama.cpp cannot make a context with these settings")
        return context

    def _decode(self, context: Any, tokens: list[int], start: int) -> None:
        self.start, self.rows = start, len(tokens)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, 1
            batch.seq_id[i][0] = 0
        code = llama_cpp.llama_decode(context, batch)
        llama_cpp.llama_batch_free(batch)
        if self.failure is not None:
            raise self.failure
        if code != 0:
            raise UserError(f"{self.request.model}: llama_decode failed with code {code}")

    def _greedy(self, context: Any) -> int:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (self.n_vocab,))
        return int(logits.argmax())

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        """The eval callback: asked for every node before it runs, and called with those it wanted after."""
        try:
            node = Node(self.ggml, ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents)
            name = tap_name(node.name, node.op, [source.name for source in node.sources])
            wanted = name is not None and (self.wanted is None or name in self.wanted)
            if ask:
                self._note_weights(node)
            elif wanted and name is not None:
                self._record(name, node)
            return wanted if ask else True
        except BaseException as error:  # must not reach C
            self.failure = error
            return False

    def _note_weights(self, node: Node) -> None:
        self.weights_read.update(s.name for s in node.sources if s.op == "NONE" and s.name.endswith(WEIGHT_ENDINGS))

    def _record(self, name: str, node: Node) -> None:
        tap = taps.parse(name)
        assert tap is not None
        values = _in_axes(tap, node.values(), self.rows)
        if tap.causal:
            values = self._visible(tap, values[..., : self.total])
        shape = list(values.shape)
        shape[tap.row_axis] = self.total
        if tap.causal:
            shape[2] = self.total
        self.writer.add(name, values, tap.row_axis, tuple(shape), self.start)

    def _visible(self, tap: taps.Tap, values: Array) -> Array:
        """Raw scores of hidden keys are arbitrary and left out; probabilities are kept as they are."""
        if tap.kind.word != "kq":
            return values
        queries = np.arange(self.start, self.start + self.rows)[:, None]
        return np.where(np.arange(values.shape[2])[None, :] <= queries, values, np.float32(0))

    def _info(self, n_prefill: int, prefill_s: float) -> Info:
        settings = self.request.settings
        return Info(
            tokens=tuple(self.tokens),
            positions=tuple(range(self.total)),
            n_prefill=n_prefill,
            prompt=self.request.text,
            producer={
                "name": "llama.cpp",
                "version": build_version(),
                "settings": {**settings.to_json(), "n_ctx": max(256, self.total), "threads": self.threads},
                "build": build_flags(),
                "weights_read": sorted(self.weights_read),
                "prefill_s": prefill_s,
            },
            model={**self.request.model_info, "sha256": self.sha256.result()},
        )


class NodeRun(Capture):
    """One context whose every node is checked as it runs."""

    def run(self, say: Say) -> None:
        """Prefill and decode steps; then write what was found."""
        assert self.request.output is not None
        weights = Weights(self.request.model, threads=self.request.settings.threads)
        dequantizer = Dequantizer(self.ggml, weights)
        keep = None if self.request.keep is None else Path(self.request.keep)
        self.checker = NodeChecker(weights, dequantizer, keep, self.request.keep_all, self.request.only_list)
        n_prefill = len(self.tokens)
        with threadpool_limits(1, "blas"):
            prefill_s = self._decode_all(self._context(), say)
        report = {
            "info": json.loads(self._info(n_prefill, prefill_s).to_json()),
            "nodes": [found.to_json() for found in self.checker.results],
            "trusted": len(dequantizer.trusted), "refused": sorted(dequantizer.refused),
        }  # fmt: skip
        Path(self.request.output).write_text(json.dumps(report))

    def _decode(self, context: Any, tokens: list[int], start: int) -> None:
        self.checker.begin(0 if start == 0 else self.checker.step + 1)
        super()._decode(context, tokens, start)

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        """Asked: keep the inputs. Done: compute the node again."""
        try:
            node = Node(self.ggml, ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents)
            if ask:
                self._note_weights(node)
                self.checker.asked(node)
            else:
                self.checker.done(node)
            return True
        except BaseException as error:  # must not reach C
            self.failure = error
            return False


class GraphRun(Capture):
    """The graph of all tokens in one go, recorded as an engine, and the run as it was asked for, with every tap."""

    def run(self, say: Say) -> None:
        """First what the passes of the run are like; then the graph, where that is another; then the values."""
        assert self.request.graph is not None
        assert self.request.output is not None
        n_prefill, settings = len(self.tokens), self.request.settings
        plain = replace(settings, type_k="F32", type_v="F32", flash_attn=False)
        self.weights, self.recorders = Weights(self.request.model), list[GraphRecorder]()
        self.whole = settings == plain and not self.request.n_predict
        self.alignment: Alignment | None = None
        self._decode_all(self._context(), say)
        graph = self.recorders[0] if self.whole else self._graph_of_all(plain)
        self.alignment = Alignment(graph, self.recorders)
        graph.write(Path(self.request.graph), self.tokens, self.alignment.rows)
        self.shapes = self.alignment.shapes()
        with TraceWriter(self.request.output, expected_taps=len(self.shapes)) as writer:
            self.writer, context = writer, self._context()
            for step, start in enumerate([0, *range(n_prefill, self.total)]):
                self.number, self.place = min(step, len(self.recorders) - 1), -1
                self._decode(context, self.tokens[start : start + 1 if start else n_prefill], start)
            writer.finish(self._info(n_prefill, 0.0))

    def _graph_of_all(self, settings: Settings) -> GraphRecorder:
        passes, self.recorders, self.whole = self.recorders, [], True
        self._decode(self._context(settings), self.tokens, 0)
        (graph,), self.recorders = self.recorders, passes
        return graph

    def _decode(self, context: Any, tokens: list[int], start: int) -> None:
        """One more pass; all decode steps are like the first."""
        self.new = self.alignment is None and len(self.recorders) < 2
        if self.new:
            self.recorders.append(GraphRecorder(self.weights, len(tokens), self.whole))
        super()._decode(context, tokens, start)

    def _observe(self, pointer: Any, ask: bool, _: Any) -> bool:
        try:
            node = Node(self.ggml, ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents)
            if self.alignment is not None:
                return self._recorded(node, ask)
            if ask and self.new:
                self._note_weights(node)
                self.recorders[-1].asked(node)
            return self.whole  # values are looked at one by one, a structure is not
        except BaseException as error:  # must not reach C
            self.failure = error
            return False

    def _recorded(self, node: Node, ask: bool) -> bool:
        """Whether a node is a tap; if it has been computed, its rows are kept."""
        assert self.alignment is not None
        self.place += ask
        label = self.alignment.places[self.number].get(self.place)
        if label is not None and not ask:
            self._keep(label, node.values())
        return label is not None or not ask

    def _keep(self, name: str, values: Array) -> None:
        """Rows of a tap on its own axes, without padding after the keys."""
        shape, axis = self.shapes[name]
        tap = taps.parse(name)
        if tap is not None and tap.causal:
            values, shape = values[..., : self.total], (*shape[:-1], self.total)
        if axis is None:
            self.writer.add(name, values.reshape(shape))
            return
        rows = values.reshape(*shape[:axis], self.rows, *shape[axis + 1 :])
        self.writer.add(name, rows if tap is None else self._visible(tap, rows), axis, shape, self.start)


def _in_axes(tap: taps.Tap, values: Array, rows: int) -> Array:
    """ggml's four axes [ne3, ne2, ne1, ne0] as the tap's."""
    if tap.causal:
        return values.reshape(values.shape[-3:])
    return values.reshape((rows, -1) if len(tap.kind.axes) == 2 else (rows, -1, values.shape[-1]))


def build_version() -> str:
    """llama-cpp-python's version and that of the ggml it was built with."""
    import llama_cpp as package

    library = Ggml().lib
    parts = [f"llama-cpp-python {package.__version__}"]
    for name in ("ggml_version", "ggml_commit"):
        if hasattr(library, name):
            getattr(library, name).restype = ctypes.c_char_p
            parts.append(f"{name.removeprefix('ggml_')} {getattr(library, name)().decode()}")
    return ", ggml ".join(parts[:2]) + (f" ({parts[2]})" if len(parts) > 2 else "")


def build_flags() -> str:
    """llama.cpp's own line of compiled-in CPU features and backends."""
    return str(llama_cpp.llama_print_system_info().decode()).strip()
