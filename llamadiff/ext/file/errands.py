"""What llama.cpp's process is asked of a file: does it load, and how are values of a type quantized."""

from __future__ import annotations

import base64

from llamadiff.llamacpp.blocks import blocks_of
from llamadiff.llamacpp.interface import Library
from llamadiff.llamacpp.request import Request, Say
from llamadiff.llamacpp.session import Quiet, load
from llamadiff.llamacpp.tensor_transport import Feed


def load_only(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Load the model, and let go of it."""
    library.lib.llama_backend_init()
    with Quiet(library):
        load(library, request)


def quantize(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """Rows of float32 as rows of blocks, as ggml's own quantizers make them."""
    values, at = base64.b64decode(request.data), 0
    for number, text in enumerate(request.texts):
        kind, rows, width = text.split()[0], *map(int, text.split()[1:])
        size = 4 * rows * width
        feed.send({"blocks": number}, blocks_of(library, kind, values[at : at + size], width))
        at += size
