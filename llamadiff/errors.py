"""What a user did wrong, in one line: what, where, the value, and the next step."""


class UserError(Exception):
    """Ends a command with exit code 2 and its one line; never shown as a traceback."""


class UnrunnableError(UserError):
    """llama.cpp is not there, cannot load the file, or dies of it."""
