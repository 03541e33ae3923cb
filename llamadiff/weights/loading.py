"""Does llama.cpp take the file: it is asked in its own process."""

from __future__ import annotations

from llamadiff.engines.model_file import ModelFile
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UnrunnableError
from llamadiff.system.progress import silent


def refusal(model: ModelFile) -> str | None:
    """What llama.cpp says against the file; None if it loads, or if there is no llama.cpp to ask."""
    path = str(model.path)
    request = Request(path, tuple(map(str, model.weights.files)), errand="load")
    try:
        with Child() as child:
            child.ask(request, silent)
    except UnrunnableError as error:
        said = str(error)
        return said.removeprefix(f"{path}: ") if said.startswith(f"{path}: ") else None
    return None
