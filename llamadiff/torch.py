"""What a PyTorch model computes, recorded: ``llamadiff.torch.record(model, ids)``."""

from llamadiff.ext.pytorch.modules import record

__all__ = ["record"]
