"""What a user did wrong, in one line: what, where, the value, and the next step."""


class UserError(Exception):
    """Ends a command with exit code 2 and its one line; never shown as a traceback."""


class NoRoomError(UserError):
    """A disk is full. ``needs`` says what there should be room for."""

    def __init__(self, message: str, needs: str = "") -> None:
        super().__init__(message)
        self.needs = needs


class UnrunnableError(UserError):
    """llama.cpp is not there, cannot load the file, or dies of it."""


class DiedError(UnrunnableError):
    """llama.cpp died of a fault of its own, or hangs."""
