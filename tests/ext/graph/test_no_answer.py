"""What llama.cpp is asked and does not answer is never assumed: nothing is WRONG that hangs on it, and why is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lacking import DEAF, OPENER

from llamadiff.engines.run_spec import Run
from llamadiff.ext.graph.backend import judge_graph
from llamadiff.llamacpp import child, interface, layout, tensors
from llamadiff.llamacpp.request import Settings
from llamadiff.system.errors import UserError
from llamadiff.verbs.verbs import compare

ALL = sorted({*interface.FUNCTIONS, *layout.FUNCTIONS, *tensors._FUNCTIONS, *tensors._GRAPH_FUNCTIONS})
OTHERS = (  # what not every version has
    "ggml_get_type_traits_cpu", "ggml_type_name", "ggml_validate_row_data", "ggml_version", "ggml_commit",
    "llama_model_n_swa", "ggml_get_type_traits", "ggml_backend_reg_by_name",
)  # fmt: skip
NOTHING = (  # what answers with nothing
    "ggml_op_desc", "ggml_op_name", "ggml_type_name", "ggml_type_size", "ggml_blck_size", "llama_print_system_info",
    "ggml_backend_dev_count", "ggml_backend_dev_name", "ggml_backend_dev_type", "ggml_version",
    "ggml_get_type_traits_cpu", "ggml_backend_reg_get_proc_address", "llama_model_n_swa", "llama_get_memory",
    "ggml_tensor_overhead",
)  # fmt: skip


@pytest.fixture
def run_without(monkeypatch):
    """run_without(words, model): the verdicts of ``backend`` and ``compare``, each with its reasons; or the refusal."""
    monkeypatch.setattr(child, "_opener", lambda llama_cpp: OPENER)

    def run(words: str, model: Path) -> list[tuple[str, str]]:
        asked = Run(tokens=(1, 5, 9), settings=Settings(llama_cpp=words))
        try:
            found = [judge_graph(model, asked), compare(model, asked)]
        except UserError as error:
            return [("refused", str(error))]
        return [(each.verdict, each.headline + " ".join(each.proof)) for each in found]

    return run


def check(found: list[tuple[str, str]], name: str) -> None:
    for verdict, said in found:
        assert verdict in ("match", "unchecked", "refused"), said
        assert "\n" not in said
        assert "fault in" not in said
        assert re.search(rf"{name}\b|no name for|not known|not found|blocks of", said) or verdict == "match", said


@pytest.mark.parametrize("name", [*ALL, *(name for name in OTHERS if name not in ALL)])
def test_a_function_that_is_not_there_makes_nothing_wrong(name, run_without, small_model):
    check(run_without(name, small_model("llama", "Q8_0")), name)


@pytest.mark.parametrize("name", NOTHING)
def test_a_function_that_says_nothing_makes_nothing_wrong(name, run_without, small_model):
    check(run_without(f"-{name}", small_model("llama", "Q8_0")), name)


@pytest.mark.parametrize(("words", "said"), [
    ("type_k=1", "type_k=f32: this llama.cpp does not apply it, and keeps K in f16; give type_k=f16"),
    ("type_v=1", "type_v=f32: this llama.cpp does not apply it, and keeps V in f16; give type_v=f16"),
    ("flash_attn=1", "flash_attn=off: this llama.cpp does not apply it; give flash_attn=on"),
])  # fmt: skip
def test_a_setting_that_is_not_applied_is_seen_in_the_graph(words, said, small_model, monkeypatch):
    """Taps would be judged by it; nodes are as they are."""
    monkeypatch.setattr(child, "_opener", lambda llama_cpp: DEAF)
    asked = Run(tokens=(1, 5, 9), settings=Settings(llama_cpp=words))
    with pytest.raises(UserError, match=re.escape(said)):
        compare(small_model(), asked)
    assert judge_graph(small_model(), asked).verdict == "match"
