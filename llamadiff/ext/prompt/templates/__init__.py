"""A model's chat template, rendered as transformers does, against what an engine makes of the same conversations."""
