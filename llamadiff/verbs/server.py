"""A server, judged by what it answers: are its tokens the model's, what are its settings, is its engine right.

What it says is judged like any trace of partial logits. Where that is not right, causes are tried, the likely and cheap
ones first: other token ids, other settings of llama.cpp, other files of the model that lie beside this one. Each is a
run of llama.cpp of which the logits must be the server's. What is left is the diagnosis of a trace: known bugs,
replayed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from llamaref import ModelError
from llamaref.tokenizer import Tokenizer

from llamadiff.candidates.answers import FEW_DIGITS, SUFFIX, Answers, Row
from llamadiff.candidates.gguf_file import SUFFIX as GGUF
from llamadiff.candidates.http import is_server
from llamadiff.candidates.server import LEAST, Question, answers_in, as_trace, ask, chosen, same_rows
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.chat_template import render
from llamadiff.engines.graph_model import graph_of_run
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import after_what_the_engine_said, captured, in_engine
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.variation import PREFIX, varied
from llamadiff.numerics import metrics, tolerances
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_text
from llamadiff.trace.reader import Array, Trace
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.judging import judge
from llamadiff.weights.tokens.changes import Change, changed, changes_of
from llamadiff.words import server as words
from llamadiff.words.server import Found

EXPLAINS = 0.02  # of the error of the plain run, what a run may leave that has the server's logits
SCALED, SLIGHT = 1e-4, 0.05  # NMSE of rows that are right but for a factor, and the logarithm of one that is near 1
ALIKE = 2.0  # times the NMSE between two right runs: what a third one may be off by
EXACT = 1e-7  # NMSE of rows that are the same but for the order of sums
SECONDS = 45.0  # for known bugs
BESIDE = 4  # other files of the model that are tried
FULL, NOISE = 5, 10.0  # a row of so many may lack a token; times its largest error, by which that token is too likely
SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant")
# Settings of llama.cpp that servers have, the usual ones first: quantized caches as llama.cpp has them, and others.
SETTINGS = (
    "kv=f16,flash_attn=on", "kv=f16", "kv=q8_0,flash_attn=on,rotated=on", "kv=q4_0,flash_attn=on,rotated=on",
    "kv=bf16,flash_attn=on", "type_k=q8_0,type_v=f16,flash_attn=on,rotated=on", "kv=q8_0,flash_attn=on",
    "kv=q4_0,flash_attn=on", "kv=q5_1,flash_attn=on,rotated=on", "kv=q5_0,flash_attn=on,rotated=on",
    "kv=q4_1,flash_attn=on,rotated=on", "kv=iq4_nl,flash_attn=on,rotated=on",
)  # fmt: skip
ROUNDING = ("kv=q8_0,flash_attn=on,rotated=on", "kv=q8_0,flash_attn=on")  # the coarsest that are no mistake


def compare_server(model: str | Path, spec: str, run: Run, how: How, folder: Path, child: Child) -> Comparison:
    """Judge a server by its log-probabilities, or what was kept of them; both runs are written to ``folder``.

    Raises UserError for whatever a user can mend.
    """
    file = ModelFile(model, how.precision, run.settings.threads)
    engine, used = in_engine(file, how, run.settings.threads)
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
        return replace(_Case(llama, kept, how).judged(), engine=used)


class _LlamaCpp:
    """llama.cpp on the file, run as often as it takes."""

    def __init__(
        self, file: ModelFile, engine: Runnable | None, run: Run, how: How, folder: Path, child: Child
    ) -> None:
        self.file, self.engine, self.run, self.how, self.folder, self.child = file, engine, run, how, folder, child
        self.opened, self.baseline = self._captured(run)

    def go_on_with(self, tokens: Sequence[int]) -> None:
        """Run these, where a server went on in its own way."""
        if tuple(tokens) != self.baseline.info.tokens:
            run = replace(self.run, prompt=None, chat=False, tokens=tuple(tokens), n_predict=0)
            self.opened, self.baseline = self._captured(run)

    def _captured(self, run: Run) -> tuple[Runnable, Trace]:
        request = request_for(self.engine or self.file, run, self.folder / "baseline.safetensors")
        if self.engine is not None:
            request = replace(request, wanted=(LOGITS,))
        return captured(self.engine, request, self.how.progress, self.child)

    def logits(self, tokens: Sequence[int], spec: str = "", other: Path | None = None) -> Array:
        """Those of tokens, [token, vocab], with other settings, or of another file."""
        file = self.file if other is None else ModelFile(other)
        request = text_request(file, Run(tokens=tokens, settings=self.run.settings), self.folder / "trial.safetensors")
        request = varied(request, f"{PREFIX}callback=off,{spec}")
        trace = captured(self.opened, request, self.how.progress, self.child)[1]
        return np.array(trace[LOGITS], np.float64).reshape(len(tokens), -1)


class _Case:
    """One server's answers, and what they are tried for."""

    def __init__(self, llama: _LlamaCpp, answers: Answers, how: How) -> None:
        self.llama, self.answers, self.how = llama, answers, replace(how, partial=True)
        self.rows = {size: row for size, row in answers.rows.items() if len(row) >= LEAST}
        self.seen = words.shown(answers.most, len(self.rows), len(answers.tokens))

    def judged(self) -> Comparison:
        """The verdict, and why."""
        quick = replace(self.how, diagnose=False)
        result = self._result(quick)
        right = result.verdict in words.RIGHT
        tokens = self._other_tokens(right)
        if tokens is not None and (right or not self.answers.by_ids):
            return words.told(result, tokens, self.seen)
        found = self._left_out() if right else self._explained(result.verdict)
        if found is not None and found.spec and not found.roughly:
            result = self._result(quick, found.spec)
            right = result.verdict != tolerances.WRONG
        if found is not None and (right or found.roughly or not found.spec):
            return words.told(result, tokens if found.is_right and tokens is not None else found, self.seen)
        if not right:
            result = self._result(replace(self.how, explain=self.how.explain or SECONDS))
        return words.told(result, tokens, self.seen)

    def _result(self, how: How, spec: str = "") -> Comparison:
        """The judgement of the answers, by an engine that runs with settings."""
        llama = self.llama
        trace = as_trace(self.answers, llama.opened, llama.baseline)
        if spec:
            settings = varied(text_request(llama.file, Run(tokens=self.answers.tokens), Path()), PREFIX + spec).settings
            producer = {**trace.info.producer, "settings": settings.to_json()}
            trace = trace.under(replace(trace.info, producer=producer))
        place = llama.run.settings.place
        graph = None if llama.opened.by_graph else partial(
            graph_of_run, llama.opened, llama.baseline, how.progress, place, llama.child
        )  # fmt: skip
        return judge(llama.opened, llama.baseline, trace, how, graph=graph)

    @cached_property
    def _plain(self) -> Array:
        """The baseline's logits, [token, vocab]."""
        return np.array(self.llama.baseline[LOGITS], np.float64).reshape(len(self.answers.tokens), -1)

    # -- token ids -----------------------------------------------------------------------------------------------------

    def _other_tokens(self, right: bool) -> Found | None:
        """Whether the server has other ids for the prompt: as it says, or as what follows the whole of it shows."""
        answers, stated = self.answers, self.answers.prompt_tokens
        n, whole = answers.n_prefill, answers.whole
        prompt = answers.tokens[:n]
        if stated is not None:
            known = (what for what, ids in self._ids_otherwise(prompt) if ids == stated)
            return words.other_ids(self.llama.file, prompt, stated, next(known, "")) if stated != prompt else None
        if whole is None or len(whole) < LEAST:
            return None
        told = self.rows.get(n) if answers.by_ids else None
        if right if told is None else same_rows(told, whole):
            return None
        return self._tried_tokens(prompt, whole)

    def _tried_tokens(self, prompt: tuple[int, ...], whole: Row) -> Found | None:
        """The known mistake of tokens after which llama.cpp says what the server said."""
        plain = _apart({len(prompt): whole}, self._plain)
        for what, ids in self._ids_otherwise(prompt):
            self.how.progress(f"trying other token ids: {what}")
            with suppress(UserError):
                if _is_it(_apart({len(ids): whole}, self.llama.logits(ids)), plain):
                    return words.tried_ids(what, prompt, ids, self.answers.prompt_count)
        usual = max((_apart({size: row}, self._plain) for size, row in self.rows.items()), default=0.0)
        if self.answers.by_ids and plain > NOISE * usual:
            return words.unknown_ids(prompt, self.answers.prompt_count)
        return None

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

    def _explained(self, verdict: str) -> Found | None:
        """What llama.cpp, run otherwise, has the server's logits with."""
        found = self._other_settings() or self._other_file()
        if found is None and verdict == tolerances.UNCHECKED and not self.how.explain:
            found = self._as_coarse()
        return found or self._dropped()

    def _other_settings(self) -> Found | None:
        """Settings of llama.cpp, under which its logits are the server's, or are these times a factor."""
        plain = _apart(self.rows, self._plain)
        for spec in ("", *SETTINGS):
            self.how.progress(f"trying llama.cpp with {spec or 'other temperatures'}")
            with suppress(UserError):  # heads may be too small for a cache's blocks
                logits = self.llama.logits(self.answers.tokens, spec) if spec else self._plain
                if spec and _is_it(_apart(self.rows, logits), plain):
                    return words.with_settings(spec)
                factor = self._factor(logits)
                if factor is not None:
                    return words.after_temperature(1 / factor)
        return None

    def _factor(self, logits: Array) -> float | None:
        """What all differences of log-probabilities are too large by; None where that does not make them right."""
        said, right = (np.concatenate(each) for each in zip(*_pairs(self.rows, logits), strict=True))
        factor = float(said @ right / max(right @ right, 1e-300))
        left = metrics.ratio(float(((said - factor * right) ** 2).sum()), float((said**2).sum()))
        return factor if factor > 0 and abs(math.log(factor)) > SLIGHT and left <= SCALED else None

    def _as_coarse(self) -> Found | None:
        """Settings with which llama.cpp is as far from itself as the server is from it: an engine may round otherwise."""
        off = _apart(self.rows, self._plain)
        for spec in ROUNDING:
            with suppress(UserError):
                own = self.llama.logits(self.answers.tokens, spec)
                rows = {size: {token: float(own[size - 1, token]) for token in row} for size, row in self.rows.items()}
                if off <= ALIKE * _apart(rows, self._plain):
                    return words.as_coarse(spec)
        return None

    def _dropped(self) -> Found | None:
        """A prompt of which the beginning was dropped: the last row is that of fewer tokens."""
        tokens, last = self.answers.tokens, max(self.rows)
        row = {0: self.rows[last]}
        plain = _apart({last: self.rows[last]}, self._plain)
        begins = self.llama.file.special_id("bos") == tokens[0]
        for kept in (1, 0) if begins else (0,):
            for first in chosen(range(kept + 1, last - 1)):
                ids = (*tokens[:kept], *tokens[first:last])
                self.how.progress(f"trying without tokens {kept} to {first - 1}")
                with suppress(UserError):
                    if _is_it(_apart({len(ids): row[0]}, self.llama.logits(ids)), plain):
                        return words.dropped(kept, first, last)
        return None

    def _other_file(self) -> Found | None:
        """Another file of the model, beside this one, of which llama.cpp has the server's logits."""
        plain = _apart(self.rows, self._plain)
        for path in self._beside():
            self.how.progress(f"trying {path.name}")
            for spec in ("", *SETTINGS[:2]):
                with suppress(UserError):
                    if _is_it(_apart(self.rows, self.llama.logits(self.answers.tokens, spec, path)), plain):
                        return words.of_another_file(path.name, self.llama.file.path.name)
        return None

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
            token, noise = int(np.argmax(logits)), NOISE * (float(np.abs(said - right).max()) + unit)
            if logits[token] > level + noise:
                text = self.llama.file.vocabulary.text(token) or ""
                return words.left_out(token, text, size, float(logits[token]) - level)
        return None


