"""driver OUT TOKENS VALUES SCRIPT: does what each line of a script says, with values from a file (test_writers.py)."""

import json
import math
import os
import sys
from array import array
from pathlib import Path

from trace_writer import TraceWriter

CODES = {"F64": "d", "F32": "f", "I32": "i", "F16": "H", "BF16": "H"}


def numbers(text):
    return [int(word) for word in text.replace("x", ",").split(",") if word]


n_tokens, n_keys = 2, 2


def lines(trace):
    """Filled in by the test."""
    # LINES


def run(out, tokens, values, script):
    rest = Path(values).read_bytes()
    trace = TraceWriter(out, numbers(tokens))
    for line in Path(script).read_text("utf-8").splitlines():
        match line.split("\t"):
            case ["text", key, value]:
                trace.state(key, value)
            case ["number" | "flag", key, value]:
                trace.state(key, json.loads(value))
            case ["list", key, value]:
                trace.state(key, numbers(value))
            case ["tokens", more]:
                trace.add_tokens(numbers(more))
            case ["lines"]:
                lines(trace)
            case ["abort"]:
                os.abort()
            case ["end"]:
                trace.end()
            case ["add", dtype, dims, name]:
                shape, code = numbers(dims), CODES.get(dtype, "H")
                size = abs(math.prod(shape)) * array(code).itemsize
                own, rest = rest[:size], rest[size:]
                own = array(code, own[: len(own) // array(code).itemsize * array(code).itemsize])
                if dtype in ("F32", "F64"):
                    trace.add(name, own, shape)
                else:
                    trace.add_as(name, dtype, own, shape)


try:
    run(*sys.argv[1:])
except (OSError, ValueError, TypeError) as error:
    sys.exit(str(error))
