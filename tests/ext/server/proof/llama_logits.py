"""What llama.cpp gives for lists of ids: this file, run by ``log_probabilities``, in a process of its own.

One token at a time: where several are computed at once, kernels that a processor may have add or round otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

F32 = 0  # ggml's number


def log_probabilities(path: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Of each prompt [token, vocabulary]: of what comes after each of its tokens. A model in F32 has such a cache."""
    command = [sys.executable, __file__, str(path)]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, check=True, text=True)
    return [np.array(rows, np.float64) for rows in json.loads(done.stdout)]


def answer(path: str, prompts: list[list[int]]) -> list[list[list[float]]]:
    from llama_cpp import Llama, llama_cpp

    settings = llama_cpp.llama_model_default_params()
    llama_cpp.llama_model_default_params = lambda: settings
    settings.use_extra_bufts = False  # memories in whose form (AMX's) F16 is multiplied by what nobody has rounded
    cache = {"type_k": F32, "type_v": F32} if ".F32." in path else {}
    room = max(map(len, prompts))
    model = Llama(path, n_ctx=room, n_batch=1, logits_all=True, flash_attn=False, verbose=False, **cache)
    answers = []
    for ids in prompts:
        model.reset()
        model.eval(ids)
        logits = model.scores[: len(ids)].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        answers.append((logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).tolist())
    return answers


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1], json.load(sys.stdin))))
