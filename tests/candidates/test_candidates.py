"""Every form a candidate can come in ends in the same judgement: each injected bug, the same tap named."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from faulty import BUGS
from llamaref import Engine
from proof.injected.base import Injection
from proof.injected.runs import record_faulty
from safetensors.numpy import save_file
from waiting import HANG

from llamadiff import UserError
from llamadiff.candidates.command import tail_of
from llamadiff.candidates.map_file import load_map
from llamadiff.candidates.opening import resolve
from llamadiff.candidates.reference import record
from llamadiff.candidates.source import Context
from llamadiff.engines.reference_model import Model
from llamadiff.engines.run_spec import How
from llamadiff.numerics.halves import round_bf16
from llamadiff.trace.metadata import KEY
from llamadiff.trace.taps import parse
from llamadiff.verbs.verbs import diff

TOKENS = (1, 17, 5, 80, 42, 9, 33)


def as_trace(trace, folder):
    metadata = {KEY: json.dumps({"schema": "llamadiff.trace/1", "tokens": TOKENS})}
    save_file({name: np.ascontiguousarray(trace[name]) for name in trace}, folder / "t.safetensors", metadata)
    return folder / "t.safetensors"


def as_npy(trace, folder):
    for name in trace:
        np.save(folder / f"{name}.npy", trace[name])
    return folder


def as_npz(trace, folder):
    np.savez(folder / "t.npz", **{name: trace[name] for name in trace})
    return folder / "t.npz"


def as_f32(trace, folder):
    for name in trace:
        trace[name].astype("<f4").tofile(folder / f"{name}.f32")
    (folder / "tokens").write_text(" ".join(map(str, TOKENS)), encoding="utf-8")
    return folder


def as_f16(trace, folder):
    for name in trace:
        trace[name].astype("<f2").tofile(folder / f"{name}.f16")
        (folder / f"{name}.json").write_text(json.dumps({"shape": trace[name].shape}), encoding="utf-8")
    return folder


def as_bf16(trace, folder):
    for name in trace:
        bits = round_bf16(trace[name].astype(np.float32)).view(np.uint32) >> 16
        bits.astype("<u2").tofile(folder / f"{name}.bf16")
    return folder


def as_text(trace, folder):
    for name in trace:
        lines = (f"[{i}] = {value:.9g}" for i, value in enumerate(trace[name].ravel()))
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def as_command(trace, folder):
    as_npz(trace, folder)
    script = (
        "import sys, shutil\nassert sys.argv[2] == '1,17,5,80,42,9,33'\nshutil.copy(sys.argv[1], sys.argv[3] + '.npz')"
    )
    (folder / "engine.py").write_text(script, encoding="utf-8")
    return f"cmd: {shlex.quote(sys.executable)} {folder}/engine.py {folder}/t.npz {{tokens}} {{out}}"


FORMS = (as_trace, as_npy, as_npz, as_f32, as_f16, as_bf16, as_text, as_command)


def judged(spec, path, baseline, mapping="llama.cpp", timeout=HANG, partial=False):
    context = Context(Model(path), TOKENS, len(TOKENS), load_map(mapping), timeout)
    return diff(baseline, resolve(str(spec), context), path, how=How(partial=partial))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_is_named_through_each_form(bug: Injection, form, small_model, captured, tmp_path):
    path = small_model(bug.models[0])
    result = judged(form(record_faulty(bug, path, TOKENS), tmp_path), path, captured(bug.models[0]))
    words = {parse(row.tap).kind.word for row in result.wrong}
    falsified = set(bug.words) & {parse(row.tap).kind.word for row in result.rows}
    assert parse(result.first_divergence.tap).kind.word == bug.words[0]
    if form in (as_f16, as_bf16):  # a wrong epsilon shows only where rows are small: elsewhere 16 bits hide it
        assert words <= falsified
    else:
        assert words == falsified


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "moe"])
def test_a_right_engine_passes_in_each_form(arch, form, small_model, captured, tmp_path):
    path = small_model(arch)
    result = judged(form(record(Engine(path), TOKENS, "mine"), tmp_path), path, captured(arch))
    assert result.verdict in ("match", "noise")
    assert not result.missing


def as_hf(trace, folder):
    """Under Hugging Face's names, with a batch axis, Q and K in halves."""
    model, arrays = "model.layers.{i}.", {}
    names = {"Qcur_proj": "self_attn.q_proj", "Kcur_proj": "self_attn.k_proj", "Vcur_proj": "self_attn.v_proj",
             "attn_norm": "input_layernorm", "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_out": "mlp.down_proj"}  # fmt: skip
    for name in trace:
        tap = parse(name)
        if tap.kind.word in names:
            values = trace[name]
            if tap.kind.word in ("Qcur_proj", "Kcur_proj"):
                values = values.reshape(len(TOKENS), -1, 32, 2).swapaxes(-1, -2).reshape(values.shape)
            arrays[model.replace("{i}", str(tap.layer)) + names[tap.kind.word]] = np.ascontiguousarray(values)[None]
    np.savez(folder / "hf.npz", **arrays)
    return folder / "hf.npz"


