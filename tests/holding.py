"""Commands that are held in the middle of their work, until they end or are ended."""

from __future__ import annotations

import os
from pathlib import Path

# In llama.cpp's process, when its first pass has been made. What has patience there has no end of it.
HOLD = """
import os, sys, threading
if "llamadiff.llamacpp.child_main" in " ".join(sys.orig_argv):
    from llamadiff.llamacpp.observer import Observer
    from llamadiff.system import python_child
    python_child._DYING = 1e9
    decode = Observer._decode
    def held(*words):
        decode(*words)
        open(os.environ["HELD"], "wb").close()
        threading.Event().wait()
    Observer._decode = held
else:
    from llamadiff.system import stops
    stops.PATIENCE = 1e9
"""


def hold_llama_cpp(folder: Path, mark: Path) -> dict[str, str]:
    """Variables with which a command never ends by itself: its llama.cpp stays in its run, and makes a ``mark`` there.

    ``folder``: where the code for that may lie.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOLD, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]), "HELD": str(mark)}
