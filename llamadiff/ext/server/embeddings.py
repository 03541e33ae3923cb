"""A server of an embedding model, judged by the vector that it makes of a text: its tokens, pooling and length.

The right vector is made of llama.cpp's last rows. Where the server's points elsewhere, other ways to make one are
tried, each with each: other token ids, a prefix, another pooling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llamaref import ModelError

from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import in_engine
from llamadiff.ext.prompt.http import RefusedError, Server, is_server
from llamadiff.ext.prompt.tokenizer import Tokenizer
from llamadiff.ext.server.last_rows import EXACT, ROOM, WAYS, LastRows, answered, rows_in
from llamadiff.llamacpp.child import Child
from llamadiff.numerics import metrics
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError
from llamadiff.trace.metadata import Info
from llamadiff.trace.reader import Array
from llamadiff.trace.stated import brief

MOST = 1 << 20  # values of a vector
POOLINGS: Mapping[int, tuple[str, Callable[[Array], Array]]] = {  # llama.cpp's pooling_type
    1: ("the mean of all tokens", lambda rows: rows.mean(axis=0)),
    2: ("the first token", lambda rows: rows[0]),
    3: ("the last token", lambda rows: rows[-1]),
}
PREFIXES = (
    "query: ", "passage: ", "search_query: ", "search_document: ", "task: search result | query: ",
    "title: none | text: ", "Represent this sentence for searching relevant passages: ",
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
)  # fmt: skip
SAME = 1e-3  # of a length, by which it may be off
NEXT = "look at how the server pools, what it puts around a text, and whether it divides by the length"
AFTER = "if what it finds is still wrong, look at the prefixes or instructions of queries and documents"


@dataclass(frozen=True)
class Made:
    """One way to make a vector: in words what the server then does, "" for the right one, and what it gives."""

    says: str
    vector: Array


def pools(file: ModelFile) -> bool:
    """Whether a file's model makes one vector of a text."""
    return file.hyper_parameter("pooling_type") in POOLINGS


