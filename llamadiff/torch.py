"""What a PyTorch model computes, recorded: ``llamadiff.torch.record(model, ids)``."""

from llamadiff.candidates.torch_modules import record

__all__ = ["record"]
