"""Mistakes in shaders of ggml-vulkan, each where nodes run as one kernel alone: a build of it is copied with one.

A shader is known by what it reads and calls, and is changed in its binary form: one opcode, or one operand.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ext.fused.spirv import (
    ACCESS_CHAIN,
    EXP,
    F_ADD,
    F_DIV,
    F_MUL,
    F_SUB,
    I_ADD,
    I_SUB,
    INVERSE_SQRT,
    SQRT,
    STORE,
    SUBGROUP_ARITHMETIC,
    SUBGROUP_SHUFFLE,
    U_DIV,
    Instruction,
    Module,
    modules,
)  # fmt: skip

LIBRARY = "lib/libggml-vulkan.so"
Change = tuple[Instruction, int, int]  # of an instruction the word, which gets another value; word 0: its opcode


def opcodes(found: list[Instruction], code: int) -> list[Change]:
    return [(each, 0, code) for each in found]


def is_norm(module: Module) -> bool:
    """rms_norm.comp and rms_norm_partials.comp, whose first buffers are rows, weights and what comes out."""
    return INVERSE_SQRT in module.functions and {0, 1, 2} <= {*module.bindings.values()} and 1 in module.constants


def is_product(module: Module) -> bool:
    """mul_mat_vec*.comp: of one token, with biases in the buffers 3 and 4."""
    buffers = {*module.bindings.values()}
    return buffers == {0, 1, 2, 3, 4} and all(module.of_buffer(F_ADD, binding) for binding in (3, 4))


def is_product_of_experts(module: Module) -> bool:
    """mul_mat_vec*.comp with experts: a bias or a factor in the buffer 3."""
    buffers = {*module.bindings.values()}
    return buffers == {0, 1, 2, 3, 4, 5} and all(module.of_buffer(code, 3) for code in (F_ADD, F_MUL))


def is_choice(module: Module) -> bool:
    """topk_moe.comp: the choice of experts."""
    return {SUBGROUP_ARITHMETIC, SUBGROUP_SHUFFLE} <= module.capabilities and {EXP, SQRT} <= module.functions


def weight_added(module: Module) -> list[Change]:
    """x + w for x * w, in RMS norms with a weight."""
    plain = is_norm(module) and 3 not in module.bindings.values()
    return opcodes(module.of_buffer(F_MUL, 1), F_ADD) if plain else []


def weight_added_behind_an_addition(module: Module) -> list[Change]:
    """x + w for x * w, in rms_norm_partials.comp, which goes on with sums of an addition before."""
    is_partial = is_norm(module) and module.constants == {0, 1} and SUBGROUP_ARITHMETIC in module.capabilities
    return opcodes(module.of_buffer(F_MUL, 1), F_ADD) if is_partial else []


def squares_missing(module: Module) -> list[Change]:
    """An addition sums x + x in the place of x^2, for the norm that comes next."""
    is_addition = SUBGROUP_ARITHMETIC in module.capabilities and {*module.bindings.values()} == {0, 1, 2, 3}
    squares = [each for each in module.of(F_MUL) if each.words[2] == each.words[3]]
    return opcodes(squares, F_ADD) if is_addition and module.of_buffer(F_ADD, 1) else []


def residual_subtracted(module: Module) -> list[Change]:
    """What is added behind a norm is subtracted."""
    return opcodes(module.of_buffer(F_ADD, 3), F_SUB) if is_norm(module) and 2 in module.constants else []


def first_bias_subtracted(module: Module) -> list[Change]:
    """A product's bias is subtracted."""
    return opcodes(module.of_buffer(F_ADD, 3), F_SUB) if is_product(module) else []


def second_bias_subtracted(module: Module) -> list[Change]:
    """What is added to a product with its bias is subtracted."""
    return opcodes(module.of_buffer(F_ADD, 4), F_SUB) if is_product(module) else []


def expert_bias_subtracted(module: Module) -> list[Change]:
    """The bias of an expert's product is subtracted."""
    return opcodes(module.of_buffer(F_ADD, 3), F_SUB) if is_product_of_experts(module) else []


def expert_weight_added(module: Module) -> list[Change]:
    """An expert's weight is added to its product."""
    return opcodes(module.of_buffer(F_MUL, 3), F_ADD) if is_product_of_experts(module) else []


def weights_not_normalised(module: Module) -> list[Change]:
    """The chosen experts' weights are divided by the reciprocal of their sum."""
    return opcodes(module.of(F_MUL)[1:2], F_DIV) if is_choice(module) else []


