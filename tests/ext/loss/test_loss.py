"""Two files of one model: what quantization costs, which tensors, and whether it is honest."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from command import run as command
from models.gguf_file import read_gguf, write_gguf
from models.small import write_model
from prose import bert

import llamadiff
from llamadiff.candidates.opening import open_candidate
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Costing, How, Run
from llamadiff.ext.loss.budget import choose
from llamadiff.ext.loss.finding_out import file_type, published
from llamadiff.ext.loss.result import OWN, Contribution, Estimate, Loss, named
from llamadiff.ext.loss.statistics import mean_of, statistics
from llamadiff.ext.loss.trials import NONE, FilePair, Material, Trial, divergences, run_trials
from llamadiff.ext.loss.words import sentence
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.verbs import verbs

SHIPPED = Path(llamadiff.__file__).parent / "shipped"
GOOD, SMALL = SHIPPED / "tiny.F16.gguf", SHIPPED / "tiny.Q4_K_M.gguf"
PAIR = FilePair(str(GOOD), str(SMALL), Settings())
PROMPT = "Once upon a time, there was a little fox named Lily. She lived"
TEXT = (
    "Once upon a time, there was a little fox named Lily. She lived near a river. She had a red ball, and she took it "
    "everywhere. One day, a storm came. The wind blew, and the ball was gone. Her friend helped her to find it. "
) * 8  # fmt: skip
TOKENS = tuple(range(5, 45))
KERNELS = 0.05  # standard errors: what other CPUs' kernels round otherwise (0.024 without vector extensions)


def with_restored(path: Path, names: tuple[str, ...], changed: Mapping[str, object] | None = None) -> Path:
    """The small file with some tensors of the good one, written by the gguf library; ``changed``: of its metadata."""
    fields, tensors = read_gguf(SMALL)
    for key, value in (changed or {}).items():
        fields[key] = (value, *fields[key][1:])
    good = read_gguf(GOOD)[1]
    return write_gguf(path, fields, tensors | {name: good[name] for name in names})


def damaged(path: Path, name: str = "blk.1.ffn_down.weight", source: Path = SMALL) -> Path:
    """A copy in which the rows of one tensor stand in another order."""
    shutil.copy(source, path)
    path.chmod(0o644)
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.name == name)
    tensor.data[:] = tensor.data[::-1].copy()
    return path


def compare(other: Path, **asked: object) -> llamadiff.Comparison:
    return verbs.compare(GOOD, Run(PROMPT), str(other), How(costing=Costing(**asked)))  # type: ignore[arg-type]


# -- the distributions ----------------------------------------------------------------------------------------------


def test_divergences_are_those_of_the_definition():
    rng = np.random.default_rng(1)
    base, other = rng.normal(size=(2, 7, 31)) * 3
    found = divergences(base, other, [*range(6), None])
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (base, other))
    assert found[:, 0] == pytest.approx((p * np.log(p / q)).sum(axis=1))
    assert found[:6, 1] == pytest.approx([-math.log(q[i, i]) for i in range(6)])
    assert math.isnan(found[6, 1])
    assert list(found[:, 2]) == list(p.argmax(axis=1) == q.argmax(axis=1))


def test_both_files_side_by_side_are_what_two_runs_are(tmp_path):
    """The KL of the logits that two recorded runs hold."""
    logits = []
    for path in (GOOD, SMALL):
        trace = verbs.record(path, Run(tokens=TOKENS), tmp_path / f"{path.stem}.safetensors")
        logits.append(np.asarray(trace["result_output"], np.float64).reshape(len(TOKENS), -1))
    wanted = divergences(*logits, [None] * len(TOKENS))[:, 0]
    assert run_trials(PAIR, Material(TOKENS), [NONE]).trials[0].kl == pytest.approx(wanted, rel=1e-3, abs=1e-9)


def test_a_trial_is_what_a_file_with_these_tensors_is(tmp_path):
    names = ("blk.0.ffn_down.weight", "token_embd.weight", "blk.2.attn_v.weight")
    path = with_restored(tmp_path / "restored.gguf", names)
    in_place = run_trials(PAIR, Material(TOKENS), [dict.fromkeys(names, OWN)]).trials[0]
    of_file = run_trials(FilePair(str(GOOD), str(path), Settings()), Material(TOKENS), [NONE]).trials[0]
    assert np.array_equal(in_place.kl, of_file.kl)


def test_quantizing_here_and_now_is_what_llama_cpps_own_quantizer_did():
    """The shipped small file was made of the good one without an importance of columns: no other KL may come of it."""
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(SMALL).tensors}
    quantized = {name: kind for name, kind in types.items() if kind not in ("F32", "F16")}
    found = run_trials(PAIR, Material(tokens=TOKENS), [NONE, quantized])
    np.testing.assert_allclose(found.trials[1].kl, found.trials[0].kl, rtol=1e-6, atol=1e-12)


def test_with_all_tensors_restored_nothing_is_left():
    every = {tensor.name: OWN for tensor in gguf.GGUFReader(GOOD).tensors}
    plain, restored, again = run_trials(PAIR, Material(TOKENS), [NONE, every, NONE]).trials
    assert plain.mean > 1e-3
    assert restored.mean == 0
    assert np.array_equal(plain.kl, again.kl)  # and what was changed was put back


def test_a_third_type_lies_between():
    name = "blk.1.ffn_down.weight"
    pair = FilePair(str(GOOD), str(GOOD), Settings())
    coarse, fine = (run_trials(pair, Material(TOKENS), [{name: kind}]).trials[0].mean for kind in ("Q2_K", "Q6_K"))
    assert 0 < fine < coarse / 20


# -- llama-perplexity's statistics ------------------------------------------------------------------------------------


def by_sums(values: np.ndarray) -> tuple[float, float]:
    """A mean and its error from two sums, as llama-perplexity adds them up."""
    count, mean = len(values), float(values.sum() / len(values))
    return mean, math.sqrt((float((values**2).sum()) / count - mean**2) / (count - 1))


def test_statistics_are_llama_perplexitys():
    rng = np.random.default_rng(2)
    base_nll = rng.gamma(2.0, size=500)
    nll = np.abs(base_nll + 0.2 * rng.normal(size=500))
    kl, same = rng.gamma(0.5, 0.1, 500), rng.random(500) < 0.9
    found = statistics(Trial(kl * 0, base_nll, kl * 0), Trial(kl, nll, same.astype(float)))
    q, q_error = by_sums(nll)
    b, b_error = by_sums(base_nll)
    covariance = ((nll * base_nll).sum() / 500 - q * b) / 499
    ratio_error = math.sqrt(q_error**2 + b_error**2 - 2 * covariance)
    ppl, ppl_b = math.exp(q), math.exp(b)
    gap_error = math.sqrt((ppl * q_error) ** 2 + (ppl_b * b_error) ** 2 - 2 * ppl * ppl_b * covariance)
    dp = np.exp(-nll) - np.exp(-base_nll)
    mse, mse_error = by_sums(dp**2)
    wanted = {
        "Mean PPL(Q)": (ppl, ppl * q_error),
        "Mean PPL(base)": (ppl_b, ppl_b * b_error),
        "Mean ln(PPL(Q)/PPL(base))": (q - b, ratio_error),
        "Mean PPL(Q)/PPL(base)": (math.exp(q - b), math.exp(q - b) * ratio_error),
        "Mean PPL(Q)-PPL(base)": (ppl - ppl_b, gap_error),
        "Mean    KLD": by_sums(kl),
        "Mean    Δp": by_sums(dp),
        "RMS Δp": (math.sqrt(mse), 0.5 / math.sqrt(mse) * mse_error),
        "Same top p": (same.mean(), math.sqrt(same.mean() * (1 - same.mean()) / 499)),
    }
    for name, (value, error) in wanted.items():
        estimate = named(found, name)
        assert estimate is not None, name
        assert (estimate.value, estimate.error) == pytest.approx((value, error)), name
    assert named(found, "Cor(ln(PPL(Q)), ln(PPL(base)))").value == pytest.approx(covariance / (q_error * b_error))
    assert named(found, "Maximum KLD").value == kl.max()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("Mean PPL(Q)", 52.734591, 15.372402),
        ("Mean PPL(base)", 52.8188, 15.47838),  # its own, before it keeps 16 bits of each in a file
        ("Mean    KLD", 0.017474, 0.002292),
        ("Mean    Δp", -0.00958, 0.00334),
        ("RMS Δp", 0.05342, 0.00786),
        ("Same top p", 0.93145, 0.01608),
    ],
)
def test_figures_are_those_of_llama_perplexity_itself(name, value, error, of_text):
    """What llama-perplexity of llama-cpp-python 0.3.36 printed of these files: -c 64 -b 64 -fa off, a cache in F32."""
    found = named(of_text, name)
    turned = 2 / 248 if name == "Same top p" else 0.0  # first tokens that are near others: CPUs round otherwise
    assert found.value == pytest.approx(value, abs=turned + KERNELS * error)
    assert found.error == pytest.approx(error, rel=0.01 + 7 * turned)  # sqrt(p (1 - p)) changes so much faster than p


@pytest.fixture(scope="module")
def of_text():
    found = run_trials(PAIR, Material(text=TEXT, window=64), [NONE])
    return statistics(found.base, found.trials[0])


def test_half_of_each_window_of_a_text_is_scored():
    found = run_trials(PAIR, Material(text=TEXT, window=64), [NONE])
    assert len(found.base.kl) == found.windows * 31
    assert found.window == 64
    assert not np.isnan(found.base.nll).any()


# -- the sentence -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest() -> llamadiff.Comparison:
    return compare(SMALL, text=TEXT, text_name="a.txt", spend=100_000)


def test_honest_loss_is_said_to_be_that(honest):
    assert honest.verdict == "match"
    assert re.match(r"Q4_K_M costs KL 0\.\d+ \+- 0\.\d+, usual for the type; ", honest.headline)
    assert honest.headline.endswith("nothing points to a bug")
    assert honest.more["loss"].is_usual
    assert not honest.more["loss"].damaged


def test_restoring_the_named_tensors_lowers_it_by_what_was_said(honest, tmp_path):
    """Within 10%, by a file that the gguf library wrote."""
    restored = honest.more["loss"].restored
    assert restored is not None
    path = with_restored(tmp_path / "restored.gguf", tuple(restored.changes))
    material = Material(text=TEXT, most=2)
    before = run_trials(PAIR, material, [NONE]).trials[0].mean
    after = run_trials(FilePair(str(GOOD), str(path), Settings()), material, [NONE]).trials[0].mean
    assert before - after == pytest.approx(restored.share * restored.whole, rel=0.1)


def test_the_costliest_tensors_come_first_and_each_was_measured(honest):
    measured = [one.measured.value for one in honest.more["loss"].contributions if one.measured is not None]
    assert len(measured) == 22
    assert measured == sorted(measured, reverse=True)
    assert {one.name for one in honest.more["loss"].contributions} <= {
        tensor.name for tensor in gguf.GGUFReader(GOOD).tensors
    }


def test_a_budget_is_kept_and_recovers_more_than_any_tensor_of_its_size(honest):
    spent = honest.more["loss"].spent
    assert 0 < spent.more <= 100_000
    single = [one.value for one in honest.more["loss"].contributions if one.more <= 100_000]
    assert spent.whole - spent.measured.value > 0.5 * max(single)
    assert spent.measured.value < spent.whole


def test_what_is_made_in_a_layer_is_less_than_what_is_inherited(honest):
    assert [each.layer for each in honest.more["loss"].layers] == [0, 1, 2]
    assert all(each.made > 0 for each in honest.more["loss"].layers)
    assert honest.more["loss"].made["embd"] > 0


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", pytest.param("blk.0.attn_q.weight", marks=pytest.mark.slow)])
def test_damage_is_told_from_honest_loss_and_named(name, tmp_path):
    found = compare(damaged(tmp_path / "bad.gguf", name))
    assert found.verdict == "wrong"
    assert found.more["loss"].damaged == (name,)
    assert found.headline.startswith(f"{name.removesuffix('.weight')} is damaged: no honest Q4_K_M; of KL")
    assert f"bad.gguf's {name}: " in found.proof[0]
    assert found.more["loss"].restored.measured.value < 0.3 * found.more["loss"].weighed.value


def test_another_metadata_is_not_laid_to_the_types(tmp_path):
    other = with_restored(tmp_path / "other.gguf", (), changed={"llama.rope.freq_base": 500.0})
    found = compare(other)
    assert found.verdict == "wrong"
    assert "llama.rope.freq_base" in found.headline
    assert not found.more["loss"].damaged


def test_decode_steps_are_run_as_such_by_both_and_traces_are_kept(tmp_path):
    found = verbs.compare(GOOD, Run("Once upon a", n_predict=3), str(SMALL), save=tmp_path / "kept")
    assert found.verdict == "match"
    assert found.more["loss"].positions == len(found.tokens)
    assert {path.name for path in (tmp_path / "kept").iterdir()} >= {"baseline.safetensors", "candidate.safetensors"}


def test_a_trace_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "candidate.safetensors").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"candidate\.safetensors: is there already; give another directory"):
        verbs.compare(GOOD, Run("Once"), str(SMALL), save=tmp_path)
    assert (tmp_path / "candidate.safetensors").read_bytes() == b"mine"


def test_a_few_positions_name_no_tensor():
    found = verbs.compare(GOOD, Run(tokens=TOKENS[:6]), str(SMALL))
    assert "which tensors it is cannot be told from 6 positions" in found.headline
    assert found.more["loss"].restored is None


@pytest.mark.parametrize(("more", "said"), [(-100, True), (100, False)])
def test_files_in_the_wrong_order_are_said_first(more, said):
    kl = Estimate(0.001, 0.0001)
    loss = Loss("F16", kl, 12, (), kl, contributions=(Contribution("output.weight", "F16", "Q6_K", more, 0.0),))
    swapped = "the second file has more bits than the first: give the better file first; "
    assert sentence(loss, True).startswith(swapped) == said


def test_a_loss_that_few_positions_show_is_not_called_larger():
    said = [
        sentence(Loss("Q4_K_M", Estimate(0.0068, error), 12, (), Estimate(0.0068), honest=Estimate(0.003, 0.001)), True)
        for error in (0.0042, 0.0004)
    ]
    assert "costs KL 0.0068 +- 0.0042, 2.3 times what quantizing the good file to it costs, within the error" in said[0]
    assert "2.3 times what quantizing the good file to it costs; each tensor" in said[1]


def test_the_better_file_is_to_be_given_first():
    found = verbs.compare(SMALL, Run("Once upon a time"), str(GOOD))
    assert found.headline.startswith("the second file has more bits than the first: give the better file first; ")


def test_the_same_file_costs_nothing(tmp_path):
    shutil.copy(GOOD, tmp_path / "same.gguf")
    found = compare(tmp_path / "same.gguf")
    assert (found.verdict, found.more["loss"].kl.value) == ("match", 0.0)
    assert "costs nothing here" in found.headline


def test_an_architecture_that_has_no_reference_engine_is_judged_by_its_graph(tmp_path):
    good, small = (write_model(tmp_path / f"{kind}.gguf", "xverse", kind) for kind in ("F16", "Q8_0"))
    found = verbs.compare(good, Run(tokens=(1, 5, 7, 9, 11, 3)), str(small))
    assert found.headline.startswith("Q8_0 costs KL")
    assert found.verdict in ("match", "noise")


def test_the_type_of_a_file_is_known_and_what_is_published_of_it():
    assert file_type(ModelFile(SMALL)) == "Q4_K_M"
    assert published("Q4_K_M") == (0.012686, 0.031273)
    assert published("F16") is None


@pytest.mark.parametrize(("stated", "kind"), [(38, "MXFP4_MOE"), (15, "Q4_K_M"), (999, "F16"), (None, "F16")])
def test_a_type_is_called_as_the_file_calls_it(tmp_path, stated, kind):
    fields = {} if stated is None else {"general.file_type": stated}
    path = write_gguf(tmp_path / "m.gguf", fields, {"output.weight": np.ones((2, 2), np.float16)})
    assert file_type(ModelFile(path)) == kind


def test_an_encoder_has_vectors_and_no_next_tokens(tmp_path):
    bert.write_model(tmp_path / "good.gguf")
    fields, tensors = read_gguf(tmp_path / "good.gguf")
    q8 = gguf.GGMLQuantizationType.Q8_0
    small = {
        name: (gguf.quants.quantize(values.astype(np.float32), q8), q8)
        for name, (values, _) in tensors.items() if "ffn" in name and values.ndim == 2
    }  # fmt: skip
    other = write_gguf(tmp_path / "small.gguf", fields, tensors | small, "bert")
    found = verbs.compare(tmp_path / "good.gguf", Run(tokens=(1, 5, 7)), str(other))
    assert found.verdict in ("match", "noise")
    assert re.match(
        r"F16 moves the vectors \(result_embd\) by an NMSE of \S+; bert is an encoder: there", found.headline
    )
    assert "loss" not in found.more
    with pytest.raises(UserError, match=r"bert is an encoder, without next tokens; leave out --text, --spend"):
        verbs.compare(tmp_path / "good.gguf", Run(tokens=(1, 5)), str(other), How(costing=Costing(spend=1000)))


def test_files_whose_taps_have_other_shapes_are_said_by_their_keys(tmp_path):
    good, bad = (
        write_model(tmp_path / f"{n}.gguf", "qwen3moe", experts=4, qk_norm=True, extra={"expert_used_count": n})
        for n in (2, 1)
    )
    with pytest.raises(UserError, match=r"1\.gguf: qwen3moe\.expert_used_count: is 1, in 2\.gguf 2; convert the wrong"):
        verbs.compare(good, Run(tokens=(1, 5, 7)), str(bad))


def test_choosing_spends_where_a_byte_recovers_most(honest):
    good = ModelFile(GOOD)
    everything = sum(one.more for one in honest.more["loss"].contributions if one.value > 0)
    _, more, gain = choose(good, honest.more["loss"].contributions, everything)
    assert more <= everything
    assert gain == pytest.approx(sum(one.value for one in honest.more["loss"].contributions if one.value > 0))
    assert choose(good, honest.more["loss"].contributions, 1) == ({}, 0, 0.0)


def test_a_mean_of_few_has_no_error():
    assert math.isnan(mean_of(np.ones(3)).error)


# -- reports and bad input --------------------------------------------------------------------------------------------


def test_every_format_has_it(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    files = [f"{form}:{tmp_path / form[0]}" for form in ("json", "markdown", "html")]
    words = [word for file in files for word in ("-o", file)]
    found = command("loss", GOOD, SMALL, PROMPT, "--text", path, "--spend", "64K", *words)
    assert found.returncode == 0, found.stderr
    assert "Q4_K_M costs KL" in found.stdout
    assert "Mean PPL(Q)" in found.stdout
    assert json.loads((tmp_path / "j").read_text("utf-8"))["loss"]["kind"] == "Q4_K_M"
    for name in "mh":
        assert "Tensors that cost most" in (tmp_path / name).read_text("utf-8")


def test_a_text_brings_its_prompt(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(f" @{TEXT}", encoding="utf-8")
    found = command("loss", GOOD, SMALL, "--text", path, "-o", "json:-")
    assert found.returncode == 0, found.stderr
    assert (
        "".join(token["text"] for token in json.loads(found.stdout)["tokens"][1:]).split()[:2] == f"@{TEXT}".split()[:2]
    )


def refusal(*arguments: object) -> str:
    found = command(*arguments)
    assert found.returncode == 2, found.stdout + found.stderr
    assert found.stderr.count("\n") == 1
    return str(found.stderr)


def test_bad_input_is_a_line(tmp_path):
    text, binary, empty = (tmp_path / name for name in ("text", "binary", "empty"))
    text.write_text("words", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    empty.write_text("", encoding="utf-8")
    small = ("loss", GOOD, SMALL, PROMPT)
    assert "is not text" in refusal(*small, "--text", binary)
    assert "is empty" in refusal(*small, "--text", empty)
    assert "no such file" in refusal(*small, "--text", tmp_path / "none").lower()
    assert "expected bytes such as" in refusal(*small, "--spend", "much")
    assert "gguf file" in refusal("loss", GOOD, text, PROMPT, "--text", text).lower()
    assert "no such file" in refusal("compare", GOOD, PROMPT, "--candidate", tmp_path / "none.gguf")


def test_another_vocabulary_is_a_line(tmp_path):
    tokens = gguf.GGUFReader(SMALL).fields["tokenizer.ggml.tokens"].contents()
    tokens[300] = "otherwise"
    said = refusal("compare", GOOD, PROMPT, "--candidate", with_restored(
        tmp_path / "other.gguf", (), {"tokenizer.ggml.tokens": tokens}))  # fmt: skip
    assert "its vocabulary (704 tokens) is not that of tiny.F16.gguf" in said


OTHERS = {  # what another file has -> what is said, of it after the good one, and before it
    "layers": ({"layers": 3}, "give two files of one model", "give two files of one model"),
    "an architecture": ({"arch": "qwen2", "bias": True}, "give two files of one model", "give two files of one model"),
    "shapes": ({"kv_heads": 4}, "give two files of one model", "give two files of one model"),
    "a tensor less": ({"drop": ("ffn_up",)}, r"other\.gguf: blk\.0\.ffn_up\.weight is missing; give two",
                      r"good\.gguf: blk\.0\.ffn_up\.weight is missing in other\.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_different_models_are_a_line(name, tmp_path):
    options, second, first = OTHERS[name]
    good = write_model(tmp_path / "good.gguf")
    other = write_model(tmp_path / "other.gguf", **options)
    with pytest.raises(UserError, match=second):
        verbs.compare(good, Run(tokens=(1, 2, 3)), str(other))
    with pytest.raises(UserError, match=first):
        verbs.compare(other, Run(tokens=(1, 2, 3)), str(good))


def test_check_does_not_take_a_model_for_an_engine():
    with pytest.raises(UserError, match="is a model file"):
        open_candidate(str(SMALL))
