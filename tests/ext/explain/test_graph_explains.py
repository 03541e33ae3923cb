"""llama.cpp's graph explains what the reference engine judges: several bugs at once, and bugs in the midst of spans."""

from __future__ import annotations

from types import SimpleNamespace

from llamaref import Engine
from proof.injected.base import TOKENS

from llamadiff import compare
from llamadiff.candidates.reference import record
from llamadiff.ext.explain.solve import ROPE_BASE, solve


def test_a_familiar_constant_needs_no_search(monkeypatch):
    asked: list[float] = []

    def errors(case, values):
        for value in values:
            asked.append(value)
            yield (value / 1e6 - 1) ** 2

    monkeypatch.setattr("llamadiff.ext.explain.solve.errors", errors)
    case = SimpleNamespace(recorded=0.0, hint=None, hurried=False, limit=1e-9, everywhere=None)
    assert solve(case, lambda value: value, ROPE_BASE) == [1e6]
    assert len(asked) == len(ROPE_BASE.familiar)


# where the ops of the reference engine do not explain it, the graph is asked


class _NoWindow(Engine):
    def attention(self, i, q, k, v, step, **scoring):
        return super().attention(i, q, k, v, step, **{**scoring, "window": 0})


def test_what_taps_do_not_explain_the_graph_does(small_model):
    """Beside a bug that taps explain; both in graph order."""

    class TwoBugs(_NoWindow):
        def linear(self, x, name, tap):
            swapped = name.translate(str.maketrans("01", "10")) if name.endswith("ffn_down") else name
            return super().linear(x, swapped, tap)

    path = small_model("gemma2")
    result = compare(path, TOKENS, candidate=record(TwoBugs(path), TOKENS, "my engine"))
    found = {d.tap: [cause.name for cause in d.causes] for d in result.diagnosis}
    other = ["weight-of-other-layer"]
    assert found == {"kq_soft_max-0": ["window-ignored"], "ffn_out-0": other, "ffn_out-1": other}
    assert all(d.nmse < 1e-9 for d in result.diagnosis)
