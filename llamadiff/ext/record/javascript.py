"""A program in JavaScript under node, whose files are rewritten as they are loaded: they log the arrays that change."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from llamadiff.ext.record.log import SPANS, LogWriter

AGENT = Path(__file__).with_name("javascript_agent.cjs")
OPTIONS = "NODE_OPTIONS"


def main(folder: str, most: str, *program: str) -> None:
    """Run a program, keep ``most`` bytes of its arrays in ``folder``."""
    place = Path(folder)
    log = LogWriter(place)  # its files, to which the agent appends
    options = os.environ.get(OPTIONS)
    asked = {"folder": folder, "most": int(most), "options": options}
    agent = f"--require {json.dumps(str(AGENT))} {options or ''}".rstrip()
    environment = {**os.environ, OPTIONS: agent, "LLAMADIFF_RECORD": json.dumps(asked)}
    done = subprocess.run([*program], env=environment, check=False)  # noqa: S603
    refused = place / "refused"
    stops = np.fromfile(place / "spans", SPANS)["stop"]
    log.stops = int(stops[-1]) + 1 if len(stops) else 0
    log.close(done.returncode, refused.read_text("utf-8") if refused.exists() else "")
