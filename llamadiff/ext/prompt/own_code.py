"""A user's own Python function, named as ``file.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamadiff.system.errors import UserError
from llamadiff.trace.stated import reason

OWN = "llamadiff_own_code"  # the module that a user's file becomes


def is_function(spec: str) -> bool:
    """Whether it names one."""
    return spec.rpartition(":")[0].endswith(".py")


def function_of(spec: str) -> Callable[..., Any]:
    """The function. Raises UserError for a file that is not there or fails, and for one that has no such function."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    found = importlib.util.spec_from_file_location(OWN, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[OWN] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:  # a stranger's code may raise anything
        raise UserError(f"{path}: cannot be imported ({type(error).__name__}: {reason(error)})") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path}: has no function {name}")
    return function  # type: ignore[no-any-return]
