"""llamaref: an independent NumPy inference engine with named taps.

It uses numpy, gguf and regex and shares no code with llama.cpp or llamadiff: two implementations that
share code share bugs. ``Engine`` runs a GGUF file; ``tap(name, x) -> x`` is called at every named
point of the forward pass and the engine goes on with what comes back.
"""

from llamaref.config import Config
from llamaref.engine import Cache, Engine, Tap
from llamaref.errors import ModelError
from llamaref.models import ARCHITECTURES
from llamaref.weights import Weights

__all__ = ["ARCHITECTURES", "Cache", "Config", "Engine", "ModelError", "Tap", "Weights"]