def test_a_map_translates_names_axes_and_permutations(small_model, captured, tmp_path):
    path = small_model()
    result = judged(as_hf(record(Engine(path), TOKENS, "mine"), tmp_path), path, captured("llama"), "hf", partial=True)
    assert result.verdict in ("match", "noise")
    assert {row.tap for row in result.rows} >= {"Qcur_proj-0", "Kcur_proj-1", "ffn_up-1"}
    assert all(row.local.nmse < 1e-9 for row in result.rows if "proj" in row.tap)


def test_treatments_are_undone(small_model, captured, tmp_path):
    path = small_model()
    model, trace = Model(path), record(Engine(path), TOKENS, "mine")
    weight = model.engine.w.vector("blk.0.attn_norm.weight")
    arrays = {
        "norm0": trace["attn_norm-0"] / weight,
        "k0": np.repeat(trace["Kcur_rope-0"], 2, axis=1).transpose(1, 0, 2)[None],
        "s0": trace["kq-0"] / 8,
    }
    np.savez(tmp_path / "t.npz", **arrays)
    (tmp_path / "map.toml").write_text(
        textwrap.dedent("""
        [attn_norm]
        name = "norm{i}"
        done = ["unweighted"]
        [Kcur_rope]
        name = "k{i}"
        axes = "batch head token dim"
        done = ["repeated"]
        [kq]
        name = "s{i}"
        done = ["scaled"]
    """),
        encoding="utf-8",
    )
    result = judged(tmp_path / "t.npz", path, captured("llama"), str(tmp_path / "map.toml"), partial=True)
    assert [row.tap for row in result.rows] == ["attn_norm-0", "Kcur_rope-0", "kq-0"]
    assert result.verdict in ("match", "noise")


