"""The one error of the engine."""


class ModelError(ValueError):
    """A model file that cannot be run: one line that says what, where and which value."""
