"""One measurement as a process of its own: ``compare_once.py MODEL 1,2,3 [CANDIDATE]`` prints the times as JSON."""

from __future__ import annotations

import json
import resource
import sys

import llamadiff


def main() -> None:
    """Compare; the times of its phases, and the peak memory of this process and of llama.cpp's."""
    path, tokens = sys.argv[1], [int(token) for token in sys.argv[2].split(",")]
    candidate = sys.argv[3] if len(sys.argv) > 3 else None
    comparison = llamadiff.compare(path, tokens=tokens, candidate=candidate)
    if (comparison.verdict == "wrong") != (candidate is not None):
        sys.exit(comparison.summary)  # the time of a wrong answer is of no interest
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result = {"verdict": comparison.verdict, "summary": comparison.summary, "peak": peaks[0], "child_peak": peaks[1]}
    print(json.dumps({**comparison.timing, **result}))


if __name__ == "__main__":
    main()