def first_experts_chosen(module: Module) -> list[Change]:
    """The chosen experts' numbers are divided by those that run at once: their weights are right."""
    if not is_choice(module):
        return []
    (store,) = (each for each in module.of(STORE) if module.binding(each.words[0]) == 3)
    return [(store, 2, each.words[1]) for each in module.of(U_DIV) if each.words[2] == store.words[1]][-1:]


def convolution_bias_subtracted(module: Module) -> list[Change]:
    """The bias of a short convolution, ssm_conv.comp, is subtracted."""
    is_convolution = module.functions == {EXP} and module.constants == {0, 1, 2, 3}
    return opcodes(module.of_buffer(F_ADD, 2), F_SUB) if is_convolution else []


def bias_of_another_row(module: Module) -> list[Change]:
    """A product's bias is read as many rows before the first one as it is behind it."""
    if not is_product(module):
        return []
    places = {each.words[-1] for each in module.of(ACCESS_CHAIN) if module.bindings.get(each.words[2]) == 3}
    return opcodes(module.made_by(I_ADD, places), I_SUB)


def silu_of_another_sign(module: Module) -> list[Change]:
    """x / (1 - exp(-x)) behind a short convolution."""
    if module.functions != {EXP} or module.constants != {0, 1, 2, 3}:
        return []
    powers = module.results(EXP)
    return opcodes([each for each in module.of(F_ADD) if powers & {*each.words[2:]}], F_SUB)


@dataclass(frozen=True)
class Mistake:
    """``changes`` of a module, and which nodes are wrong by them, of which model."""

    changes: Callable[[Module], list[Change]]
    model: str
    tokens: str
    tap: str
    nodes: str


LONG, ONE = "1,17,5,40", "7"
CHOICE = "SOFT_MAX + RESHAPE + ARGSORT + VIEW + GET_ROWS + RESHAPE + SUM_ROWS + CLAMP + DIV + RESHAPE"
MISTAKES = (
    Mistake(weight_added, "llama", LONG, "attn_norm-0", "RMS_NORM + MUL"),
    Mistake(weight_added_behind_an_addition, "llama", ONE, "ffn_norm-1", "ADD + RMS_NORM + MUL"),
    Mistake(squares_missing, "llama", ONE, "norm-1#2", "ADD + RMS_NORM"),
    Mistake(residual_subtracted, "olmo2", LONG, "ffn_inp-0", "RMS_NORM + MUL + ADD"),
    Mistake(first_bias_subtracted, "qwen2", ONE, "Qcur_proj-0", "MUL_MAT + ADD"),
    Mistake(second_bias_subtracted, "gpt2", ONE, "ffn_inp-0", "MUL_MAT + ADD + ADD"),
    Mistake(expert_bias_subtracted, "gpt-oss", ONE, "ffn_moe_gate-0", "MUL_MAT_ID + ADD_ID"),
    Mistake(expert_weight_added, "moe", ONE, "ffn_moe_weighted-0", "MUL_MAT_ID + MUL"),
    Mistake(weights_not_normalised, "moe", LONG, "ffn_moe_weights_norm-0", CHOICE),
    Mistake(first_experts_chosen, "moe", LONG, "ffn_moe_argsort-0", CHOICE),
    Mistake(convolution_bias_subtracted, "mamba2", LONG, "node_77", "SSM_CONV + ADD + SILU"),
    Mistake(bias_of_another_row, "qwen2", ONE, "Qcur_proj-0", "MUL_MAT + ADD"),
    Mistake(silu_of_another_sign, "mamba2", LONG, "node_77", "SSM_CONV + ADD + SILU"),
)


def write_wrong_build(build: Path, folder: Path, changes: Callable[[Module], list[Change]]) -> int:
    """Copy a build with its shaders changed. Returns how many modules were."""
    library, count = bytearray((build / LIBRARY).read_bytes()), 0
    for module in modules(bytes(library)):
        changed = changes(module)
        count += bool(changed)
        for instruction, word, value in changed:
            form = "<H" if word == 0 else "<I"
            struct.pack_into(form, library, module.at + instruction.at + 4 * word, value)
    for path in build.iterdir():
        if path.name in ("include", "lib"):
            shutil.copytree(path, folder / path.name, copy_function=_linked)
    (folder / LIBRARY).unlink()
    (folder / LIBRARY).write_bytes(library)
    return count


def _linked(source: str, target: str) -> None:
    Path(target).symlink_to(source)
