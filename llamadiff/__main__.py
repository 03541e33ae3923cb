"""The command llamadiff, and python -m llamadiff: ready for Ctrl-C before anything is imported."""

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext

OTHER = ("--llama-cpp", "--help", "-h")  # with which llama-cpp-python's process is not what a comparison needs


def main() -> None:
    """While the rest is imported there is nothing to clean up: Ctrl-C ends the process, without Python's traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # threads of NumPy's that have nothing to do sleep, not spin
    begun: AbstractContextManager[None] = nullcontext()
    if sys.argv[1:2] == ["compare"] and not any(word.startswith(OTHER) for word in sys.argv):
        from llamadiff.llamacpp import child

        begun = child.begun()
    from llamadiff.cli.commands import main as run

    run(begun)


if __name__ == "__main__":
    main()
