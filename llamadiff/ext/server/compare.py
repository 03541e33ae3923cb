"""A server, judged by what it answers: are its tokens the model's, what are its settings, is its engine right.

What it says is judged like any trace of partial logits. Where that is not right, causes are tried, the likely and cheap
ones first: other token ids, other settings of llama.cpp, other files of the model that lie beside this one. Each is a
run of llama.cpp of which the logits must be the server's. What is left is the diagnosis of a trace: known bugs,
replayed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, takewhile
from pathlib import Path

import numpy as np
from llamaref import ModelError
from llamaref.weights import block_sizes

from llamadiff.candidates.gguf_file import SUFFIX as GGUF
from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.own_graph import own_graph
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import after_what_the_engine_said, capture_run, in_engine
from llamadiff.ext.explain.solve import ROPE_BASE, ROPE_FACTOR
from llamadiff.ext.loss.trials import FilePair, trial_logits
from llamadiff.ext.prompt.chat_template import render
from llamadiff.ext.prompt.http import is_server
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.prompt.tokens.changes import Change, changed, changes_of
from llamadiff.ext.server import words
from llamadiff.ext.server.answers import FEW_DIGITS, SUFFIX, Answers, Probe, Row
from llamadiff.ext.server.candidate import LEAST, Question, answers_in, as_trace, ask, chosen
from llamadiff.ext.server.embeddings import compare_embeddings, pools
from llamadiff.ext.server.history import mixtures
from llamadiff.ext.server.rerank import compare_scores, ranks
from llamadiff.ext.server.words import Found
from llamadiff.ext.state.variation import PREFIX, varied
from llamadiff.judge.preflight.checks import OTHER_TOKENS, tokens_apart, where_apart
from llamadiff.judge.verdict import UNCHECKED, WRONG, is_right
from llamadiff.llamacpp.capture import capture, scratch_directory
from llamadiff.llamacpp.child import Child
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_text
from llamadiff.trace.reader import Array, Trace
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.judging import judge

EXPLAINS = 0.02  # of the error of the plain run, what a run may leave that has the server's logits
SCALED, SLIGHT = 1e-4, 0.05  # NMSE of rows that are right but for a factor, and the logarithm of one that is near 1
ROOM = 8.0  # times as much as two ways of rounding differ
ALIKE = 2.0  # times the NMSE between two right runs: what a third one may be off by
HALF = 0.5  # of the error of a server's first rows, which a run that explains it leaves less of
CLEARLY = 0.2  # of it, what a run may leave that is nearest, where rounding leaves as much
EXACT = 1e-7  # NMSE of rows that are the same but for the order of sums
TRIALS, LEAST_TRIALS = 3e11, 40  # multiply-adds in runs of llama.cpp, of which there are so many at least
BESIDE = 4  # other files of the model that are tried
TYPES = ("Q8_0", "Q4_K", "Q4_0", "Q6_K", "Q5_K", "Q5_0", "Q3_K", "Q2_K")  # that weights may be in, in another file
FULL, LIKELY = 5, 10.0  # a row of so many may lack a token; times its largest error, by which that token is too likely
SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant")
# Settings of llama.cpp that servers have, the usual ones first: quantized caches as llama.cpp has them, and others.
USUAL = 3
SETTINGS = (
    "kv=f16,flash_attn=on", "kv=f16", "kv=q8_0,flash_attn=on,rotated=on", "kv=q4_0,flash_attn=on,rotated=on",
    "kv=bf16,flash_attn=on", "type_k=q8_0,type_v=f16,flash_attn=on,rotated=on", "kv=q8_0,flash_attn=on",
    "kv=q4_0,flash_attn=on", "kv=q5_1,flash_attn=on,rotated=on", "kv=q5_0,flash_attn=on,rotated=on",
    "kv=q4_1,flash_attn=on,rotated=on", "kv=iq4_nl,flash_attn=on,rotated=on",
)  # fmt: skip
ROUNDING = (*SETTINGS[:USUAL], "kv=q8_0,flash_attn=on")  # ways that are no mistake


def compare_server(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge a server by its log-probabilities, or what was kept of them; both runs are written to ``folder``.

    Raises UserError for whatever a user can mend.
    """
    spec = str(candidate)
    file = ModelFile(model, how.precision, run.settings)
    if pools(file):
        return compare_embeddings(model, candidate, run, how, folder, child)
    if ranks(file):
        return compare_scores(model, candidate, run, how, folder, child)
    engine, used = in_engine(file, how)
    kept = None if is_server(spec) else answers_in(spec)
    if kept is not None:
        run = replace(run, prompt=None, chat=False, tokens=kept.tokens, n_predict=0)
    with after_what_the_engine_said(file, used):
        llama = _LlamaCpp(file, engine, run, how, folder, child)
        if kept is None:
            info, turn = llama.baseline.info, run.prompt if run.chat else None
            question = Question(file, info.tokens, info.n_prefill or len(info.tokens), info.prompt, turn)
            kept = ask(spec, question, how.timeout, how.progress)
            write_text(folder / f"server{SUFFIX}", json.dumps(kept.to_json()))
            llama.go_on_with(kept.tokens)
        elif not any(len(row) >= LEAST for row in kept.rows.values()):
            raise UserError(f"{spec}: keeps no log-probabilities of next tokens; ask the server again")
        return replace(_Case(llama, kept, how).judged(), engine=used)