def test_copies_that_differ_are_no_copies(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    np.savez(tmp_path / "t.npz", k0=np.tile(trace["Kcur_rope-0"], (1, 2, 1)))
    (tmp_path / "map.toml").write_text('[Kcur_rope]\nname = "k{i}"\ndone = ["repeated"]\n', encoding="utf-8")
    with pytest.raises(UserError, match="copies of a head differ"):
        judged(tmp_path / "t.npz", small_model(), captured("llama"), str(tmp_path / "map.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[Qcur]\nname = "x{i}"', r"\[Qcur\] is no tap; did you mean \[Qcur_"),
        ('[l_out]\nname = "x"', r"no \{i\}"),
        ("[l_out]\nfile = 3", "may have name"),
        ('[kq]\nname = "x{i}"\naxes = "head token dim"', "a kq has the axes head query key"),
        ('[kq]\nname = "x{i}"\ndone = ["fried"]', "'fried': known are"),
        ("l_out =", "not TOML"),
    ],
)
def test_a_map_is_checked(text, message, tmp_path):
    (tmp_path / "map.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_map(str(tmp_path / "map.toml"))


def test_a_shape_that_does_not_fit_proposes_the_line_that_does(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    np.save(tmp_path / "Qcur_rope-0.npy", trace["Qcur_rope-0"].transpose(1, 0, 2))
    with pytest.raises(UserError, match=r'needs \[7, 4, 64\].*axes = "head token dim" would fit'):
        judged(tmp_path, small_model(), captured("llama"))


def test_an_unknown_name_proposes_the_tap_it_looks_like(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    np.save(tmp_path / "layer_0_ffn_gate.npy", trace["ffn_gate-0"])
    with pytest.raises(UserError, match=r'\[ffn_gate\] name = "layer_\{i\}_ffn_gate"'):
        judged(tmp_path, small_model(), captured("llama"))


def test_extra_names_are_kept_and_not_fatal(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    np.save(tmp_path / "l_out-0.npy", trace["l_out-0"])
    np.save(tmp_path / "my_own_tensor.npy", np.zeros(3))
    result = judged(tmp_path, small_model(), captured("llama"))
    assert result.extra == ("my_own_tensor",)
    assert len(result.missing) == 36


def test_the_last_hidden_state_and_some_logits_are_judged(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    (tmp_path / "result_norm@-1.txt").write_text(
        "\n".join(f"{i}: {v:.7g}" for i, v in enumerate(trace["result_norm"][-1])), encoding="utf-8"
    )
    top = np.argsort(-trace["result_output"][-1])[:5]
    (tmp_path / "result_output@-1.txt").write_text(
        "\n".join(f"[{i}] = {trace['result_output'][-1][i]:.6f}" for i in top), encoding="utf-8"
    )
    result = judged(tmp_path, small_model(), captured("llama"))
    assert result.verdict in ("match", "noise")
    assert [row.tap for row in result.rows] == ["result_norm", "result_output"]
    wrong = trace["result_norm"][-1] * 1.3
    (tmp_path / "result_norm@-1.txt").write_text(
        "\n".join(f"{i}: {v:.7g}" for i, v in enumerate(wrong)), encoding="utf-8"
    )
    result = judged(tmp_path, small_model(), captured("llama"))
    assert [row.tap for row in result.wrong] == ["result_norm"]
    assert "what is computed from it (result_output) is right" in result.summary  # the logits are of another state


def test_the_first_values_of_a_tap_are_compared_alone(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    head = trace["attn_norm-0"].ravel()[:10]
    (tmp_path / "attn_norm-0.txt").write_text("\n".join(map(str, head)), encoding="utf-8")
    assert judged(tmp_path, small_model(), captured("llama"), partial=True).verdict in ("match", "noise")
    (tmp_path / "attn_norm-0.txt").write_text("\n".join(map(str, -head)), encoding="utf-8")
    assert judged(tmp_path, small_model(), captured("llama")).verdict == "wrong"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("embd.npy", b"not numpy", "not a plain .npy"),
        ("embd.f32", b"abc", "3 bytes are no whole number of f32"),
        ("embd.f32", b"\0" * 400, "has shape"),
        ("embd.txt", b"0.1\nhello\n", r"embd.txt:2: 'hello' is no value"),
        ("embd.txt", b"[99999999] = 1\n", "index 99999999 is outside"),
        ("embd@99.txt", b"1.0\n", "there are 7 tokens"),
        ("tokens", b"1 two 3", "expected token ids"),
        ("nothing_known.f32", b"\0" * 12, "has a name that is known"),
    ],
)
def test_dumps_are_checked(name, content, message, small_model, captured, tmp_path):
    (tmp_path / name).write_bytes(content)
    if name == "tokens":
        np.save(tmp_path / "embd.npy", np.zeros((7, 256), np.float32))
    with pytest.raises(UserError, match=message):
        judged(tmp_path, small_model(), captured("llama"))


def test_a_tap_without_a_value_is_not_recorded(small_model, captured, tmp_path):
    """A text of no numbers, or of none that are places: it was a MATCH once."""
    np.save(tmp_path / "result_output.npy", captured("llama")["result_output"])
    (tmp_path / "embd.txt").write_text("# nothing yet\n", encoding="utf-8")
    comparison = judged(tmp_path, small_model(), captured("llama"))
    assert [row.tap for row in comparison.rows] == ["result_output"]


def test_pickles_are_refused(small_model, captured, tmp_path):
    np.save(tmp_path / "embd.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="not a plain"):
        judged(tmp_path, small_model(), captured("llama"))


def test_links_out_of_the_dump_are_not_followed(small_model, captured, tmp_path):
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "secret.npy", np.zeros(3))
    (tmp_path / "dump" / "embd.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(UserError, match="leads out of the dump"):
        judged(tmp_path / "dump", small_model(), captured("llama"))


def test_a_dump_of_other_tokens_is_refused(small_model, captured, tmp_path):
    as_f32(record(Engine(small_model()), TOKENS, "mine"), tmp_path)
    (tmp_path / "tokens").write_text("1, 17, 5, 81, 42, 9, 33", encoding="utf-8")
    with pytest.raises(UserError, match=r"from token 3 on it has \[81"):
        judged(tmp_path, small_model(), captured("llama"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cmd: {python} -c 'import sys; print(\"boom\"); sys.exit(3)' {{out}}", "exit code 3; its last words: boom"),
        ("cmd: {python} -c 'import os; os.abort()' {{out}}", "died of SIGABRT"),
        ("cmd: {python} -c 'import os; os.kill(os.getpid(), 15)' {{out}}", r"was killed by signal 15 \(SIGTERM\)"),
        ("cmd: {python} -c 'import os; os.kill(os.getpid(), 40)' {{out}}", "was killed by signal 40"),
        ("cmd: {python} -c 'import signal; signal.pause()' {{out}}", "still running after 1 s"),
        ("cmd: {python} -c 'while True: print(\"x\" * 1000000)' {{out}}", "printed more than"),
        ("cmd: {python} -c pass {{out}}", "wrote nothing"),
        ("cmd: {python} -c pass", "has no {out}"),
        ("cmd: /no/such/program {{out}}", "cannot be run"),
        ("cmd: 'unbalanced", "No closing quotation"),
        ("cmd:", "no command"),
    ],
)
def test_commands_that_fail_say_how(command, message, small_model, captured):
    patience = 1.0 if "still running" in message else HANG
    with pytest.raises(UserError, match=message):
        judged(command.format(python=shlex.quote(sys.executable)), small_model(), captured("llama"), timeout=patience)


def test_the_last_words_of_a_command_are_one_line(tmp_path):
    said = 'Traceback:\n  File "e.py", line 63\n    a, b = c\n    ^^^^^^^^\n\nValueError: 2\n'
    (tmp_path / "log").write_text(said, encoding="utf-8")
    assert tail_of(tmp_path / "log") == '; its last words: Traceback: File "e.py", line 63 a, b = c ValueError: 2'


def test_a_command_gets_the_model_and_leaves_nothing(small_model, captured, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path.parent / "engine.py"
    script.write_text(
        textwrap.dedent("""
        import sys, pathlib, numpy as np
        assert pathlib.Path(sys.argv[1]).read_bytes()[:4] == b"GGUF"
        np.savez(sys.argv[2] + ".npz", embd=np.zeros((7, 256), np.float32))
    """),
        encoding="utf-8",
    )
    result = judged(f"cmd: {shlex.quote(sys.executable)} {script} {{model}} {{out}}", small_model(), captured("llama"))
    assert [row.tap for row in result.wrong] == ["embd"]
    assert not [path for path in Path(tmp_path).iterdir() if path.name.startswith("llamadiff-")]


def test_a_candidate_that_is_nothing(small_model, captured):
    with pytest.raises(UserError, match="no such trace or dump"):
        judged("/no/such/thing", small_model(), captured("llama"))


def test_a_partial_dump_says_ranks_and_what_to_write_next(small_model, captured, tmp_path):
    trace = record(Engine(small_model()), TOKENS, "mine")
    logits = trace["result_output"][-1]
    top = np.argsort(-logits)[:5]
    (tmp_path / "result_output@-1.txt").write_text("\n".join(f"[{i}] = {logits[i]:.6f}" for i in top), encoding="utf-8")
    result = judged(tmp_path, small_model(), captured("llama"))
    assert [token.candidate_rank for token in result.logits.top[:5]] == [1, 2, 3, 4, 5]
    assert np.isnan(result.logits.top[5].candidate)
    assert any("36 taps were not recorded" in step for step in result.next_steps)
    (tmp_path / "result_output@-1.txt").write_text(
        "\n".join(f"[{i}] = {-logits[i]:.6f}" for i in top), encoding="utf-8"
    )
    result = judged(tmp_path, small_model(), captured("llama"))
    assert [row.tap for row in result.wrong] == ["result_output"]
    assert not result.logits.top1_agree
    assert result.next_steps[0] == "write l_out-0 to l_out-1 next: they say which layer is wrong"


def test_what_is_nearer_to_the_engine_is_shown(small_model, captured):
    trace = record_faulty(BUGS[0], small_model(), TOKENS)
    result = diff(captured("llama"), trace, small_model())
    distance = result.rows[-1].distance
    assert distance["candidate"] > 1e-3 > distance["baseline"]
    assert result.arithmetics == {"F16": "F32"}


def test_two_rows_of_one_token_are_judged_apart(small_model, captured, tmp_path):
    """The last token's final norm and its logits: the head is judged on the row that it was given."""
    trace = record_faulty(BUGS[0], small_model(), TOKENS)
    for name in ("result_norm", "result_output"):
        lines = (f"{i}: {v:.9g}" for i, v in enumerate(trace[name][-1]))
        (tmp_path / f"{name}@-1.txt").write_text("\n".join(lines), encoding="utf-8")
    result = judged(tmp_path, small_model(), captured("llama"))
    assert [row.tap for row in result.wrong] == ["result_norm"]
    assert result.rows[1].span == ()
    assert "the other recorded tap is right" in result.summary


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (">f4", "it looks like big-endian float32"),
        ("<f8", "it looks like float64"),
        ("<f2", "half as many values; are they 16 bits wide"),
        ("<i4", "it looks like whole numbers"),
    ],
)
def test_bytes_of_another_type_are_recognised(dtype, message, small_model, captured, tmp_path):
    values = record(Engine(small_model()), TOKENS, "mine")["l_out-0"] * (1000 if dtype == "<i4" else 1)
    values.astype(dtype).tofile(tmp_path / "l_out-0.f32")
    with pytest.raises(UserError, match=message):
        judged(tmp_path, small_model(), captured("llama"))


def test_a_few_values_that_are_not_finite_are_no_other_type(small_model, captured, tmp_path):
    values = record(Engine(small_model()), TOKENS, "mine")["l_out-0"].copy()
    values[2, :5] = np.inf
    values[3] = 0
    values.tofile(tmp_path / "l_out-0.f32")
    assert [row.tap for row in judged(tmp_path, small_model(), captured("llama")).wrong] == ["l_out-0"]
