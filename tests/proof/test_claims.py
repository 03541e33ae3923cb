"""Every sentence that describes an error is held to what was done: random errors are put into right taps.

The checks are written for the sentences, and share nothing with the code that found them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from llamaref import Engine

from llamadiff.candidates.reference import record
from llamadiff.ext.explain.pattern.described import profile
from llamadiff.ext.explain.pattern.deviation import Deviation
from proof.random_errors import ERRORS, Array, Right, kinds_from, rotated

TOKENS = (1, 17, 5, 80, 42, 17, 33, 61)
LIMIT = 1e-12
QUICK, THOROUGH = 10, 2000  # errors that are put into each tap; few begin with another kind at each tap
ROUNDING = 20 * np.sqrt(LIMIT)  # of a tensor's rms: what no sentence needs to know of


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def right(request, small_model) -> Right:
    from llamadiff.engines.reference_model import Model

    model = Model(small_model(request.param, "F16"))
    trace = record(Engine(model.path), TOKENS, "right")
    kinds = {tap.name: tap for tap in model.taps if tap.name in trace and not tap.name.startswith("ffn_moe_topk")}
    taps = {name: np.asarray(trace[name]) for name in kinds}
    return Right(taps, kinds, model.ropes[0], model.sizes["dim"])


# errors: (right [row, ...], random, all other taps of this size) -> wrong [row, ...]


# checks: a sentence's words -> whether they are true of (recorded, expected)


@dataclass(frozen=True)
class Said:
    """What a sentence is held to."""

    r: Array
    e: Array
    deviation: Deviation
    right: Right

    def are(self, values: Array) -> bool:
        """Whether the recorded values are these: no value is off by more than half of the error's size."""
        error = np.sqrt(np.mean(np.square(self.r - self.e)))
        return bool(np.abs(self.r - values).max() <= 0.5 * error + 1e-12)

    def differ(self, axis: int) -> Array:
        """Which rows, heads or channels differ at all; and those that differ by more than rounding."""
        gap = np.nan_to_num(np.abs(self.r - self.e), nan=np.inf, posinf=np.inf)
        return np.moveaxis(gap, axis, 0).reshape(self.r.shape[axis], -1).max(axis=1)

    def only(self, axis: int, numbers: set[int]) -> bool:
        """Whether just these differ."""
        size, gaps = np.sqrt(np.mean(np.square(self.e))) or 1.0, self.differ(axis)
        outside = np.array([i not in numbers for i in range(len(gaps))])
        return bool((gaps[outside] <= ROUNDING * size).all() and (gaps[~outside] > 0).all())


def _numbers(text: str, fact: Any) -> set[int]:
    """The numbers of a list, which may go on with "and 7 more": those are taken from the fact, and counted."""
    more = re.search(r" and (\d+) more", text)
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", text[: more.start()] if more else text):
        numbers |= set(range(int(first), int(last or first) + 1))
    if more:
        assert numbers < set(fact.values)
        assert len(fact.values) - len(numbers) == int(more.group(1))
        numbers = set(fact.values)
    return numbers


AXES = {"token": 0, "head": 1, "channel": -1}


def _check_only(said: Said, fact: Any, what: str, numbers: str) -> bool:
    return said.only(AXES[what], _numbers(numbers, fact))


def _check_but(said: Said, fact: Any, what: str, numbers: str) -> bool:
    right = _numbers(numbers, fact)
    return said.only(AXES[what], set(range(said.r.shape[AXES[what]])) - right)


def _check_written(said: Said, fact: Any, was: str, should: str) -> bool:
    names, order = should.split(", "), was.split(", ")
    shape = said.e.shape if len(names) == said.e.ndim else (len(said.e), -1, said.right.dim)
    swapped = said.e.reshape(shape).transpose([names.index(name) for name in order])
    return said.are(np.ascontiguousarray(swapped).reshape(said.e.shape))