class _LlamaCpp:
    """llama.cpp on the file, run as often as it takes."""

    def __init__(
        self, file: ModelFile, engine: Runnable | None, run: Run, how: How, folder: Path, child: Child
    ) -> None:
        self.file, self.engine, self.run, self.how, self.folder, self.child = file, engine, run, how, folder, child
        self.opened, self.baseline = self._captured(run)
        self._known = dict[tuple[tuple[int, ...], str], Array]()  # with other settings, what was run before

    def go_on_with(self, tokens: Sequence[int]) -> None:
        """Run these, where a server went on in its own way."""
        if tuple(tokens) != self.baseline.info.tokens:
            run = replace(self.run, prompt=None, chat=False, tokens=tuple(tokens), n_predict=0)
            self.opened, self.baseline = self._captured(run)

    def _captured(self, run: Run) -> tuple[Runnable, Trace]:
        request = request_for(self.engine or self.file, run, self.folder / "baseline.safetensors")
        if self.engine is not None:
            request = replace(request, wanted=(LOGITS,))
        return capture_run(self.engine, request, self.how.progress, self.child)

    def logits(self, tokens: Sequence[int], spec: str = "", other: Path | None = None) -> Array:
        """Those of tokens, [token, vocab], with other settings, or of another file."""
        if other is not None:
            return self._run(ModelFile(other), tokens, spec)
        key = tuple(tokens), spec
        if key not in self._known:
            found = self._run(self.file, tokens, spec)
            if spec not in SETTINGS[:USUAL]:
                return found
            self._known[key] = found  # these are asked for again
        return self._known[key]

    def _run(self, file: ModelFile, tokens: Sequence[int], spec: str) -> Array:
        with scratch_directory() as place:
            request = text_request(
                file, Run(tokens=tokens, settings=self.run.settings), Path(place) / "run.safetensors"
            )
            trace = capture(varied(request, f"{PREFIX}callback=off,{spec}"), self.how.progress, self.child)
            return np.array(trace[LOGITS], np.float64).reshape(len(tokens), -1)


