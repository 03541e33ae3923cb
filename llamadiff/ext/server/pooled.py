"""A candidate that recorded nothing but the pooled vector of a text: which rows it is made of, and its length."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from llamadiff.candidates.opening import CandidateSpec
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import How, Run
from llamadiff.engines.select import in_engine
from llamadiff.ext.server.embeddings import MOST, VectorCase, pools
from llamadiff.ext.server.last_rows import LastRows, answered, rows_in
from llamadiff.ext.server.pooled_trace import POOLED, opened_trace
from llamadiff.judge.preflight.checks import tokens_apart
from llamadiff.llamacpp.child import Child
from llamadiff.result.comparison import Comparison
from llamadiff.system.errors import UserError

NEXT = "record result_embd (of a decoder, result_norm) too: if that is right, look at what the pooling reads"
AFTER = "the pooling is right: look at what is done with the vector, and at the prefixes of queries and documents"


def compare_pooled(
    model: str | Path, candidate: CandidateSpec | None, run: Run, how: How, folder: Path, child: Child
) -> Comparison:
    """Judge the vector. Raises UserError for whatever a user can mend."""
    trace = opened_trace(candidate)
    assert trace is not None
    whose, shape = trace.path or "the candidate", trace.shape(POOLED)
    file = ModelFile(model, how.precision, run.settings)
    if not pools(file):
        kind = file.hyper_parameter("pooling_type")
        none = f"{file.path} makes no one vector of a text (pooling_type {kind})"
        raise UserError(
            f"{whose}: holds {POOLED} alone, and {none}; give the embedding model, or record its other taps"
        )
    if run.prompt is None and not run.tokens:
        run = replace(run, tokens=trace.info.tokens)
    engine, used = in_engine(file, how)
    llama = LastRows(file, engine, run, how, child)
    opened, baseline = llama.baseline(run, folder)
    if trace.info.tokens and trace.info.tokens != baseline.info.tokens:
        raise UserError(tokens_apart(opened, baseline.info.tokens, trace.info.tokens))
    rows, about = rows_in(baseline, file), {"name": "the candidate", **trace.info.producer}
    if prod(shape) > MOST:
        raise UserError(f"{whose}: {POOLED} has shape {[*shape]}; a vector of {rows.shape[1]} values is right")
    vector = np.asarray(trace[POOLED], np.float64).reshape(-1)
    if not np.isfinite(vector).all():
        raise UserError(f"{whose}: {POOLED} holds values that are not finite")
    if vector.size == rows.size > rows.shape[1]:
        says = f"the candidate does not pool: {POOLED} has {len(rows)} rows, one for each token"
        proof = (f"one row of {rows.shape[1]} values is right",)
        return replace(answered(opened, baseline, about, "vector", (says, proof, True), (NEXT, AFTER)), engine=used)
    said = VectorCase(file, baseline.info, rows, vector, how, llama.of, "the candidate", is_unit=False).judged()
    return replace(answered(opened, baseline, about, "vector", said, (NEXT, AFTER)), engine=used)