def _flat(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _check_channels(said: Said, source: Array) -> bool:
    return said.are(_flat(said.e)[:, source].reshape(said.e.shape))


def _order_check(told: Callable[..., Any]) -> Callable[..., bool]:
    """Whether an order is what a sentence tells of it, and what the values have."""

    def check(said: Said, fact: Any, *words: str) -> bool:
        source = np.array(fact.values)
        order = told(len(source), *words)
        if isinstance(order, tuple):
            first, at = order
            is_told = source[first] == at != first and np.array_equal(source[:first], np.arange(first))
        else:
            is_told = np.array_equal(source, order)
        return bool(is_told) and _check_channels(said, source)

    return check


def _blocks(n: int, size: str | None) -> Array:
    return np.arange(n).reshape(-1, int(size or 1))


def _swapped(n: int, size: str | None, a: str, b: str) -> Array:
    blocks = _blocks(n, size)
    blocks[[int(a), int(b)]] = blocks[[int(b), int(a)]]
    return blocks.ravel()


def _rolled(n: int, size: str | None, by: str, way: str) -> Array:
    return np.roll(_blocks(n, size), int(by) * (1 if way == "later" else -1), axis=0).ravel()


def _halved(n: int, half: str, heads: str | None) -> Array:
    size = n // int(heads) if heads else 2 * int(half)
    each = np.arange(n).reshape(-1, size)
    return np.concatenate([each[:, 0::2], each[:, 1::2]], axis=1).ravel()


_OF = r"(?:(?:heads|blocks) of (\d+) )?channels"
_BY = r"(?:, by (\d+) heads of \d+ where the model has \d+)?"
# words -> the order that they tell; or of the first channel that has moved alone, which it should be
ORDERS: dict[str, Callable[..., Any]] = {
    rf"{_OF} (\d+) and (\d+) are swapped": _swapped,
    rf"the {_OF} are rolled: each is (\d+) places? (later|earlier)": _rolled,
    rf"the {_OF} are in reverse order": lambda n, size: _blocks(n, size)[::-1].ravel(),
    rf"each head's channels are in halves \(i, i\+(\d+)\) where pairs \(2i, 2i\+1\) are right{_BY}": _halved,
    rf"each head's channels are in pairs \(2i, 2i\+1\) where halves \(i, i\+(\d+)\) are right{_BY}":
        lambda n, *how: np.argsort(_halved(n, *how)),
    r"the channels are regrouped: \[(\d+), (\d+)\] is written as \[\2, \1\]":
        lambda n, a, b: np.arange(n).reshape(int(a), int(b)).T.ravel(),
    r"of every (\d+) channels the order is another: (.*)": lambda n, size, order:
        (np.arange(n).reshape(-1, int(size))[:, [int(i) for i in order.split(", ")]]).ravel(),
    rf"the {_OF} are in another order: (?:channel|block|head) (\d+) should be (?:channel|block|head) (\d+)":
        lambda n, size, first, at: (int(size or 1) * int(first), int(size or 1) * int(at)),
}  # fmt: skip


def _check_each(said: Said, fact: Any, whose: str, low: str, high: str) -> bool:
    axes = (1, 2) if whose == "token" and said.r.ndim == 3 else (-1,)
    factors = np.array(fact.values).reshape([n if i not in {a % said.r.ndim for a in axes} else 1
                                             for i, n in enumerate(said.r.shape)])  # fmt: skip
    near = [
        np.isclose(factors.min(), float(low), rtol=1e-3, atol=1e-9),
        np.isclose(factors.max(), float(high), rtol=1e-3),
    ]
    return all(near) and said.are(factors * said.e)


def _check_pairwise(said: Said, fact: Any, what: str, text: str) -> bool:
    """``token 3 has the values of token 1, token 4 has ...``: those listed, and the fact for the others."""
    pairs = [(int(a), int(b)) for a, b in re.findall(rf"{what} (\d+) has the values of {what} (\d+)", text)]
    source = np.array(fact.values)
    if any(source[a] != b for a, b in pairs) or not pairs:
        return False
    moved = int((source != np.arange(len(source))).sum())
    more = re.search(r" and (\d+) more", text)
    if moved != len(pairs) + (int(more.group(1)) if more else 0):
        return False
    return said.are(said.e[source]) if what == "token" else _check_channels(said, source)


def _check_turned(said: Said, by: Array) -> bool:
    return any(said.are(rotated(said.e, by, said.right, halves)) for halves in (False, True))


def _check_positions(said: Said, fact: Any, text: str) -> bool:
    found, right = np.array(fact.values), np.arange(len(said.e))
    for token, by, is_right in re.findall(r"token (\d+) is rotated by position (-?\d+), where (\d+) is right", text):
        if found[int(token)] != int(by) or right[int(token)] != int(is_right) or int(by) == int(is_right):
            return False
    return _check_turned(said, found - right)


def _check_law(said: Said, fact: Any, by_law: Any) -> bool:
    """Positions that are a function of the right ones."""
    found, right = np.array(fact.values), np.arange(len(said.e))
    return bool((by_law(right) == found).all()) and _check_turned(said, found - right)


def _check_runs(said: Said, fact: Any, text: str) -> bool:
    """``positions from 3 to 5 are taken for 1 to 3; position 8 is taken for 0``."""
    found = np.arange(len(said.e))
    for run in text.split("; "):
        first, last, to, _ = (
            int(n or -1)
            for n in re.fullmatch(
                r"positions? (?:from )?(\d+)(?: to (\d+))? (?:is|are) taken for (-?\d+)(?: to (-?\d+))?", run
            ).groups()
        )
        rows = np.arange(first, max(first, last) + 1)
        found[rows] = to + (rows - first) * (" to " in run.partition(" taken ")[2])
    return _check_law(said, fact, lambda right: found[right])


def _check_bound(said: Said, name: str, side: str, bound: str) -> bool:
    x = np.asarray(said.deviation.inputs[name], np.float64).reshape(said.r.shape)
    at = float(bound)
    at += (1 if side == "<=" else -1) * 1e-3 * abs(at)  # it is printed with four digits
    beyond = x <= at if side == "<=" else x >= at
    size = np.sqrt(np.mean(np.square(said.e)))
    return bool((np.abs(said.r - said.e)[~beyond] <= ROUNDING * size).all() and (~beyond).any())


def _check_own_v(said: Said, own: bool) -> bool:
    v = np.asarray(
        next(x for name, x in said.deviation.inputs.items() if name.startswith(("kv_v", "Vcur"))), np.float64
    )[0]
    heads = said.r[0].reshape(-1, said.right.dim)
    v = v.reshape(-1, said.right.dim)
    group = len(heads) // len(v)
    gap = max(np.abs(head - v[at // group]).max() for at, head in enumerate(heads))
    rms = np.sqrt(np.mean(v * v))
    return gap < 0.5 * rms if own else gap > 1e-3 * rms


def _check_growth(said: Said) -> bool:
    error = np.square(_flat(said.r - said.e)).sum(1) / np.maximum(np.square(_flat(said.e)).sum(1), 1e-300)
    half = len(error) // 2
    return float(np.median(error[half:])) > float(np.median(error[:half]))


def _part(said: Said, fact: Any, what: str, text: str, tokens: str | None) -> Array:
    """The region that a sentence speaks of: tokens, and channels or heads of them. Its words must be the fact's."""
    count = fact.values[0]
    rows, rest = list(fact.values[1 : 1 + count]), fact.values[1 + count :]
    listed = re.sub(r" and \d+ more$", "", text)
    own = {int(a) + i for a, b in re.findall(r"(\d+)(?: to (\d+))?", listed) for i in range(int(b or a) - int(a) + 1)}
    more = re.search(r" and (\d+) more$", text)
    wrong = list(rest[: len(own) + int(more.group(1) if more else 0)])
    assert own <= set(wrong)
    assert tokens is None or " more" in tokens or _numbers(tokens, fact) == set(rows)
    assert tokens is not None or len(rows) == len(said.r)
    assert (what == "head") == (said.r.ndim == 3)
    region = np.zeros(said.r.shape, bool)
    region[np.ix_(rows, wrong)] = True
    return region


def _check_part_zero(said: Said, fact: Any, what: str, text: str, tokens: str | None) -> bool:
    return not said.r[_part(said, fact, what, text, tokens)].any()


def _check_part_factor(said: Said, fact: Any, what: str, text: str, k: str, tokens: str | None) -> bool:
    region, exact = _part(said, fact, what, text, tokens), fact.values[-1]
    return bool(np.isclose(exact, float(k), rtol=1e-3)) and said.are(np.where(region, exact * said.e, said.e))


def _check_part_of(said: Said, fact: Any, what: str, text: str, sources: str, tokens: str | None) -> bool:
    region, step = _part(said, fact, what, text, tokens), fact.values[-1]
    first, source = (int(re.match(r"\d+", words).group()) for words in (text, sources))  # type: ignore[union-attr]
    return first - source == step and said.are(np.where(region, np.roll(said.e, step, axis=1), said.e))


_IN = r"(?: in tokens? (.*))?"
CHECKS: dict[str, Callable[..., bool]] = {
    rf"(channel|head)s? (.*?) (?:are|is) all zero{_IN}": _check_part_zero,
    rf"(channel|head)s? (.*?) (?:are|is) (\S+) times what (?:they|it) should be{_IN}": _check_part_factor,
    rf"(channel|head)s? (.*?) (?:have|has) the values of (?:channel|head)s? (.*?){_IN}": _check_part_of,
    **{words: _order_check(told) for words, told in ORDERS.items()},
    r"all of its values are zero": lambda said, fact: not said.r.any() and said.e.any(),
    r"tokens? (.*) (?:is|are) all zero": lambda said, fact, tokens: not said.r[list(_numbers(tokens, fact))].any(),
    r"the values are those of (.*)": lambda said, fact, name: bool(
        np.abs(said.r - np.moveaxis(np.asarray(said.deviation.others[name], np.float64).reshape(
            np.moveaxis(said.r, 0, said.deviation.tap.row_axis).shape), said.deviation.tap.row_axis, 0)).max()
        <= 0.05 * np.abs(said.r).max()),
    r"it was written as \[(.*)\], where \[(.*)\] is right": _check_written,
    r"every token has the values of the one (?:(\d+) )?(before|after) it": lambda said, fact, by, way: said.are(
        said.e[np.clip(np.arange(len(said.e)) + int(by or 1) * (-1 if way == "before" else 1), 0, len(said.e) - 1)]),
    r"(token \d+ has the values of .*)": lambda said, fact, text: _check_pairwise(said, fact, "token", text),
    r"every token has the right values in another order": lambda said, fact: bool(
        np.abs(np.sort(_flat(said.r), 1) - np.sort(_flat(said.e), 1)).max() <= 0.2 * np.abs(said.e).max()),
    r"it is (\S+) times what it should be, everywhere": lambda said, fact, k: said.are(float(k) * said.e),
    r"each (token|head of each token) has a factor of its own, from (\S+) to (\S+)": _check_each,
    r"it is off by the constant (\S+)": lambda said, fact, c: said.are(said.e + float(c)),
    r"every token is off by the same vector, as when a bias is dropped": lambda said, fact: said.are(
        said.e + (said.r - said.e)[len(said.r) // 2]),
    r"every token is rotated by its position ([+-]\d+)": lambda said, fact, by: _check_turned(
        said, np.full(len(said.e), int(by))),
    r"(token \d+ is rotated by position .*)": _check_positions,
    r"every token is rotated by its position times (\S+)": lambda said, fact, by: _check_law(
        said, fact, lambda p: np.rint(p * float(by))),
    r"its positions are rounded to (float16), which holds whole numbers up to \d+": lambda said, fact, name: (
        _check_law(said, fact, lambda p: p.astype(name))),
    r"positions beyond (\d+) are taken for \d+": lambda said, fact, last: _check_law(
        said, fact, lambda p: np.minimum(p, int(last))),
    r"its positions begin again at 0 after each (\d+)": lambda said, fact, size: _check_law(
        said, fact, lambda p: p % int(size)),
    r"(positions? .* taken for .*)": _check_runs,
    r"the first token is right": lambda said, fact: said.only(0, set(range(1, len(said.r)))),
    r"only (token|head|channel)s? (.*) (?:is|are) wrong": _check_only,
    r"every (token|head|channel) but (.*) is wrong": _check_but,
    r"the wrong channels repeat every (\d+)": lambda said, fact, period: (
        said.only(-1, set(fact.values[1:])) and len({i % int(period) for i in fact.values[1:]}) * said.r.shape[-1]
        == len(fact.values[1:]) * int(period)),
    r"the error grows with the position": lambda said, fact: _check_growth(said),
    r"it is wrong only where (\S+) (<=|>=) (\S+)": lambda said, fact, *bound: _check_bound(said, *bound),
    r"its first token is its own V, as it must be": lambda said, fact: _check_own_v(said, True),
    r"its first token is not its own V, though it sees nothing else": lambda said, fact: _check_own_v(said, False),
}  # fmt: skip


def _is_true(fact: Any, said: Said) -> bool:
    found = [(check, match) for words, check in CHECKS.items() if (match := re.fullmatch(words, fact.says))]
    assert len(found) == 1, f"a sentence without a check: {fact.says}"
    check, match = found[0]
    return check(said, fact, *match.groups())


def _deviation(right: Right, name: str, recorded: Array) -> Deviation:
    tap = right.kinds[name]
    others = {f"its own {other}": values for other, values in right.taps.items()
              if other != name and values.size == recorded.size}  # fmt: skip
    words = [*tap.kind.inputs.replace("|", " ").split(), "Vcur_proj"]
    inputs = {other: right.taps[other] for word in words if (other := f"{word}-{tap.layer}") in right.taps}
    return Deviation(tap, recorded, right.rows(name), LIMIT, others, inputs,
                     right.rope if tap.kind.op == "ROPE" else None, range(len(TOKENS)), right.dim)  # fmt: skip


def _false_statements(right: Right, name: str, count: int, seed: int) -> list[str]:
    rng, kinds, found = np.random.default_rng([seed, *name.encode()]), kinds_from(name), list[str]()
    e = right.rows(name)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        recorded = ERRORS[kind](e, rng, right)
        deviation = _deviation(right, name, recorded)
        if not deviation.bad.any():
            continue
        with np.errstate(all="ignore"):
            facts = profile(deviation)
            said = Said(recorded, e, deviation, right)
            found += [f"{kind} ({number}): {fact.says}" for fact in facts if not _is_true(fact, said)]
    return found


def test_what_is_said_of_an_error_is_true(right):
    false = {name: found for name in right.taps if (found := _false_statements(right, name, QUICK, 1))}
    assert false == {}


@pytest.mark.slow
def test_what_is_said_of_thousands_of_errors_is_true(right):
    false = {name: found for name in right.taps if (found := _false_statements(right, name, THOROUGH, 2))}
    assert false == {}


FACTORS = np.linspace(0.3, 1.7, len(TOKENS))
# what was done -> tap, how, and the words of it that must be among the facts
FOUND: dict[str, tuple[str, Callable[[Array], Array], str]] = {
    "all zero": ("attn_out-0", np.zeros_like, "all of its values are zero"),
    "rows zero": ("attn_out-0", lambda x: np.where(np.arange(len(x))[:, None] > 5, 0, x),
                  "tokens 6 and 7 are all zero"),
    "a factor a row": ("ffn_norm-1", lambda x: x * FACTORS[:, None],
                       "each token has a factor of its own, from 0.3 to 1.7"),
    "a factor a head": ("Qcur_rope-0", lambda x: x * (1 + np.outer(FACTORS, [1, -0.5, 2, 0.1]))[..., None],
                        "each head of each token has a factor of its own, from 0.15 to 4.4"),
    "a late row": ("Kcur_rope-1", lambda x: x[np.maximum(np.arange(len(x)) - 1, 0)],
                   "every token has the values of the one before it"),
    "a stale row": ("Vcur_proj-0", lambda x: np.where(np.arange(len(x))[:, None] == 5, x[4], x),
                    "token 5 has the values of token 4"),
    "rolled": ("result_output", lambda x: np.roll(x, 1, axis=-1), "the channels are rolled: each is 1 place later"),
    "heads rolled": ("Qcur_rope-1", lambda x: np.roll(x, 1, axis=1),
                     "the channels are rolled: each is 64 places later"),
    "heads regrouped": ("Qcur_rope-1", lambda x: x[:, [0, 2, 1, 3]], "heads of 64 channels 1 and 2 are swapped"),
    "heads and channels": ("kqv_out-0", lambda x: x.reshape(len(x), -1, 64).swapaxes(1, 2).reshape(x.shape),
                           "it was written as [token, dim, head], where [token, head, dim] is right"),
    "to halves": ("Qcur_proj-0", lambda x: x.reshape(len(x), -1, 32, 2).swapaxes(2, 3).reshape(x.shape),
                  "each head's channels are in halves (i, i+32) where pairs (2i, 2i+1) are right"),
    "wrong below": ("ffn_swiglu-1", None, "it is wrong only where ffn_gate-1 <= "),
    "channels zero": ("ffn_up-0", lambda x: np.where(np.arange(x.shape[1]) < 500, x, 0),
                      "channels 500 to 511 are all zero"),
    "a share of some tokens zero": (
        "ffn_up-0", lambda x: np.where((np.arange(x.shape[1]) < 256) | (np.arange(len(x)) < 6)[:, None], x, 0),
        "channels 256 to 511 are all zero in tokens 6 and 7"),
    "channels doubled": ("attn_out-0", lambda x: np.where(np.arange(x.shape[1]) < 64, 2 * x, x),
                         "channels 0 to 63 are 2 times what they should be"),
    "channels late": ("attn_out-0", lambda x: np.concatenate([x[:, :128], x[:, 64:192]], axis=1),
                      "channels 128 to 255 have the values of channels 64 to 191"),
    "a channel a little off": ("attn_out-0", lambda x: np.where(np.arange(x.shape[1]) == 83, 1.0004 * x, x),
                               "channel 83 is 1.0004 times what it should be"),
    "an order that begins right": ("attn_out-0", lambda x: x[:, [0, 2, 3, 1, *range(4, x.shape[1])]],
                                   "the channels are in another order: channel 1 should be channel 2"),
    "a head's values": ("Qcur_rope-0", lambda x: np.concatenate([x[:, :3], x[:, 2:3]], axis=1),
                        "head 3 has the values of head 2"),
}  # fmt: skip


@pytest.mark.parametrize("done", FOUND)
def test_what_was_done_is_found(done, right):
    name, change, words = FOUND[done]
    e = right.rows(name)
    gate = np.asarray(right.taps["ffn_gate-1"], np.float64)
    recorded = change(e) if change else np.where(gate < np.quantile(gate, 0.1), 1.1 * e + 1e-3, e)
    facts = profile(_deviation(right, name, recorded))
    assert any(fact.says.startswith(words) for fact in facts), [fact.says for fact in facts]


@pytest.mark.parametrize("own", [True, False])
def test_the_first_tokens_attention_is_held_to_its_v(own, right):
    e = right.rows("kqv_out-0")
    wrong = np.random.default_rng(1).standard_normal(e.shape)
    recorded = np.where(np.arange(len(e))[:, None] > 0, wrong, e) if own else wrong
    words = "its first token is its own V, as it must be" if own else "its first token is not its own V"
    assert any(fact.says.startswith(words) for fact in profile(_deviation(right, "kqv_out-0", recorded)))