class _Case:
    """One server's answers, and what they are tried for."""

    def __init__(self, llama: _LlamaCpp, answers: Answers, how: How) -> None:
        self.llama, self.answers, self.how = llama, answers, replace(how, partial=True)
        self.rows = {size: row for size, row in answers.rows.items() if len(row) >= LEAST}
        self.seen = words.shown(answers.most, len(self.rows), len(answers.tokens))
        self.past = words.asked_of_its_past([each.how for each in answers.probes], answers.unasked)

    @cached_property
    def _trials(self) -> Iterator[object]:
        """As many as there may be, all kinds together."""
        if self.how.explain:
            until = time.perf_counter() + self.how.explain
            return takewhile(lambda _: time.perf_counter() < until, count())
        each = self.llama.file.values * len(self.answers.tokens)
        return iter(range(max(LEAST_TRIALS, int(TRIALS / each))))

    def judged(self) -> Comparison:
        """The verdict, and why."""
        quick = replace(self.how, diagnose=False)
        result = self._result(quick)
        right = is_right(result.verdict)
        found = None if right else self._other_settings(SETTINGS[:USUAL])
        tokens = self._other_tokens(right or found is not None)
        if tokens is not None and (right or found is not None or not self.answers.by_ids):
            return words.explain_server_verdict(result, tokens, self.seen, self.past)
        if found is None and result.verdict == UNCHECKED:
            found = self._as_near_as_ways()
        found = self._left_out() or self._of_its_past() if right else found or self._explained()
        if found is not None and found.spec:
            result = self._result(quick, found.spec)
            right = result.verdict != WRONG
        if found is not None and (right or not found.spec):
            return words.explain_server_verdict(
                result, tokens if found.is_right and tokens is not None else found, self.seen, self.past
            )
        if not right:
            result = self._result(replace(self.how, thorough=True))
        return words.explain_server_verdict(result, None, self.seen, self.past)

    def _result(self, how: How, spec: str = "") -> Comparison:
        """The judgement of the answers, by an engine that runs with settings."""
        llama = self.llama
        trace = as_trace(self.answers, llama.opened, llama.baseline)
        if spec:
            settings = varied(text_request(llama.file, Run(tokens=self.answers.tokens), Path()), PREFIX + spec).settings
            producer = {**trace.info.producer, "settings": settings.to_json()}
            trace = trace.under(replace(trace.info, producer=producer))
        place = llama.run.settings.place
        own = None if llama.opened.by_graph else own_graph()
        graph = None if own is None else partial(
            own.of_run, llama.opened, llama.baseline, how.progress, place, llama.child
        )  # fmt: skip
        return judge(llama.opened, llama.baseline, trace, how, graph=graph)

    @cached_property
    def _plain(self) -> Array:
        """The baseline's logits, [token, vocab]."""
        return np.array(self.llama.baseline[LOGITS], np.float64).reshape(len(self.answers.tokens), -1)

    @cached_property
    def _off(self) -> float:
        """The NMSE of what the server said against the baseline."""
        return _apart(self.rows, self._plain)

    def _moved_by(self, spec: str) -> float:
        """The NMSE by which settings move llama.cpp's own logits, where the server tells some; 0 if it refuses them."""
        with suppress(UserError):
            other = self.llama.logits(self.answers.tokens, spec)
            as_rows = {n: {token: float(other[n - 1, token]) for token in row} for n, row in self.rows.items()}
            return _apart(as_rows, self._plain)
        return 0.0

    @cached_property
    def _noise(self) -> float:
        """The NMSE that rounding may leave: a few times what llama.cpp's finest ways differ by."""
        return ROOM * max(map(self._moved_by, SETTINGS[:2]))

    # -- token ids -----------------------------------------------------------------------------------------------------

    def _other_tokens(self, right: bool) -> Found | None:
        """Whether the server has other ids for the prompt: as it says, or as what follows the whole of it shows."""
        answers, stated = self.answers, self.answers.prompt_tokens
        n, whole = answers.n_prefill, answers.whole
        prompt = answers.tokens[:n]
        if stated is not None and stated != prompt:
            what = next((what for what, ids in self._ids_otherwise(prompt) if ids == stated), "")
            apart = (where_apart if what else tokens_apart)(self.llama.file, prompt, stated)
            apart = apart.removeprefix(OTHER_TOKENS).replace("the candidate", "the server")
            return words.other_ids(what or "has other token ids for the prompt", apart)
        if whole is None or len(whole) < LEAST:
            return None
        if right if not answers.by_ids else n in self.rows and self._are_one(whole, self.rows[n]):
            return None
        return self._tried_tokens(prompt, whole)

    # -- what it was asked before --------------------------------------------------------------------------------------

    def _of_its_past(self) -> Found | None:
        """An answer that is another one after other requests, or beside them."""
        usual = max(_apart({size: row}, self._plain) for size, row in self.rows.items())
        allowed = max(LIKELY * usual, self._noise, EXACT)
        for asked in self.answers.probes:
            rows = {size: row for size, row in asked.rows.items() if len(row) >= LEAST}
            right = self._right_of(asked.tokens) if rows else self._plain
            for size, row in rows.items():
                off = _apart({size: row}, right)
                if off > allowed:
                    self.how.progress(f"trying what it may have kept, asked {asked.how}")
                    cause = self._kept(asked, size, row, off)
                    return words.of_its_past(asked.how, size, len(asked.tokens), (off, allowed), cause)
        return None

    def _right_of(self, ids: Sequence[int]) -> Array:
        """llama.cpp's logits of ids, which may be the first of those that it was run with."""
        known = tuple(ids) == self.answers.tokens[: len(ids)]
        return self._plain if known else self.llama.logits(ids)

    def _kept(self, asked: Probe, size: int, row: Row, off: float) -> str:
        """In words: what of earlier requests llama.cpp must see to say what the server said; "" if none is known."""
        for _, (what, ids) in zip(self._trials, mixtures(asked, size), strict=False):
            if _apart({len(ids): row}, self.llama.logits(ids)) <= EXPLAINS * off:
                return what
        return ""

    def _are_one(self, row: Row, other: Row) -> bool:
        """Whether two rows of one server are the same, but for rounding: of what both have."""
        both = row.keys() & other.keys()
        if len(both) < LEAST:
            return False
        pairs = [_centred(np.array([each[token] for token in both])) for each in (row, other)]
        return _nmse([(pairs[0], pairs[1])]) <= max(self._noise, EXACT)

    def _tried_tokens(self, prompt: tuple[int, ...], whole: Row) -> Found | None:
        """The known mistake of tokens after which llama.cpp says what the server said."""

        def trials() -> Iterator[tuple[Found, float]]:
            for what, ids in self._ids_otherwise(prompt):
                self.how.progress(f"trying other token ids: {what}")
                with suppress(UserError):
                    found = words.tried_ids(what, prompt, ids, self.answers.prompt_count)
                    yield found, _apart({len(ids): whole}, self.llama.logits(ids))

        plain = _apart({len(prompt): whole}, self._plain)
        found = self._best(trials(), plain)
        usual = max(_apart({size: row}, self._plain) for size, row in self.rows.items())
        if found is None and self.answers.by_ids and plain > LIKELY * usual:
            return words.unknown_ids(prompt, self.answers.prompt_count)
        return found

    def _best(self, trials: Iterable[tuple[Found, float]], plain: float) -> Found | None:
        """The first that leaves next to nothing of an error; else the one that leaves least, if that is rounding."""
        best, least = None, math.inf
        for _, (found, left) in zip(self._trials, trials, strict=False):
            if left <= max(EXPLAINS * plain, EXACT):
                return found
            if left < least:
                best, least = found, left
        return best if least <= min(self._noise, CLEARLY * plain) else None

    def _ids_otherwise(self, prompt: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What known mistakes make of the prompt, in words, and as ids; where the server counts them, of its number."""
        text, count, seen = self.answers.text, self.answers.prompt_count, {prompt}
        if not text:
            return
        with suppress(ModelError):
            tokenizer = Tokenizer(self.llama.file.weights.fields)
            others = [(says, partial(_of_text, tokenizer, other)) for says, other in self._texts_otherwise(text)]
            changes = [(c.says, partial(_changed, tokenizer, c, text)) for c in changes_of(tokenizer, ())]
            for says, made in [*others, *changes]:
                with suppress(ModelError):
                    ids = made()
                    if ids and ids not in seen and (count is None or abs(count - len(ids)) <= 1):
                        seen.add(ids)
                        yield says, ids

    def _texts_otherwise(self, text: str) -> Iterator[tuple[str, str]]:
        """What known mistakes of chat templates make of a rendered chat, in words, and as text."""
        turn = self.answers.turn
        if turn is None:
            return
        yield "leaves the chat template out", turn
        yield "eats the template's line breaks", text.replace("\n", "")
        yield "eats the template's last line break", text.rstrip("\n")
        head, found, tail = text.partition(turn)
        if found:
            yield "does not open the answer (add_generation_prompt)", head + turn
            yield "eats the line breaks around a turn", head.rstrip("\n") + turn + tail.lstrip("\n")
        for system in SYSTEM:
            with suppress(UserError):
                rendered = render(self.llama.file, turn, system)
                yield f'adds a system turn that nobody asked for ("{system}")', rendered

    # -- settings, files -----------------------------------------------------------------------------------------------

    def _explained(self) -> Found | None:
        """What llama.cpp, run otherwise, has the server's logits with."""
        found = self._scaled() or self._other_settings(SETTINGS[USUAL:]) or self._other_rope()
        return found or self._dropped() or self._other_file() or self._other_types()

    def _left(self, spec: str, other: Path | None = None) -> float:
        """The NMSE that such a run leaves; without end where a run of the first tokens shows that it is not the one."""
        rows = {} if spec in SETTINGS[:USUAL] else dict(sorted(self.rows.items())[: len(self.rows) // 4])
        plain = _apart(rows, self._plain) if rows else 0.0
        tokens = self.answers.tokens
        if plain > self._noise and _apart(rows, self.llama.logits(tokens[: max(rows)], spec, other)) > HALF * plain:
            return math.inf
        return _apart(self.rows, self.llama.logits(tokens, spec, other))

    def _other_settings(self, specs: Sequence[str]) -> Found | None:
        def trials() -> Iterator[tuple[Found, float]]:
            for spec in specs:
                self.how.progress(f"trying llama.cpp with {spec}")
                with suppress(UserError):  # heads may be too small for a cache's blocks
                    yield words.with_settings(spec), self._left(spec)

        return self._best(trials(), self._off)

    def _other_rope(self) -> Found | None:
        """RoPE's base or scale is not the file's, as options of a server make it."""
        stated = self.llama.file.hyper_parameter
        base, factor = float(stated("rope.freq_base") or 10_000.0), float(stated("rope.scaling.factor") or 1.0)
        bases = [each for each in (*ROPE_BASE.familiar, base / 2, 2 * base) if not math.isclose(each, base)]

        def trials() -> Iterator[tuple[Found, float]]:
            for name, values in (("rope_base", bases), ("rope_scale", [1 / each for each in ROPE_FACTOR.familiar])):
                for value in values:
                    self.how.progress(f"trying llama.cpp with {name}={value:g}")
                    with suppress(UserError):
                        own = base if name == "rope_base" else 1 / factor
                        yield words.other_rope(name, value, own), self._left(f"{name}={value!r}")

        return self._best(trials(), self._off)

    def _scaled(self) -> Found | None:
        """Log-probabilities after temperature: the right differences, all times as much."""
        for spec in ("", *SETTINGS[:USUAL]):
            with suppress(UserError):
                logits = self.llama.logits(self.answers.tokens, spec) if spec else self._plain
                said, right = (np.concatenate(each) for each in zip(*_pairs(self.rows, logits), strict=True))
                factor = float(said @ right / max(right @ right, 1e-300))
                left = metrics.ratio(float(((said - factor * right) ** 2).sum()), float((said**2).sum()))
                if factor > 0 and abs(math.log(factor)) > SLIGHT and left <= SCALED:
                    return words.after_temperature(1 / factor)
        return None

    def _as_near_as_ways(self) -> Found | None:
        """A server no further from llama.cpp than its own ways are from one another: it may round otherwise."""
        moved = map(self._moved_by, ROUNDING)
        return next((words.as_near_as_ways(self._off, by) for by in moved if self._off <= ALIKE * by), None)

    def _dropped(self) -> Found | None:
        """A prompt of which the beginning was dropped: the last row is that of fewer tokens."""
        tokens, last = self.answers.tokens, max(self.rows)
        row = self.rows[last]
        plain = _apart({last: row}, self._plain)

        def trials() -> Iterator[tuple[Found, float]]:
            for kept in (1, 0) if self.llama.file.special_id("bos") == tokens[0] else (0,):
                for first in chosen(range(kept + 1, last - 1)):
                    ids = (*tokens[:kept], *tokens[first:last])
                    self.how.progress(f"trying without tokens {kept} to {first - 1}")
                    with suppress(UserError):
                        yield words.dropped(kept, first, last), _apart({len(ids): row}, self.llama.logits(ids))

        return self._best(trials(), plain)

    def _other_file(self) -> Found | None:
        """Another file of the model, beside this one, of which llama.cpp has the server's logits."""

        def trials() -> Iterator[tuple[Found, float]]:
            for path in self._beside():
                self.how.progress(f"trying {path.name}")
                found = words.of_another_file(path.name, self.llama.file.path.name)
                for spec in ("", *SETTINGS[:2]):
                    with suppress(UserError):
                        yield found, self._left(spec, path)

        return self._best(trials(), self._off)

    def _other_types(self) -> Found | None:
        """The file's weights in a coarser type: of the layers, or all of them."""
        file, settings = self.llama.file, self.llama.run.settings

        def trials() -> Iterator[tuple[Found, float]]:
            for kind in TYPES:
                self.how.progress(f"trying weights in {kind}")
                layers = {name: kind for name in file.tensors if _can_be(file, name, kind)}
                whole = {name: kind for name in ("output.weight", "token_embd.weight") if _fits(file, name, kind)}
                pair = FilePair(str(file.path), str(file.path), settings)
                with suppress(UserError):
                    made = trial_logits(pair, self.answers.tokens, [layers, layers | whole], self.how.progress)
                    yield from ((words.in_another_type(kind), _apart(self.rows, logits)) for logits in made)

        return self._best(trials(), self._off)

    def _beside(self) -> list[Path]:
        """Files in the same directory that may be of the same model."""
        own = self.llama.file
        found: list[Path] = []
        for path in sorted(own.path.parent.glob(f"*{GGUF}")):
            with suppress(UserError, OSError):
                if len(found) < BESIDE and not path.samefile(own.path) and _is_alike(own, ModelFile(path)):
                    found.append(path)
        return found

    def _left_out(self) -> Found | None:
        """A token that should be among a row's, and is not, of a server that is right otherwise."""
        unit = 10.0 ** -(self.answers.decimals or FEW_DIGITS)
        rows = {size: row for size, row in self.rows.items() if len(row) >= FULL and size not in self.answers.unnamed}
        for (size, row), (said, right) in zip(rows.items(), _pairs(rows, self._plain), strict=True):
            logits, ids, values = self._plain[size - 1].copy(), list(row), np.sort([*row.values()])
            # one more than the first ones may be there: the token that was chosen
            level = float(logits[ids].mean() - values.mean() + values[1])
            logits[ids] = -np.inf
            token, noise = int(np.argmax(logits)), LIKELY * (float(np.abs(said - right).max()) + unit)
            if logits[token] > level + noise:
                text = self.llama.file.vocabulary.text(token) or ""
                return words.left_out(token, text, size, float(logits[token]) - level)
        return None


def _of_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _changed(tokenizer: Tokenizer, change: Change, text: str) -> tuple[int, ...]:
    return changed(tokenizer, [change])(text)


def _can_be(file: ModelFile, name: str, kind: str) -> bool:
    """Whether a tensor is a layer's matrix that a type is coarser than."""
    return name.startswith("blk.") and len(file.weights.shape(name)) == 2 and _fits(file, name, kind)


def _fits(file: ModelFile, name: str, kind: str) -> bool:
    """Whether a tensor of the file is of another type with no fewer bits, and has rows of whole blocks of this one."""
    if name not in file.weights or file.weights.type(name) == kind:
        return False
    (values, size), (own, own_size) = block_sizes(kind), block_sizes(file.weights.type(name))
    return file.weights.shape(name)[-1] % values == 0 and own_size / own >= size / values


def _is_alike(own: ModelFile, other: ModelFile) -> bool:
    """Whether two files have one architecture, vocabulary and tensors."""
    tokens = "tokenizer.ggml.tokens"
    return (
        own.architecture == other.architecture
        and own.weights.fields.get(tokens) == other.weights.fields.get(tokens)
        and {name: own.weights.shape(name) for name in own.tensors}
        == {name: other.weights.shape(name) for name in other.tensors}
    )


def _pairs(rows: Mapping[int, Row], logits: Array) -> list[tuple[Array, Array]]:
    """Of each row what the server said, and what logits [token, vocab] do of the same tokens; without means."""
    return [
        (_centred(np.fromiter(row.values(), np.float64)), _centred(logits[count - 1][list(row)]))
        for count, row in rows.items()
    ]


def _centred(values: Array) -> Array:
    centred: Array = values - values.mean()
    return centred


def _nmse(pairs: Sequence[tuple[Array, Array]]) -> float:
    error = sum(float(((said - right) ** 2).sum()) for said, right in pairs)
    return metrics.ratio(error, sum(float((right**2).sum()) for _, right in pairs))


def _apart(rows: Mapping[int, Row], logits: Array) -> float:
    """The NMSE of what a server said, by how many tokens it follows, against logits [token, vocab]."""
    if any(token >= logits.shape[1] for row in rows.values() for token in row):
        return math.inf
    return _nmse(_pairs(rows, logits))
