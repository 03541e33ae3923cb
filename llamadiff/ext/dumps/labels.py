"""Which step and which rank a dumped tensor is of, as engines write it into names of folders, files and keys.

TP0_PP0_Rank0_pid77/Pass00001.pt            SGLang's --debug-tensor-dump-output-folder
forward_pass_id=1___rank=0___name=x___dump_index=4.pt        its dumper
step_0/model.layers.0.mlp/outputs_cuda_0.pt                  vLLM's intermediate logging
PP_0/TP_1/iteration_3/logits.npy                             TensorRT-LLM's debug tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Step = tuple[int, ...]

_STEPS = ("forward_pass_id", "forward_pass", "iteration", "iter", "step", "pass", "request", "prefill", "decode")
_RANKS = ("tp_rank", "tp", "mp_rank", "rank", "cuda", "gpu", "device", "worker")  # the first that is there tells
_OTHERS = ("pp_rank", "pp", "pid", "dump_index")
_WORDS = "|".join((*_STEPS, *_RANKS, *_OTHERS))
_OF = "(?:[_-]?of[_-]?[0-9]{1,9})?"  # rank_0_of_2
_NUMBERED = re.compile(rf"(?<![A-Za-z0-9])({_WORDS})[_=:./-]?([0-9]{{1,18}}){_OF}(?![A-Za-z0-9])", re.IGNORECASE)
_PREFILL = re.compile(r"(?<![A-Za-z0-9])(prefill)()(?![A-Za-z0-9])", re.IGNORECASE)
_PHASES = {"prefill": 0, "decode": 1}
_ENDS = re.compile(r"(?<=/)[_.=-]+|[_.=-]+(?=/)|^[_.=/-]+|[_.=/-]+$")
_FIELD = re.compile(r"([A-Za-z_]\w*?)=(.*)")

# What engines call a module's values -> Hugging Face's name. A norm that adds the residual puts out the sum, too.
_ALIASES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(.+)/(?:outputs?)(?:_0)?", r"\1"),
        (r"(.+)/(?:inputs?)(?:_0)?", r"\1 (input)"),
        (r"(.+)[./_](?:outputs_)?0", r"\1"),
        (r"(.+post_attention_layernorm)[./](?:outputs_)?1", r"\1 (input)"),
        (r"(.+self_attn)\.attn(?:/outputs?(?:_0)?)?", r"\1.o_proj (input)"),
        (r"(.+mlp)\.act_fn(?:/outputs?(?:_0)?)?", r"\1.down_proj (input)"),
        (r"logits_processor(?:/outputs?(?:_0)?)?", "lm_head"),
    )
)
_NEXT_INPUT = re.compile(r"(.+layers\.)([0-9]{1,9})\.input_layernorm(?:[./](?:outputs_)?1)")


@dataclass(frozen=True)
class Label:
    """A tensor's name without what it says of its step and rank; ``order``: its number among those of a pass.

    ``words`` are those that said it, in small letters.
    """

    name: str
    step: Step = ()
    rank: int | None = None
    order: int = 0
    words: frozenset[str] = frozenset()


def read_label(path: str) -> Label:
    """What a path and the keys within a file say of a tensor."""
    found = [(each[1].lower(), int(each[2] or 0)) for regex in (_NUMBERED, _PREFILL) for each in regex.finditer(path)]
    numbers = dict(found)
    step = tuple(part for word, n in found if word in _STEPS for part in _as_step(word, n))
    rank = next((numbers[word] for word in _RANKS if word in numbers), None)
    rest = _PREFILL.sub("", _NUMBERED.sub("", path))
    return Label(_name(rest), step, rank, numbers.get("dump_index", 0), frozenset(numbers))


def _as_step(word: str, number: int) -> Step:
    return (_PHASES[word], number) if word in _PHASES else (number,)


def _name(rest: str) -> str:
    """What is left of a path: of ``key=value`` fields the name's, with its layer's number."""
    if "name=" not in rest:
        return _ENDS.sub("", re.sub("/{2,}", "/", _ENDS.sub("", rest)))
    *_, last = rest.split("/name=") if "/name=" in rest else (rest,)
    matches = (_FIELD.search(part) for part in last.split("___"))
    fields: Mapping[str, str] = {match[1]: match[2] for match in matches if match is not None}
    layer = next((value for key, value in fields.items() if "layer" in key and value.isdigit()), "")
    name = fields.get("name", last)
    return f"{name}.{layer}" if layer else name


def names_for(name: str) -> Iterator[str]:
    """What a map may call a tensor: its name, what stands behind folders in it, and both as Hugging Face calls them."""
    parts = name.split("/")
    for start in range(len(parts)):
        own = "/".join(parts[start:])
        yield own
        after = _NEXT_INPUT.fullmatch(own)
        if after and int(after[2]):
            yield f"{after[1]}{int(after[2]) - 1}"
        yield from (match.expand(alias) for regex, alias in _ALIASES if (match := regex.fullmatch(own)))
