"""Where things are: the repository, its tests, the report's schema."""

from __future__ import annotations

import json
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
REPORT_SCHEMA = json.loads((TESTS / "report" / "report.schema.json").read_text("utf-8"))
