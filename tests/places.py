"""Where things are: the repository, its tests, the rooms of the package, the report's schema."""

from __future__ import annotations

import json
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REPORT_SCHEMA = json.loads((TESTS / "report" / "report.schema.json").read_text("utf-8"))

# The rooms of the package. Imports point down this list only; docs/ARCHITECTURE.md says what each is for.
ROOMS = (
    "pytest_plugin", "torch", "cli", "report", "sweep", "port", "comparison", "loss", "weights", "manner", "diagnose",
    "judge", "candidates", "writers", "preflight", "engines", "llamacpp", "ggml", "trace", "blocks", "numerics",
    "compiled", "shipped", "system",
)  # fmt: skip
