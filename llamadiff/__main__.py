"""The command llamadiff, and python -m llamadiff: ready for Ctrl-C before anything is imported."""

import os
import signal


def main() -> None:
    """While the rest is imported there is nothing to clean up: Ctrl-C ends the process, without Python's traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # threads of NumPy's that have nothing to do sleep, not spin
    from llamadiff.cli.commands import main as run

    run()


if __name__ == "__main__":
    main()
