"""One measurement, as its own process: transformers on the same file. ``transformers_once.py MODEL 1,2,3``."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main() -> None:
    """Load the file as float32, run it with a hook on every module."""
    path, tokens = Path(sys.argv[1]), [int(token) for token in sys.argv[2].split(",")]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started = time.perf_counter()
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32
    ).eval()
    loaded = time.perf_counter()
    kept: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda *seen: kept.append(seen[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    times = {"load_s": loaded - started, "run_s": time.perf_counter() - loaded}
    print(json.dumps({**times, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


if __name__ == "__main__":
    main()
