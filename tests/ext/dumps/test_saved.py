"""Dumps of ranks and steps in the layouts that engines write: a right run is right, a mistake is said with its rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ext.dumps import parallel_engine as engine
from ext.dumps.parallel_engine import TOKENS, Dump, ParallelEngine, tensors
from llamaref import Engine
from optional import needs
from safetensors.numpy import save_file

from llamadiff import UserError
from llamadiff.candidates.reference import record
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How, Run
from llamadiff.ext.dumps.labels import read_label
from llamadiff.ext.dumps.ranks import WHOLE, Plan, Ranks
from llamadiff.numerics.halves import round_bf16
from llamadiff.result.comparison import Comparison
from llamadiff.trace.reader import Trace
from llamadiff.trace.taps import BY_WORD, Tap
from llamadiff.verbs import verbs

NORM = Tap(BY_WORD["attn_norm"], 0)
Write = Callable[[Dump, Path], Path]
STEPS = (4, 2, 1)


def put(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)


def as_torch(value: object, path: Path) -> None:
    """With torch itself; arrays become tensors."""
    import torch

    def made(x: object) -> object:
        if isinstance(x, dict):
            return {key: made(each) for key, each in x.items()}
        if isinstance(x, list):
            return [made(each) for each in x]
        return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x

    put(path, lambda place: torch.save(made(value), place))


def a_tensor_a_file(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        as_torch(values, folder / f"step{step}" / f"rank{rank}" / f"{name}.pt")
    return folder


def sglang_passes(dump: Dump, folder: Path) -> Path:
    """--debug-tensor-dump-output-folder, under our names."""
    for step, taps in enumerate(dump):
        for rank in range(len(taps["embd"])):
            values = {f"model.{name}" if name == "model" else name: each[rank] for name, each in taps.items()}
            start = sum(len(each["embd"][0]) for each in dump[:step])
            ids = np.array(TOKENS[start : start + len(values["embd"])])
            values["model.forward_batch_info.input_ids"] = ids
            values["model.forward_batch_info.positions"] = np.arange(start, start + len(ids))
            as_torch(values, folder / f"TP{rank}_PP0_Rank{rank}_pid{100 + rank}" / f"Pass{step:05d}.pt")
    return folder


def sglang_dumper(dump: Dump, folder: Path) -> Path:
    """The file names of its dumper; the values have their key."""
    for number, (step, rank, name, values) in enumerate(tensors(dump)):
        file = f"forward_pass_id={step + 1}___rank={rank}___name={name}___dump_index={number}.pt"
        as_torch({"value": values, "meta": {"dims": "t h"}}, folder / "sglang_dump_17" / file)
    return folder


def vllm_modules(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        as_torch(values, folder / "4a36-4c19" / f"step_{step}" / name / f"outputs_cuda_{rank}.pt")
    return folder


def tensorrt_arrays(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        put(
            folder / "PP_0" / f"TP_{rank}" / f"iteration_{step}" / f"{name}.npy",
            lambda path, x=values: np.save(path, x),
        )
    return folder


def a_rank_a_safetensors(dump: Dump, folder: Path) -> Path:
    for step, taps in enumerate(dump):
        for rank in range(len(taps["embd"])):
            values = {name: np.ascontiguousarray(each[rank]) for name, each in taps.items()}
            put(folder / f"step_{step}_rank_{rank}.safetensors", lambda path, x=values: save_file(x, path))
    return folder


def one_file(dump: Dump, folder: Path) -> Path:
    """All in dicts of a file, steps a list."""
    steps = [{f"rank{r}": {name: each[r] for name, each in taps.items()} for r in range(len(taps["embd"]))}
             for taps in dump]  # fmt: skip
    as_torch({f"step_{number}": step for number, step in enumerate(steps)}, folder / "all.pt")
    return folder / "all.pt"


WITH_TORCH = (a_tensor_a_file, sglang_passes, sglang_dumper, vllm_modules, one_file)
WITHOUT = (tensorrt_arrays, a_rank_a_safetensors)
LAYOUTS = [*(pytest.param(each, marks=needs("torch"), id=each.__name__) for each in WITH_TORCH),
           *(pytest.param(each, id=each.__name__) for each in WITHOUT)]  # fmt: skip


def judged(dump: Path, model: Path, captured: Trace) -> Comparison:
    return verbs.check(captured, model, How(), str(dump))


def said(result: Comparison) -> str:
    return "; ".join((result.headline, *result.proof))


@pytest.mark.parametrize("write", LAYOUTS)
def test_a_right_run_is_right_in_each_layout(write: Write, small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    dump = ParallelEngine(path, 2).run(batches=STEPS)
    result = verbs.compare(path, Run(tokens=TOKENS), str(write(dump, tmp_path)))
    assert result.verdict == "match"
    assert not result.missing
    assert "read as 2 ranks" in said(result)
    assert "3 steps of 4, 2, 1 tokens" in said(result)


@pytest.mark.parametrize(("arch", "ranks"), [("llama", 1), ("qwen2", 2), ("llama-biased", 2), ("llama", 4)])
def test_any_number_of_ranks_is_put_together(arch: str, ranks: int, small_model, captured, tmp_path) -> None:
    """Four ranks have K and V of two heads, two ranks one and the same."""
    path = small_model(arch)
    result = judged(tensorrt_arrays(ParallelEngine(path, ranks).run(), tmp_path), path, captured(arch, tokens=TOKENS))
    assert result.verdict == "match"
    assert not result.missing
    assert ("ranks" in said(result)) == (ranks > 1)


MISTAKES = {
    engine.BIAS_EVERYWHERE: ("attn_out-1", "each of the 2 ranks adds it before the sum over ranks"),
    engine.SWAPPED_HEADS: ("Qcur_proj-1", "heads of 64 channels 2 and 3 are swapped; all of it in the part of rank 1"),
    engine.OTHER_SHARD: ("ffn_out-1", "all of it in what rank 1 adds to the sum over ranks"),
    engine.OTHER_ROPE: ("Qcur_rope-1", "all of it in the part of rank 1"),
    engine.NO_ALL_REDUCE: ("ffn_inp-1", "ffn_inp-1: rank 1 and rank 0 must have the same, and are off by an NMSE"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_ranks_is_said_at_its_place(mistake: str, small_model, captured, tmp_path) -> None:
    path = small_model("llama-biased")
    dump = tensorrt_arrays(ParallelEngine(path, 2, mistake).run(), tmp_path)
    result = judged(dump, path, captured("llama-biased", tokens=TOKENS))
    tap, words = MISTAKES[mistake]
    assert result.verdict == "wrong"
    assert result.first_divergence is not None
    assert result.first_divergence.tap == tap
    assert words in said(result)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (engine.NO_ALL_REDUCE, "each adds its own part of attn_out-1; the all-reduce (the sum over ranks) is missing"),
        (engine.ONE_ALL_REDUCE, "there it is the part of attn_out-1 that is added, and on rank 0 the sum over ranks"),
        (engine.OTHER_NORM, "attn_norm-1: rank 1 and rank 0 must have the same, and are off by an NMSE of 1.0e-04; "
                            "rank 0 is the nearest to llama.cpp's"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_wrong_where_they_must_not(mistake, words, small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    result = judged(tensorrt_arrays(ParallelEngine(path, 2, mistake).run(), tmp_path), path, captured(tokens=TOKENS))
    assert result.verdict == "wrong"
    assert result.headline.startswith("before any layer, ranks: ")
    assert words in result.headline
    wrong = [row.tap for row in result.wrong]
    assert wrong == (["ffn_inp-1"] if mistake == engine.NO_ALL_REDUCE else [])  # what comes after is not accused


def test_a_mistake_of_all_ranks_is_no_ranks(small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    dump = tensorrt_arrays(ParallelEngine(path, 2, engine.ALL_ROPE).run(), tmp_path)
    result = judged(dump, path, captured(tokens=TOKENS))
    assert result.headline.startswith("RoPE, layer 1: uses base 500000, where 10000 is right")
    assert "rank" not in result.headline


def split_by_axes(values: np.ndarray, tap: Tap, rng: np.random.Generator) -> list[np.ndarray]:
    """What two ranks have of a tap of any architecture: parts of heads and of the FFN, parts of sums, the same."""
    parted = ("head", "kv_head", "ff", "ff_exp", "ff_shexp", "vocab")
    axes = [n for n, axis in enumerate(tap.kind.axes) if {*axis.split("*")} & {*parted} and values.shape[n] % 2 == 0]
    if axes:
        return np.split(values, 2, axes[0])
    if tap.kind.op in ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS") and tap.kind.axes[-1] == "embd":
        part = values.std() * rng.standard_normal(values.shape).astype(np.float32)
        part[rng.random(len(values)) < 0.3] = 0  # as of a vocabulary in parts
        return [part, values - part]
    return [values, values]


@pytest.mark.parametrize("arch", ["moe", "qwen3", "gemma3", "phi3", "deepseek2", "mamba2"])
def test_ranks_of_each_architecture_are_put_together(arch: str, small_model, captured, tmp_path) -> None:
    path, rng = small_model(arch), np.random.default_rng(0)
    trace, model = record(Engine(path), TOKENS, "mine"), Model(path)
    for tap in model.taps:
        for rank, own in enumerate(split_by_axes(np.asarray(trace[tap.name]), tap, rng) if tap.name in trace else ()):
            put(tmp_path / f"rank{rank}" / f"{tap.name}.npy", lambda path, x=own: np.save(path, x))
    result = judged(tmp_path, path, captured(arch, tokens=TOKENS))
    assert result.verdict == "match"
    assert not result.missing
    assert "summed" in said(result)


@pytest.mark.parametrize("off", [0, 1, 3])
def test_of_many_ranks_the_one_that_differs_is_named_without_llama_cpp(off: int) -> None:
    right, ranks = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32), Ranks()
    ranks.put_together(Plan(WHOLE), {n: right * (1.01 if n == off else 1) for n in range(4)}, NORM, "attn_norm-0")
    assert ranks.fault.startswith(f"attn_norm-0: rank {off} and rank {0 if off else 1} must have the same, and are off")


def test_what_differs_by_the_last_digits_of_its_type_is_the_same() -> None:
    right, ranks = round_bf16(np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)), Ranks()
    bits = right.view(np.uint32).copy()
    bits[:, ::3] += 0x10000  # the next in bfloat16
    ranks.put_together(Plan(WHOLE), {0: right, 1: bits.view(np.float32)}, NORM, "attn_norm-0")
    assert not ranks.fault
    ranks.put_together(Plan(WHOLE), {0: right, 1: right * np.float32(1.02)}, NORM, "attn_norm-0")
    assert ranks.fault


@pytest.mark.parametrize(
    ("path", "name", "step", "rank"),
    [
        ("TP0_PP1_Rank2_pid77/Pass00003/model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", (3,), 0),
        ("d/forward_pass_id=4___rank=1___name=h___dump_index=9___layer_id=2", "h.2", (4,), 1),
        ("9f-1/step_2/model.norm/outputs_0_cuda_1", "9f-1/model.norm/outputs_0", (2,), 1),
        ("PP_0/TP_1/iteration_5/logits", "logits", (5,), 1),
        ("prefill/embd", "embd", (0, 0), None),
        ("decode/3/embd.rank1", "embd", (1, 3), 1),
        ("l_out-3_tp1of2_step7", "l_out-3", (7,), 1),
        ("Qcur_rope-11", "Qcur_rope-11", (), None),
        ("model.layers.12.self_attn.o_proj", "model.layers.12.self_attn.o_proj", (), None),
        ("blk.1.stepper.3/franker2", "blk.1.stepper.3/franker2", (), None),
    ],
)
def test_a_name_says_its_step_and_rank(path: str, name: str, step: tuple[int, ...], rank: int | None) -> None:
    label = read_label(path)
    assert (label.name, label.step, label.rank) == (name, step, rank)


def test_a_mistake_in_decode_steps_is_said_of_its_rank(small_model, tmp_path) -> None:
    path = small_model("llama")
    dump = tensorrt_arrays(ParallelEngine(path, 2, engine.STALE_CACHE).run(batches=(5, 1, 1)), tmp_path)
    result = verbs.compare(path, Run(tokens=TOKENS), str(dump))
    assert result.first_divergence is not None
    assert result.first_divergence.tap == "kqv_out-1"
    assert "all of it in the part of rank 1" in said(result)
    assert "the prefill is right, the first decode step is wrong" in said(result)


@needs("torch")
def test_ids_in_the_dump_need_no_prompt(small_model, tmp_path) -> None:
    path = small_model("llama")
    sglang_passes(ParallelEngine(path, 2).run(batches=(5, 1, 1)), tmp_path)
    result = verbs.compare(path, None, str(tmp_path))
    assert result.verdict == "match"
    assert [token for token, _ in result.tokens] == list(TOKENS)
    assert result.n_prefill == 5


def test_the_steps_of_the_prompt_are_chosen(small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    tensorrt_arrays(ParallelEngine(path, 2).run(batches=(4, 2, 1)), tmp_path)
    result = verbs.compare(path, Run(tokens=TOKENS[:6]), str(tmp_path))
    assert result.verdict == "match"
    assert "2 steps of 4, 2 tokens (1 more was not read)" in said(result)
    with pytest.raises(UserError, match="its steps are of 4, 2, 1 tokens, and 5 tokens from 1 on were to be run"):
        verbs.compare(path, Run(tokens=TOKENS[:5]), str(tmp_path))


def test_two_files_of_one_place_are_refused(small_model, captured, tmp_path) -> None:
    for name in ("a", "b"):
        save_file({"embd": np.zeros((7, 256), np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        UserError, match="a/embd and b/embd are one tensor's; say in the names of folders or files which"
    ):
        judged(tmp_path, small_model("llama"), captured(tokens=TOKENS))


def as_sglang_has_it(dump: Dump, folder: Path, warm_up: bool = True) -> Path:
    """Its modules under its names, fused products, residuals beside norms, sums added up, logits in the next file."""
    late: list[dict[str, object]] = [{} for _ in dump[0]["embd"]]
    start = -3 if warm_up else 0  # a warm-up of other tokens is served before
    number = 0
    for taps in ([_cut(dump[0], 3)] if warm_up else []) + dump:
        rows = len(taps["embd"][0])
        for rank in range(len(late)):
            values = {**late[rank], "model.embed_tokens": taps["embd"][rank]}
            ids = TOKENS[start : start + rows] if start >= 0 else (7, 7, 7)
            values["model.forward_batch_info.input_ids"] = np.array(ids)
            values["model.forward_batch_info.positions"] = np.arange(max(start, 0), max(start, 0) + rows)
            for layer in range(2):
                values |= _layer(taps, layer, rank, f"model.layers.{layer}.")
            values["model.norm"] = [taps["result_norm"][rank], taps["l_out-1"][rank]]
            as_torch(values, folder / f"TP{rank}_PP0_Rank{rank}_pid{100 + rank}" / f"Pass{number:05d}.pt")
            logits = np.concatenate(taps["result_output"], axis=-1)[-1:]
            late[rank] = {"model": taps["result_norm"][rank], "lm_head": logits, "logits_processor": logits}
        number, start = number + 1, max(start, -rows) + rows
    return folder


def _cut(taps: dict[str, list[np.ndarray]], rows: int) -> dict[str, list[np.ndarray]]:
    return {name: [each[:rows] for each in ranks] for name, ranks in taps.items()}


def _layer(taps: dict[str, list[np.ndarray]], layer: int, rank: int, name: str) -> dict[str, object]:
    def of(word: str, at: int = layer) -> np.ndarray:
        return taps[f"{word}-{at}"][rank]

    before = [of("l_out", layer - 1)] if layer else []
    qkv = np.concatenate([of("Qcur_proj"), of("Kcur_proj"), of("Vcur_proj")], axis=-1)
    return {
        f"{name}input_layernorm": [of("attn_norm"), *before] if before else of("attn_norm"),
        f"{name}self_attn.qkv_proj": qkv,
        f"{name}self_attn.rotary_emb": [of("Qcur_rope"), of("Kcur_rope")],
        f"{name}self_attn.attn": of("kqv_out"),
        f"{name}self_attn.o_proj": np.sum(taps[f"attn_out-{layer}"], axis=0),
        f"{name}post_attention_layernorm": [of("ffn_norm"), of("ffn_inp")],
        f"{name}mlp.gate_up_proj": np.concatenate([of("ffn_gate"), of("ffn_up")], axis=-1),
        f"{name}mlp.act_fn": of("ffn_swiglu"),
        f"{name}mlp.down_proj": np.sum(taps[f"ffn_out-{layer}"], axis=0),
    }


@needs("torch")
@pytest.mark.parametrize("mistake", ["", engine.OTHER_ROPE, engine.SWAPPED_HEADS, engine.STALE_CACHE])
def test_what_sglang_writes_is_read_by_the_map_of_hugging_face(mistake: str, small_model, tmp_path) -> None:
    """RoPE has no name there: what is wrong with it shows in the next that has one."""
    path = small_model("qwen2")
    as_sglang_has_it(ParallelEngine(path, 2, mistake).run(batches=(5, 1, 1)), tmp_path)
    result = verbs.compare(path, None, str(tmp_path), How(name_map="hf", partial=True))
    assert [token for token, _ in result.tokens] == list(TOKENS)
    judged = {row.tap for row in result.rows}
    assert {f"{word}-1" for word in ("Qcur_proj", "Vcur_proj", "kqv_out", "ffn_inp", "ffn_gate", "ffn_up", "ffn_swiglu",
                                     "ffn_out")} | {"l_out-0", "result_norm", "result_output"} <= judged  # fmt: skip
    if mistake:
        assert result.first_divergence is not None
        wrong = "Qcur_proj-1" if mistake == engine.SWAPPED_HEADS else "kqv_out-1"
        assert result.first_divergence.tap == wrong
        assert "all of it in the part of rank 1" in said(result)
    else:
        assert result.verdict == "match"


# -- layouts that came after ------------------------------------------------------------------------------------------


def phases(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        place = folder / ("prefill" if step == 0 else f"decode_{step - 1}") / f"rank{rank}"
        put(place / f"{name}.npy", lambda path, x=values: np.save(path, x))
    return folder


def flat_names(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        put(folder / f"{name}_tp{rank}_step{step}.npy", lambda path, x=values: np.save(path, x))
    return folder


def ranks_from_one(dump: Dump, folder: Path) -> Path:
    """A folder of its own for each process, which says nothing."""
    for step, rank, name, values in tensors(dump):
        place = folder / f"host{'ab'[rank]}" / f"step-{step}" / f"rank_{rank + 1}_of_2" / f"{name}.npy"
        put(place, lambda path, x=values: np.save(path, x))
    return folder


def lists_of_steps(dump: Dump, folder: Path) -> Path:
    for rank in range(2):
        as_torch([{name: each[rank] for name, each in taps.items()} for taps in dump], folder / f"rank{rank}.pt")
    return folder


def some_tokens_a_rank(dump: Dump, folder: Path) -> Path:
    """Sequence-parallel between the products, where tokens are as many as ranks or more."""
    for step, rank, name, values in tensors(dump):
        is_split = len(values) % 2 == 0 and ("norm" in name or "l_out" in name)
        own = np.split(values, 2)[rank] if is_split else values
        put(folder / f"step{step}" / f"rank{rank}" / f"{name}.npy", lambda path, x=own: np.save(path, x))
    return folder


def a_padded_vocabulary(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        own = values
        if name == "result_output":
            own = np.split(np.pad(np.concatenate(dump[step][name], -1), ((0, 0), (0, 32))), 2, -1)[rank]
        put(folder / f"step{step}" / f"rank{rank}" / f"{name}.npy", lambda path, x=own: np.save(path, x))
    return folder


def rows_of_logits(dump: Dump, folder: Path) -> Path:
    """Each row a file, which says whose it is."""
    for step, rank, name, values in tensors(dump):
        place = folder / f"step{step}" / f"rank{rank}"
        for row, own in enumerate(values) if name == "result_output" else ((None, values),):
            put(place / (name if row is None else f"{name}@{row}"), lambda path, x=own: np.save(f"{path}.npy", x))
    return folder


def last_logits_alone(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        own = values[-1:] if name == "result_output" else values
        put(folder / f"step{step}" / f"rank{rank}" / f"{name}.npy", lambda path, x=own: np.save(path, x))
    return folder


def replicas_of_one(dump: Dump, folder: Path) -> Path:
    for step, rank, name, values in tensors(dump):
        if rank == 0 or not any(word in name for word in ("norm", "l_out", "ffn_inp", "embd")):
            put(folder / f"step{step}" / f"rank{rank}" / f"{name}.npy", lambda path, x=values: np.save(path, x))
    return folder


LATER = (
    phases,
    rows_of_logits,
    flat_names,
    ranks_from_one,
    some_tokens_a_rank,
    a_padded_vocabulary,
    last_logits_alone,
    replicas_of_one,
)


@pytest.mark.parametrize(
    "write", [*LATER, pytest.param(lists_of_steps, marks=needs("torch"))], ids=lambda write: write.__name__
)
def test_a_right_run_is_right_in_later_layouts(write: Write, small_model, tmp_path) -> None:
    path = small_model("llama")
    dump = ParallelEngine(path, 2).run(batches=STEPS)
    result = verbs.compare(path, Run(tokens=TOKENS), str(write(dump, tmp_path)))
    assert result.verdict == "match"
    assert not result.missing
    assert len(result.rows) == len(dump[0])


@pytest.mark.parametrize("mistake", ["", engine.OTHER_SHARD])
def test_a_sum_of_parts_in_16_bits_is_no_finer_than_they_are(mistake: str, small_model, tmp_path) -> None:
    path = small_model("llama")
    for step, rank, name, values in tensors(ParallelEngine(path, 2, mistake).run(batches=STEPS)):
        bits = (np.ascontiguousarray(values, np.float32)[None].view(np.uint32) + 0x8000 >> 16).astype("<u2")
        put(tmp_path / f"step{step}" / f"rank{rank}" / f"{name}.bf16", bits.tofile)
        (tmp_path / f"step{step}" / f"rank{rank}" / f"{name}.json").write_text(f'{{"shape": {list(bits.shape)}}}')
    result = verbs.compare(path, Run(tokens=TOKENS), str(tmp_path))
    assert result.verdict == ("wrong" if mistake else "noise")
    assert {row.tap for row in result.wrong} == ({"ffn_out-1"} if mistake else set())


def test_values_without_a_shape_have_the_tokens_rows(small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    for _, rank, name, values in tensors(ParallelEngine(path, 2).run()):
        if not name.startswith("kq") or name.startswith("kqv"):
            put(tmp_path / f"rank{rank}" / f"{name}.f32", np.ascontiguousarray(values, "<f4").tofile)
    result = judged(tmp_path, path, captured(tokens=TOKENS))
    assert result.verdict == "match"
    assert {name.partition("-")[0] for name in result.missing} == {"kq", "kq_soft_max"}


def test_a_map_says_how_the_parts_of_heads_lie(small_model, captured, tmp_path) -> None:
    """One head of K a rank, heads before tokens."""
    path = small_model("llama")
    for _, rank, name, values in tensors(ParallelEngine(path, 2).run()):
        own = values.swapaxes(0, 1) if "rope" in name else values
        put(tmp_path / f"rank{rank}" / f"{name}.npy", lambda place, x=own: np.save(place, x))
    mapping = tmp_path.with_suffix(".toml")
    mapping.write_text('[Qcur_rope]\naxes = "head token dim"\n[Kcur_rope]\naxes = "kv_head token dim"\n')
    result = verbs.check(captured(tokens=TOKENS), path, How(name_map=str(mapping)), str(tmp_path))
    assert result.verdict == "match"
    assert "Qcur_rope" in said(result)


@pytest.mark.parametrize("mistake", ["", engine.SWAPPED_HEADS, engine.OTHER_SHARD])
def test_names_that_nobody_knows_are_found_with_their_ranks(mistake: str, small_model, captured, tmp_path) -> None:
    """An FFN of twice the model's width: a rank's part of it is as wide as a part of a sum."""
    path = small_model("llama")
    dump = ParallelEngine(path, 2, mistake).run()
    words = {name.rpartition("-")[0] for name in dump[0]} | {*dump[0]}
    called = {word: f"t{chr(97 + n % 26)}{chr(97 + n // 26)}" for n, word in enumerate(sorted(words))}
    for _, rank, name, values in tensors(dump):
        word, _, layer = name.rpartition("-")
        own = f"net.{layer}.{called[word]}" if word else called[name]
        put(tmp_path / f"rank{rank}" / f"{own}.npy", lambda path, x=values: np.save(path, x))
    result = verbs.check(captured(tokens=TOKENS), path, How(name_map="auto"), str(tmp_path))
    assert not result.missing
    assert (result.verdict == "wrong") == bool(mistake)
    wrong = {"": [], engine.SWAPPED_HEADS: ["Qcur_proj-1"], engine.OTHER_SHARD: ["ffn_out-1"]}
    assert [row.tap for row in result.wrong] == wrong[mistake]


@pytest.mark.parametrize("mistake", ["", engine.OTHER_NORM])
def test_ranks_that_differ_are_seen_under_any_name(mistake: str, small_model, captured, tmp_path) -> None:
    """Of four ranks: no tap is four times as wide as the model."""
    path = small_model("llama")
    dump = ParallelEngine(path, 4, mistake).run()
    for _, rank, name, values in tensors([{name: dump[0][name] for name in ("attn_norm-0", "attn_norm-1")}]):
        put(tmp_path / f"rank{rank}" / f"normed.{name[-1]}.npy", lambda path, x=values: np.save(path, x))
    result = verbs.check(captured(tokens=TOKENS), path, How(name_map="auto", partial=True), str(tmp_path))
    assert {"attn_norm-0", "attn_norm-1"} <= {row.tap for row in result.rows}
    if mistake:
        assert result.verdict == "wrong"
        assert "before any layer, ranks: normed.1: rank 1 and rank 0 must have the same" in result.headline
    else:
        assert result.verdict == "match"


def test_a_rank_alone_is_told_that_others_lack(small_model, captured, tmp_path) -> None:
    path = small_model("llama")
    for _, rank, name, values in tensors(ParallelEngine(path, 2).run()):
        if rank == 0:
            put(tmp_path / f"rank{rank}" / f"{name}.npy", lambda path, x=values: np.save(path, x))
    with pytest.raises(UserError, match="Qcur_proj-0: rank 0 has 128 of its 256 values of a token, and no other rank"):
        judged(tmp_path, path, captured(tokens=TOKENS))