def _of_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _changed(tokenizer: Tokenizer, change: Change, text: str) -> tuple[int, ...]:
    return changed(tokenizer, [change])(text)


def _is_it(left: float, plain: float) -> bool:
    """Whether what is left of an error is next to nothing."""
    return left <= max(EXPLAINS * plain, EXACT)


def _is_alike(own: ModelFile, other: ModelFile) -> bool:
    """Whether two files have one architecture, vocabulary and tensors."""
    tokens = "tokenizer.ggml.tokens"
    return (
        own.architecture == other.architecture
        and own.weights.fields.get(tokens) == other.weights.fields.get(tokens)
        and {name: own.weights.shape(name) for name in own.tensors}
        == {name: other.weights.shape(name) for name in other.tensors}
    )


def _pairs(rows: Mapping[int, Row], logits: Array) -> Iterator[tuple[Array, Array]]:
    """Of each row what the server said, and what logits [token, vocab] do of the same tokens; without means."""
    for count, row in rows.items():
        said, right = np.fromiter(row.values(), np.float64), logits[count - 1][list(row)]
        yield said - said.mean(), right - right.mean()


def _apart(rows: Mapping[int, Row], logits: Array) -> float:
    """The NMSE of what a server said, by how many tokens it follows, against logits [token, vocab]."""
    if any(token >= logits.shape[1] for row in rows.values() for token in row):
        return np.inf
    pairs = list(_pairs(rows, logits))
    error = sum(float(((said - right) ** 2).sum()) for said, right in pairs)
    return metrics.ratio(error, sum(float((right**2).sum()) for _, right in pairs))
