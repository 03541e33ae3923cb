"""What some tests need that the tool does not: they are skipped, with the reason, where it is not installed."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest


def is_there(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


_MISSING = [package for package in ("torch", "transformers") if not is_there(package)]
needs_torch = pytest.mark.skipif(bool(_MISSING), reason=f"{' and '.join(_MISSING)} not installed: make develop")
needs_github = pytest.mark.skipif(
    not (is_there("cmarkgfm") and is_there("nh3")), reason="cmarkgfm and nh3 not installed: make develop"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not is_there("playwright"),
    reason="no chromium in PATH" if CHROMIUM is None else "playwright not installed: make develop",
)
needs_parquet = pytest.mark.skipif(not is_there("pyarrow"), reason="pyarrow not installed: make develop")
needs_dask = pytest.mark.skipif(
    not (is_there("distributed") and is_there("pyarrow")), reason="distributed or pyarrow not installed: make develop"
)
