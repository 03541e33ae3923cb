"""A line for each unlisted mistake: where it was found, what was read back, how long it took.

python tests/proof/unlisted/report.py [words of a name]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference"), str(ROOT)]

from proof.unlisted.bugs import UNLISTED  # noqa: E402
from proof.unlisted.more import MORE  # noqa: E402
from proof.unlisted.runs import judged  # noqa: E402
from proof.unlisted.said import says  # noqa: E402


def main() -> None:
    """Every mistake whose name holds the words."""
    wanted, right, lies = " ".join(sys.argv[1:]), 0, 0
    chosen = [mistake for name, mistake in (UNLISTED | MORE).items() if wanted in name]
    with tempfile.TemporaryDirectory() as scratch:
        for mistake in chosen:
            started = time.perf_counter()
            found = judged(mistake, Path(scratch))
            said = says(mistake.parameter, mistake.value, found.sentences)
            right += said and found.tap == mistake.tap
            marks = f"{'' if found.tap == mistake.tap else f'AT {found.tap} '}{'said' if said else 'NOT SAID'}"
            named = f" KNOWN {', '.join(found.causes)};" if found.causes else ""
            seconds, false = time.perf_counter() - started, found.false
            lies += len(false)
            marks += f" FALSE: {'; '.join(false)};" if false else ""
            print(f"{marks:9}{named} {mistake.name}: {'; '.join(found.sentences)} ({seconds:.1f} s)", flush=True)
    print(f"{right} of {len(chosen)} at their taps, with their parameter; {lies} false statements")


if __name__ == "__main__":
    main()
