"""What besides tensors decides an output, in a checkpoint and a file: how experts are chosen, how vectors are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from llamadiff.engines.model_file import ModelFile
from llamadiff.result.oddity import Oddity
from llamadiff.system.errors import UserError
from llamadiff.trace.stated import brief, read_json

MAX_MODULES = 1 << 20  # bytes of modules.json, and of a module's config.json
MOST = 64  # modules
# Names of one thing in config.json (llama.cpp, conversion/base.py).
ROUTERS = (
    "score_function", "scoring_func", "score_func", "moe_router_activation", "moe_router_activation_func",
    "expert_selection_fn",
)  # fmt: skip
GATES = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen", 4: "sqrtsoftplus"}
SIGMOID, SOFTMAX = "sigmoid", "softmax"
# What llama.cpp's models take where a file does not say it (src/models/*.cpp); those that refuse it are left out.
GATE_OF: Mapping[str, str] = {
    "deepseek2": SOFTMAX, "deepseek2ocr": SOFTMAX, "step35": SIGMOID, "glm4moe": SIGMOID, "cohere2moe": SIGMOID,
    "afmoe": SIGMOID, "laguna": SIGMOID, "hy-v3": SIGMOID, "glm-dsa": SIGMOID, "glm5-next": SIGMOID,
    "llama": SOFTMAX, "qwen2moe": SOFTMAX, "qwen3moe": SOFTMAX,
}  # fmt: skip
READ_ROUTING = {*GATE_OF} - {"llama", "qwen2moe", "qwen3moe"} | {"dots1", "bailingmoe", "bailingmoe2", "exaone-moe"}
POOLINGS = {0: "none", 1: "mean", 2: "first token", 3: "last token", 4: "rank"}
MODES = {"mean": 1, "mean_tokens": 1, "cls": 2, "cls_token": 2, "lasttoken": 3}  # of sentence_transformers


def routing_oddities(model: ModelFile, config: Mapping[str, Any]) -> Iterator[Oddity]:
    """Where experts are chosen and weighed otherwise than config.json says."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    arch = model.architecture
    key, found = f"{arch}.expert_gating_func", model.hyper_parameter("expert_gating_func")
    name = next((name for name in ROUTERS if config.get(name) in GATES.values()), None)
    is_read = arch in READ_ROUTING  # the others have one function each, whatever a file says
    assumed = GATE_OF.get(arch, "") if found is None or not is_read else GATES.get(found, brief(found))
    if name is not None and assumed and assumed != config[name]:
        here = f"is {assumed}" if found is not None else f"is not in the file: llama.cpp takes {assumed}"
        yield Oddity(key, f"{here}; config.json has {name} = {config[name]}", "gating")
    for key, name, default in (
        ("expert_weights_norm", "norm_topk_prob", False), ("expert_weights_scale", "routed_scaling_factor", 1.0),
    ):  # fmt: skip
        wanted, value = config.get(name), model.hyper_parameter(key)
        if arch not in READ_ROUTING or not isinstance(wanted, (bool, int, float)):
            continue
        taken = default if value is None or (value == 0 and default) else value
        if abs(float(taken) - float(wanted)) > 1e-6 * abs(float(wanted)):
            here = f"is {brief(value)}" if value is not None else f"is not in the file: llama.cpp takes {default}"
            yield Oddity(f"{arch}.{key}", f"{here}; config.json has {name} = {brief(wanted)}", "routing")


def module_oddities(model: ModelFile, folder: Path) -> Iterator[Oddity]:
    """Where a vector is made of the last layer's output otherwise than modules.json says (sentence_transformers)."""
    dense = 0
    for kind, path in _modules(folder):
        if kind == "Pooling":
            yield from _pooling(model, path)
        elif kind == "Dense":
            dense += 1
            if f"dense_{dense + 1}.weight" not in model.weights:
                says = f"is missing: {path.name} of the checkpoint multiplies the pooled vector by a matrix"
                yield Oddity(f"dense_{dense + 1}.weight", says, "dense-module")


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """The kind and the directory of each module, in order; none where there is no modules.json."""
    path = folder / "modules.json"
    if not path.is_file():
        return
    found = read_json(path, MAX_MODULES, "sentence_transformers' list of modules")
    for each in found[:MOST] if isinstance(found, list) else ():
        kind, inside = (each.get(key) for key in ("type", "path")) if isinstance(each, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(inside, str):
            raise UserError(f"{path}: expected a list of modules, each with a type and a path; download it anew")
        parts = PurePosixPath(inside).parts
        if not {"..", "/"} & {*parts}:
            yield kind.rpartition(".")[2], folder.joinpath(*parts)


def _pooling(model: ModelFile, folder: Path) -> Iterator[Oddity]:
    path = folder / "config.json"
    config = read_json(path, MAX_MODULES, "a Pooling module's config.json") if path.is_file() else {}
    config = config if isinstance(config, dict) else {}
    said = [mode for mode in MODES if config.get(f"pooling_mode_{mode}") or config.get("pooling_mode") == mode]
    found = model.hyper_parameter("pooling_type")
    if len(said) != 1 or found == MODES[said[0]]:
        return
    here = "is not in the file: llama.cpp pools nothing"
    if found is not None:
        here = f"is {POOLINGS.get(found, brief(found))}"
    says = f"{here}; {folder.name}/config.json has {POOLINGS[MODES[said[0]]]}"
    yield Oddity(f"{model.architecture}.pooling_type", says, "pooling")
