"""driver OUT TOKENS VALUES LAST [NAME:2x3]...: writes taps with values from a file of f32; LAST: end or abort."""

import math
import os
import sys
from array import array
from pathlib import Path

from trace_writer import TraceWriter


def numbers(text):
    return [int(word) for word in text.replace("x", ",").split(",") if word]


def run(out, tokens, values, last, *taps):
    rest = array("f", Path(values).read_bytes())
    trace = TraceWriter(out, numbers(tokens))
    for tap in taps:
        name, _, dims = tap.rpartition(":")
        shape = numbers(dims)
        count = abs(math.prod(shape))
        trace.add(name, rest[:count], shape)
        rest = rest[count:]
    if last == "abort":
        os.abort()
    trace.end()


try:
    run(*sys.argv[1:])
except (OSError, ValueError, TypeError) as error:
    sys.exit(str(error))
