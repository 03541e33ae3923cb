"""Where things are: the repository, its tests, the rooms of the package, the report's schema."""

from __future__ import annotations

import json
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REPORT_SCHEMA = json.loads((TESTS / "report" / "report.schema.json").read_text("utf-8"))

# The rooms of the package. Imports point down this list only; docs/ARCHITECTURE.md says what each is for.
ROOMS = (
    "cli", "extras", "report", "verbs", "words", "result", "weights", "diagnose", "judge", "candidates", "engines",
    "llamacpp", "ggml", "trace", "numerics", "system",
)  # fmt: skip
