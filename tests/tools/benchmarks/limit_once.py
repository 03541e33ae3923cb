"""One measurement, as its own process: the least that a float32 engine can take. ``limit_once.py MODEL 1,2,3``.

The file is read once, and float32 matrices of its shapes are multiplied once by as many columns as there are tokens:
blocks that stay in the cache, two or more threads, and nothing dequantized, rounded, compared or kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
from threadpoolctl import threadpool_limits

BLOCK = 1 << 19  # weights


def read(path: Path) -> float:
    """Seconds to read a file."""
    started = time.perf_counter()
    buffer = bytearray(1 << 24)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - started


def multiply(shapes: list[tuple[int, int]], columns: int) -> float:
    """Seconds to multiply matrices [out, in] by as many columns."""
    activations = {n_in: np.ones((n_in, columns), np.float32) for n_in in {n_in for _, n_in in shapes}}
    blocks = [(min(BLOCK // n_in, n_out - start), n_in)
              for n_out, n_in in shapes for start in range(0, n_out, BLOCK // n_in)]  # fmt: skip
    weights = np.ones(BLOCK, np.float32)

    def one(block: tuple[int, int]) -> None:
        rows, n_in = block
        np.matmul(weights[: rows * n_in].reshape(rows, n_in), activations[n_in])

    with threadpool_limits(1, "blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        started = time.perf_counter()
        list(pool.map(one, blocks))
        return time.perf_counter() - started


def main() -> None:
    """Read, multiply."""
    path, tokens = Path(sys.argv[1]), sys.argv[2].split(",")
    tensors = gguf.GGUFReader(path).tensors
    shapes = [(int(t.shape[1]), int(t.shape[0])) for t in tensors if len(t.shape) == 2]
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    used = [shape for shape, t in zip(shapes, (t for t in tensors if len(t.shape) == 2), strict=True)
            if tied or t.name != "token_embd.weight"]  # fmt: skip
    weights = sum(n_out * n_in for n_out, n_in in used)
    print(json.dumps({"read_s": read(path), "matmul_s": multiply(used, len(tokens)), "weights": weights}))


if __name__ == "__main__":
    main()
