"""Whether what is read back of an op is true: each sentence is carried out on the op's inputs, and held to its values.

The checks (truth/) are written for the sentences, and share nothing with the code that found them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from proof.strangers.arithmetic import half, silu
from proof.unlisted.truth.attention import (
    channel_plus,
    cut,
    distance,
    head_places,
    head_scales,
    k_heads,
    key_rows,
    keys_for_keys,
    lag,
    leaking,
    limited_rows,
    narrower,
    not_rescaled,
    one_scale,
    other_rows,
    own_row,
    page,
    part_times,
    row_beside,
    row_scales,
    rows_for_rows,
    rows_late,
    scored,
    shifted_values,
    sum_counts,
    sum_lacks,
    sum_plus,
    turned_values,
    unseen,
    v_heads,
    value_lacks,
    whole_rows,
    window,
)
from proof.unlisted.truth.ffn import (
    FUNCTIONS,
    clamped,
    counted,
    expert_matrices,
    expert_rows,
    gate_up,
    looked_up,
    named_beyond,
    never,
    of_up,
    off_beyond,
    ranked,
    shared,
    sloped,
    terms,
)
from proof.unlisted.truth.general import (
    by_blocks,
    fewer_inputs,
    in_steps,
    keys_and_zeros,
    other_channels,
    row_places,
    row_sizes,
    rows_moved,
    rows_of_heads,
    tokens_added,
)
from proof.unlisted.truth.norms import (
    by,
    least,
    left_out,
    magnitude,
    norm_in_16_bits,
    one_size,
    ordered,
    own_epsilon,
    root,
    some_weight,
    square,
    summed,
    twice,
    weight_first,
)
from proof.unlisted.truth.op import Op
from proof.unlisted.truth.products import (
    in_16_bits,
    input_cut,
    input_order,
    inputs_scaled,
    inputs_scaled_apart,
    inputs_summed,
    rows_of,
    tiles,
)
from proof.unlisted.truth.rope import (
    by_base,
    by_frequencies,
    by_positions,
    by_times,
    frequencies,
    in_place,
    long_pairs,
    other_frequencies,
    pair_order,
    rounded_angles,
    some_frequencies,
    stepped_angles,
    unturned,
)

_HEADS = r"(?:, in heads? (.*))?"
_PAIRS = r"pairs? (\d+)(?: to (\d+))?"
_KEYS = r"(each query's own key|the first key|the key of the largest weight|key \d+)"
CHECKS: dict[str, Callable[..., bool]] = {
    r"its sum of squares is divided by (\d+), where (\d+) is right": lambda op, n, right: by(
        op, lambda x, eps: np.sqrt((x * x).sum(axis=1, keepdims=True) / int(n) + eps)) and int(right) == op.r.shape[-1],
    r"each row's (.*) is rounded to (b?float16)": norm_in_16_bits,
    r"its angles are rounded to multiples of 1/(\d+)" + _HEADS: stepped_angles,
    r"it reads (?:the (first|last) token's (\S+?)|(\S+) of the token (before|after))"
    r"(?:, (?:from token (\d+) on|for tokens? (.*)) alone)?": rows_moved,
    r"its weights are ((?:rounded|cut off) to b?float16)": in_16_bits,
    r"the weights of inputs (\d+) to (\d+) count (\S+) times": inputs_scaled,
    r"the weights of inputs (\d+) to (\d+) have another scale in each output, from (\S+) to (\S+) times":
        inputs_scaled_apart,
    r"from key (\d+) (on|to \d+) a score reads K's row of the token (before|after)": rows_late,
    r"in place of K's rows? (.*) it reads rows? ([^;]*)": keys_for_keys,
    r"(?:in place of K's rows? (.*) it reads rows? (.*); )?the scores of keys? (.*) are zero": keys_and_zeros,
    r"from key (\d+) (on|to \d+) a score reads K's row of the token (before|after); the scores of key (\d+) are zero":
        lambda op, first, last, side, zero: rows_late(op, first, last, side, [int(zero)]),
    r"K's rows are read in reverse, the last one for the first key": lambda op: op.are(scored(op, key_rows(op)[::-1])),
    r"its values are multiples of 1/(\d+)(?:, and begin anew beyond -\S+ and (\S+))?": in_steps,
    r"(?:in channels (.*) )?each token's output is added to those of all tokens before it": tokens_added,
    r"each head's values are added to those of all heads before it": lambda op: op.are(np.cumsum(op.e, axis=0)),
    r"rows of V are read from (.*), zeros where there are none": rows_of_heads,
    r"each row is divided by another size than its own, from (\S+) to (\S+) times the right one": row_sizes,
    r"each block of (\d+) keys? is scaled by its own largest score, and not by the row's": by_blocks,
    r"channels? (.*) takes? the (gate|up) of channels? (.*)": other_channels,
    r"output 0 sums its first (\d+) inputs, and each output (\d+) (more|fewer) than the one before": fewer_inputs,
    r"heads 0 to (\d+) read the K heads (.*), where (.*) are right": k_heads,
    r"every score of a query reads K's row of that query's own token": own_row,
    r"keys after a query are not hidden: they have (?:the score (\S+)|(\S+) added to their scores)": leaking,
    r"the rows of V that it reads are rotated by their positions, as K's are": turned_values,
    r"V is read from (\d+) values? (further on|before) in memory": shifted_values,
    r"each row is divided by sqrt\(mean square \+ (\S+)\), where (\S+) is right": lambda op, eps, right: by(
        op, lambda x, _: np.sqrt(square(x) + op.fact.values[0])),
    r"each row's mean square counts as at least (\S+)": least,
    r"its epsilon is (\S+), where (\S+) is right": own_epsilon,
    r"each row is divided by its mean square to the power (\S+), where 0.5 is right": lambda op, p: by(
        op, lambda x, eps: (square(x) + eps) ** op.fact.values[0]) and np.isclose(
            float(p), op.fact.values[0], rtol=1e-3),
    r"its mean square is of channels (\d+) to (\d+) alone, divided by (\d+)": summed,
    r"its weight is (left out|\S+\.weight)": lambda op, name: by(
        op, root, lambda w: np.ones(len(w)) if name == "left out" else np.asarray(op.file[name], np.float64)),
    r"its weight is the file's plus (\S+)": lambda op, c: by(op, root, lambda w: w + op.fact.values[0]) and np.isclose(
        float(c), op.fact.values[0], rtol=1e-3),
    r"its weight is the file's to the power (\S+)": lambda op, p: by(op, root, lambda w: w ** op.fact.values[0]),
    r"its weight is ([01]) in channels (\d+) to (\d+)": lambda op, value, a, b: by(op, root, lambda w: np.where(
        (np.arange(len(w)) >= int(a)) & (np.arange(len(w)) <= int(b)), float(value), w)),
    r"its weight is in another order: .*": lambda op: ordered(op, np.array(op.fact.values)),
    r"its weight is another than the file's( in channels .*)?, the same for every token": some_weight,
    r"it is applied twice, weight and all": twice,
    r"all rows are divided by one number, (\S+?)(?:, which is right in row (\d+))?": one_size,
    r"its mean square is of one channel in (\d+) alone, from channel (\d+) on": lambda op, step, first: by(
        op, lambda x, eps: np.sqrt(square(x[:, int(first) :: int(step)]) + eps)),
    r"each row is divided by its (mean|largest) magnitude(?: plus (\S+))?, where its root mean square is right":
        magnitude,
    r"it is left out(?: in tokens? (.*))?: its input goes on": left_out,
    r"its rows are multiplied by the weight first, and normalised then": weight_first,
    r"the rows(?: of heads? (.*?))? are rotated by the positions (.*)": by_positions,
    r"the rows(?: of heads? (.*?))? are rotated by their positions times (\S+)": by_times,
    r"the rows(?: of heads? (.*?))? are not rotated": unturned,
    rf"its frequencies are rounded to float16{_HEADS}": lambda op, heads: by_frequencies(
        op, half(frequencies(op).astype(np.float32)).astype(float), heads),
    rf"its frequencies are those of base (\S+?)(?:, where (\S+?) is right)?{_HEADS}": by_base,
    rf"its angles are rounded to (float16|bfloat16){_HEADS}": rounded_angles,
    rf"by their frequencies (.*?){_HEADS}": lambda op, words, heads: pair_order(op, words),
    rf"(?:all frequencies|the frequenc(?:ies|y) of {_PAIRS}) (?:are|is) (\S+) times what (?:they|it) should be{_HEADS}":
        some_frequencies,
    rf"a position turns (.*?)(?: and \d+ more)?{_HEADS}": other_frequencies,
    rf"(?:all pairs|{_PAIRS}) comes? out (\S+) times as long as (?:they|it) should{_HEADS}": long_pairs,
    rf"the (first|second) value of each pair is made of the other one's new value{_HEADS}": in_place,
    r"(?:key|expert)s whose scaled score is more than (\S+) below the row's largest get nothing": cut,
    r"queries see no more than the last (\d+) keys(?:, in heads (.*))?": window,
    r"key (\d+) is not seen by quer(?:y|ies) (.*?)(?:, in heads (.*))?": unseen,
    r"scores are multiplied by (.*) in heads 0 to \d+, where (\S+) is right": head_scales,
    r"scores are multiplied by (\S+), where (\S+) is right": one_scale,
    r"each row multiplies scores by a factor of its own, from (\S+) to (\S+), where (\S+) is right": row_scales,
    r"to scores is added the distance from key to query times (.*) in heads 0 to \d+": distance,
    r"its sum leaves out (.*?)(, where there is another (?:key|expert))?": sum_lacks,
    r"its sum is (\S+) too large, where the largest term is 1": sum_plus,
    r"its sum counts (\d+) more with a score of 0": lambda op, n: sum_counts(op, n, False),
    r"its sum counts (\d+) (?:key|expert)s in every row, those that are not there with a score of 0":
        lambda op, n: sum_counts(op, n, True),
    r"heads 0 to (\d+) read the V heads (.*), where (.*) are right": v_heads,
    r"its heads are in another order: (.*)": head_places,
    rf"the value of {_KEYS} is not added(, where there is another key)?": value_lacks,
    r"what was summed is not rescaled where the largest score grows, from one block of (\d+) keys? to the next"
    r"(, and nor is its sum)?": not_rescaled,
    r"in place of V's rows? ([\d, ]+) it reads rows? ([\d, ]+)": rows_for_rows,
    r"in place of V's rows? (.*) it reads layer (\d+)'s": other_rows,
    r"it reads [KV]'s (head|channel|row)s? (.*) times (\S+)": part_times,
    r"(\S+) times the (row before|row after|head before) is added to each row of [KV] that it reads": row_beside,
    r"(.*) is added to [KV]'s channels? (.*), in all heads": channel_plus,
    r"it reads [KV] rounded (.*)": whole_rows,
    r"it reads the first (\d+) of [KV]'s (\d+) channels alone": narrower,
    r"in place of [KV]'s rows (\d+) to (\d+) it reads those from row (\d+) on": page,
    r"queries do not see the last (\d+) keys, their own among them": lag,
    r"it reads (row .*)": expert_rows,
    r"it multiplies by (expert .*)": expert_matrices,
    r"it (limits|reads zeros for) the values of [KV] (?:to|that are below) (\S+)": limited_rows,
    r"it reads zeros for V's rows? (.*)": lambda op, rows: other_rows(op, rows, None),
    r"its (gate|up) is cut off (above|below|beyond) (\S+)": clamped,
    r"it is (.*) \* up, where silu\(gate\) \* up is right": lambda op, name: op.are(
        FUNCTIONS[name](gate_up(op)[0]) * gate_up(op)[1]),
    r"silu\(\S+\) is another function, off by up to (\S+)": lambda op, off: bool(
        (np.abs(op.r - silu(gate_up(op)[0]) * gate_up(op)[1]) <= 1.06 * float(off) * np.abs(gate_up(op)[1])
         + 1e-5 * np.sqrt(np.mean(op.e**2))).all()),
    r"it is gate \* sigmoid\((\S+) \* gate\) \* up, where the slope 1 is right": sloped,
    r"it is silu\((\S+)\) \* \((?:(\S+) \* )?up \+ (\S+)\), where up alone is right": of_up,
    r"where (\S+) (<=|>=) (\S+), it is (.*) \* up": named_beyond,
    r"where (\S+) (<=|>=) (\S+), silu\((\S+)\) is another function, off by up to (\S+)": off_beyond,
    r"(in channels \d+ to \d+ |from token 1 on )?it is (.*), where (.* \+ .*) is right": terms,
    r"it chooses the experts of ranks? (.*), where (.*) (?:is|are) right": ranked,
    r"it never chooses expert (\d+)": never,
    r"weights are divided by their sum plus (\S+)": lambda op, more: shared(op, more, None),
    r"weights are multiplied by (\S+), whatever their sum": lambda op, times: shared(op, None, times),
    r"the chosen experts count (.*) times as much as their weights": counted,
    r"its sums (leave out|count twice) inputs? (\d+)(?: to (\d+))?": inputs_summed,
    r"(\S+) is transposed in tiles of (\d+)": tiles,
    r"its inputs are in another order: (.*)": input_order,
    r"its inputs are cut off beyond (\S+)": input_cut,
    r"(in channels \d+ to \d+ )?it multiplies by (?:rows (\d+) to (\d+) of )?(\S+)": rows_of,
}  # fmt: skip


def is_true(op: Op, tokens: tuple[int, ...]) -> bool:
    """Whether what a fact says of an op holds. Every sentence has one check."""
    if match := re.fullmatch(r"(in channels \d+ to \d+ )?it looks up (.*)", op.fact.says):
        return looked_up(op, match[1], match[2], tokens)
    if match := re.fullmatch(r"the row of id i begins at value (\d+) \* i of .*, where (\d+) \* i .*", op.fact.says):
        return row_places(op, match[1], match[2], tokens)
    found = [(check, match) for words, check in CHECKS.items() if (match := re.fullmatch(words, op.fact.says))]
    assert len(found) == 1, f"a sentence without a check of its own: {op.fact.says}"
    check, match = found[0]
    return check(op, *match.groups())
