"""A server, judged by what it answers: are its tokens the model's, what are its settings, is its engine right.

What it says is judged like any trace of partial logits. Where that is not right, causes are tried, the likely and cheap
ones first: other token ids, other settings of llama.cpp, other files of the model that lie beside this one. Each is a
run of llama.cpp of which the logits must be the server's. What is left is the diagnosis of a trace: known bugs,
replayed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from llamaref import ModelError
from llamaref.tokenizer import Tokenizer

from llamadiff.candidates.answers import SUFFIX, Answers, Row
from llamadiff.candidates.gguf_file import SUFFIX as GGUF
from llamadiff.candidates.http import is_server
from llamadiff.candidates.server import LEAST, Question, answers_in, as_trace, ask
from llamadiff.engines.capture_request import request_for, text_request
from llamadiff.engines.graph_model import graph_of_run
from llamadiff.engines.model_file import ModelFile, Runnable
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import after_what_the_engine_said, captured, in_engine
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.variation import PREFIX, varied
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.system.output import write_text
from llamadiff.trace.reader import Array, Trace
from llamadiff.trace.taps import LOGITS
from llamadiff.verbs.judging import judge
from llamadiff.weights.tokens.changes import changed, changes_of
from llamadiff.words import server as words
from llamadiff.words.server import Found

EXPLAINS = 0.02  # of the error of the plain run, what a run may leave that has the server's logits
EXACT = 1e-7  # NMSE of rows that are the same but for the order of sums
SECONDS = 45.0  # for known bugs
BESIDE = 4  # other files of the model that are tried
# Settings of llama.cpp that servers have, the usual ones first. The last are coarse: they are told.
SETTINGS = (
    "kv=f16,flash_attn=on", "kv=f16", "kv=q8_0,flash_attn=on", "type_k=q8_0,type_v=f16", "kv=bf16,flash_attn=on",
    "kv=q4_0,flash_attn=on", "type_k=q4_0,type_v=f16", "kv=q5_1,flash_attn=on", "kv=q5_0,flash_attn=on",
    "kv=q4_1,flash_attn=on", "kv=iq4_nl,flash_attn=on",
)  # fmt: skip


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

    def judged(self) -> Comparison:
        """The verdict, and why."""
        answers, how = self.answers, self.how
        plain = self._result(replace(how, diagnose=False))
        tokens = self._other_tokens(plain.verdict in words.RIGHT)
        if tokens is not None and (answers.by_ids is False or plain.verdict in words.RIGHT):
            return words.told(plain, tokens, self._shown)
        if plain.verdict not in words.RIGHT:
            found = self._other_settings() or self._other_file()
            if found is not None and found.is_right:
                plain = self._result(replace(how, diagnose=False), found.spec)
            if found is not None and (not found.is_right or plain.verdict in words.RIGHT):
                return words.told(plain, found, self._shown)
            how = replace(how, explain=how.explain or SECONDS)
            plain = self._result(how)
        return words.told(plain, tokens, self._shown)

    @property
    def _shown(self) -> str:
        """How much was seen."""
        return words.shown(self.answers.most, len(self.rows), len(self.answers.tokens))

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

    # -- token ids -----------------------------------------------------------------------------------------------------

    def _other_tokens(self, right: bool) -> Found | None:
        """Whether the server has other ids for the prompt: as it says, or as what follows the whole of it shows."""
        answers = self.answers
        n, whole = answers.n_prefill, answers.whole
        prompt = answers.tokens[:n]
        if answers.prompt_tokens is not None and answers.prompt_tokens != prompt:
            return words.other_ids(self.llama.file, prompt, answers.prompt_tokens)
        if whole is None or len(whole) < LEAST or answers.prompt_tokens is not None:
            return None
        if answers.by_ids and n in self.rows:
            if _apart({n: whole}, _as_logits(self.rows[n], self._plain)) <= EXACT:
                return None
        elif right:
            return None
        return self._tried_tokens(prompt, whole)

    def _tried_tokens(self, prompt: Sequence[int], whole: Row) -> Found | None:
        """The known mistake of tokens after which the right engine says what the server said."""
        plain = _apart({len(prompt): whole}, self._plain)
        for what, ids in self._ids_otherwise(prompt):
            self.how.progress(f"trying token ids: {what}")
            with suppress(UserError):
                left = _apart({len(ids): whole}, self.llama.logits(ids))
                if left <= max(EXPLAINS * plain, EXACT):
                    return words.tried_ids(what, prompt, ids)
        return None

    def _ids_otherwise(self, prompt: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What known mistakes make of the prompt, in words, and as ids."""
        text = self.llama.baseline.info.prompt
        fields, seen = self.llama.file.weights.fields, {tuple(prompt)}
        with suppress(ModelError):
            tokenizer = Tokenizer(fields)
            for change in changes_of(tokenizer, ()) if text else ():
                with suppress(ModelError):
                    ids = changed(tokenizer, [change])(text or "")
                    if ids and ids not in seen:
                        seen.add(ids)
                        yield change.says, ids

    @cached_property
    def _plain(self) -> Array:
        """The baseline's logits, [token, vocab]."""
        return np.array(self.llama.baseline[LOGITS], np.float64).reshape(len(self.answers.tokens), -1)

    # -- settings, files -----------------------------------------------------------------------------------------------

    def _other_settings(self) -> Found | None:
        """The settings with which llama.cpp has the server's logits."""
        plain = _apart(self.rows, self._plain)
        for spec in SETTINGS:
            self.how.progress(f"trying llama.cpp with {spec}")
            with suppress(UserError):  # heads may be too small for a cache's blocks
                if _apart(self.rows, self.llama.logits(self.answers.tokens, spec)) <= max(EXPLAINS * plain, EXACT):
                    return words.with_settings(spec)
        return None

    def _other_file(self) -> Found | None:
        """Another file of the model, beside this one, of which llama.cpp has the server's logits."""
        plain = _apart(self.rows, self._plain)
        for path in self._beside():
            self.how.progress(f"trying {path.name}")
            for spec in ("", *SETTINGS[:2]):
                with suppress(UserError):
                    logits = self.llama.logits(self.answers.tokens, spec, path)
                    if logits.shape == self._plain.shape and _apart(self.rows, logits) <= EXPLAINS * plain:
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


def _is_alike(own: ModelFile, other: ModelFile) -> bool:
    """Whether two files have one architecture, vocabulary and tensors."""
    tokens = "tokenizer.ggml.tokens"
    return (
        own.architecture == other.architecture
        and own.weights.fields.get(tokens) == other.weights.fields.get(tokens)
        and {name: own.weights.shape(name) for name in own.tensors}
        == {name: other.weights.shape(name) for name in other.tensors}
    )


def _as_logits(row: Row, like: Array) -> Array:
    """A row at every place of logits: what another row is compared with."""
    out = np.full((len(like), like.shape[1]), np.nan)
    out[:, list(row)] = list(row.values())
    return out


def _apart(rows: Mapping[int, Row], logits: Array) -> float:
    """The NMSE of what a server said, by how many tokens it follows, against logits [token, vocab], without means."""
    error = size = 0.0
    for count, row in rows.items():
        ids = np.fromiter(row, int)
        right, said = logits[count - 1][ids], np.fromiter(row.values(), np.float64)
        both = np.isfinite(right)
        right, said = right[both] - right[both].mean(), said[both] - said[both].mean()
        error += float(((right - said) ** 2).sum())
        size += float((right**2).sum())
    return metrics.ratio(error, size)