def compare_embeddings(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge a server by the vector of a text. Raises UserError for whatever a user can mend."""
    spec = str(candidate)
    if not is_server(spec):
        raise UserError(f"{spec}: keeps log-probabilities; of an embedding model give the server's address")
    file = ModelFile(model, how.precision, run.settings)
    engine, used = in_engine(file, how)
    llama = LastRows(file, engine, run, how, child)
    opened, baseline = llama.baseline(run, folder)
    info = baseline.info
    vector, about = _asked(spec, info.prompt if info.prompt is not None else [*info.tokens], file, how)
    said = VectorCase(file, info, rows_in(baseline, file), vector, how, llama.of).judged()
    return replace(answered(opened, baseline, about, "vector", said, (NEXT, AFTER)), engine=used)


def _asked(spec: str, text: str | list[int], file: ModelFile, how: How) -> tuple[Array, dict[str, str]]:
    """The vector that a server makes of a text, and who it is."""
    address, _, name = spec.partition("#")
    named = {"model": name} if name else {}
    with Server(address, how.timeout, how.progress) as server:
        how.progress("asking the server for a vector")
        prefix = "" if server.name.endswith("/v1") else "/v1"
        try:
            said = server.ask(f"{prefix}/embeddings", {"input": text, "encoding_format": "float", **named})
            found = _within(said, "data", "embedding")
        except RefusedError as refused:
            if not name:
                raise
            with suppress(RefusedError):
                said = server.ask("/api/embed", {"input": text, **named})
                return _vector(server.name, _within(said, "embeddings")), {"name": "the server", "url": server.name}
            raise refused from None
        return _vector(server.name, found), {"name": "the server", "url": server.name}


def _within(said: Any, key: str, inner: str = "") -> Any:
    """The first of a list in an answer, or what it has by a name."""
    listed = said.get(key) if isinstance(said, dict) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    return first.get(inner) if inner and isinstance(first, dict) else first


def _vector(name: str, value: Any) -> Array:
    """Raises UserError for what is no vector."""
    fits = isinstance(value, list) and 0 < len(value) <= MOST
    if not fits or not all(type(each) in (int, float) and math.isfinite(each) for each in value):
        raise UserError(
            f"{name}: gives {brief(value)} as a vector; expected a list of numbers (encoding_format: float)"
        )
    return np.array(value, np.float64)


class VectorCase:
    """One vector, and what it is tried for."""

    def __init__(
        self, file: ModelFile, info: Info, rows: Array, vector: Array, how: How, run: Callable[..., Array],
        whose: str = "the server", is_unit: bool = True,
    ) -> None:  # fmt: skip
        """``rows`` are llama.cpp's of the right ids; ``run`` gives those of other ids, or with other settings.

        ``is_unit``: its length should be 1; else that of the pooled rows, or 1.
        """
        self.file, self.vector, self.how, self.info, self.rows, self.run = file, vector, how, info, rows, run
        self.whose, self.is_unit = whose, is_unit
        self.kind = file.hyper_parameter("pooling_type")

    def judged(self) -> tuple[str, tuple[str, ...], bool]:
        """The finding, what stands under it, and whether it is a mistake."""
        right = self._pooled(self.rows)
        if len(self.vector) > len(right):
            says = f"{self.whose}'s vector has {len(self.vector)} values; the file's model makes {len(right)}"
            return says, ("a dense module may stand behind the pooling, or it is another model",), True
        cut = f"cuts the vector to its first {len(self.vector)} values of {len(right)}"
        whats = [cut] if len(self.vector) < len(right) else []
        allowed = max(ROOM * max(map(self._moved_by, WAYS)), EXACT)
        off = self._off(right)
        proof = f"its direction is off by an NMSE of {off:.1e}, where {allowed:.1e} is rounding"
        if off > allowed:
            found = next((made for made in self._ways() if self._off(made.vector) <= allowed), None)
            if found is None:
                return f"{self.whose}'s vector is off; no known pooling, prefix or token explains it", (proof,), True
            right, whats = found.vector, [found.says, *whats]
            proof = f"so the direction is off by an NMSE of {self._off(right):.1e}, and by {off:.1e} if not"
        length, whole = float(np.linalg.norm(self.vector)), float(np.linalg.norm(right[: len(self.vector)]))
        is_one, is_whole = abs(length - 1) <= SAME, abs(length / whole - 1) <= SAME
        if self.is_unit and not is_one and cut not in whats:
            of = "the length that it has before it is normalised" if is_whole else "no known one"
            whats.append(f"does not give it the length 1, but {length:.4g}: {of}")
        if not self.is_unit and not is_one and not is_whole:
            whats.append(f"gives it the length {length:.4g}, where {whole:.4g} is right, or 1 where it is normalised")
        if whats:
            return f"{self.whose} {' and '.join(whats)}", (proof,), True
        normalised = " (it is normalised)" if is_one and not (self.is_unit or is_whole) else ""
        return f"{self.whose}'s vector is right up to rounding{normalised}", (proof,), False

    def _off(self, right: Array) -> float:
        """The NMSE between directions."""
        mine, other = (
            each / max(float(np.linalg.norm(each)), 1e-300) for each in (self.vector, right[: len(self.vector)])
        )
        return metrics.ratio(float(((mine - other) ** 2).sum()), float((other**2).sum()))

    def _pooled(self, rows: Array, kind: int | None = None) -> Array:
        pooled: Array = POOLINGS[kind or self.kind][1](rows)
        return pooled

    def _moved_by(self, spec: str) -> float:
        """The NMSE by which settings turn llama.cpp's own vector; 0 if it refuses them."""
        with suppress(UserError):
            one, other = (
                each / np.linalg.norm(each)
                for each in (self._pooled(self.run(self.info.tokens, spec)), self._pooled(self.rows))
            )
            return float(((one - other) ** 2).sum())
        return 0.0

    def _ways(self) -> Iterator[Made]:
        """Other poolings of the right ids, then of other ids."""
        own = POOLINGS[self.kind][0]
        for what, ids in self._ids_otherwise():
            self.how.progress(f"trying another vector: {what or 'another pooling'}")
            rows = self.rows if not what else self.run(ids)
            for kind in (self.kind, *(each for each in POOLINGS if each != self.kind)):
                pooling = f"takes {POOLINGS[kind][0]}, where the file says {own}" if kind != self.kind else ""
                yield Made(" and ".join(filter(None, (what, pooling))), self._pooled(rows, kind))

    def _ids_otherwise(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The right ids first, then what else a server may have of a text."""
        ids, file = self.info.tokens, self.file
        bos, eos = file.special_id("bos"), file.special_id("eos")
        yield "", ids
        if len(ids) > 1:
            yield "leaves out the last token", ids[:-1]
        if bos is not None:
            first = ids[0] == bos
            yield (
                ("puts no beginning-of-text token", ids[1:])
                if first and len(ids) > 1
                else ("puts a beginning-of-text token, which this model does not", (bos, *ids))
            )
            if first:
                yield "puts the beginning-of-text token twice", (bos, *ids)
        if eos is not None and ids[-1] != eos:
            yield "puts an end-of-text token, which this model does not", (*ids, eos)
        with suppress(ModelError):
            tokenizer = Tokenizer(file.weights.fields)
            for prefix in PREFIXES if self.info.prompt is not None else ():
                yield f"puts {prefix!r} before the text", tuple(tokenizer.encode(prefix + (self.info.prompt or "")))
