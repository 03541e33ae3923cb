"""The command llamadiff, and python -m llamadiff: ready for Ctrl-C before anything is imported."""

import os
import signal
import sys

OTHER = (
    "--llama-cpp",
    "--runner",
    "--help",
    "-h",
)  # with which llama-cpp-python's process is not what a comparison needs

RUNNER = "LLAMADIFF_RUNNER"  # a variable that has the words of --runner


def main() -> None:
    """The entry point: a user's mistake is one line on standard error and exit code 2."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it is listened to: no traceback of Python's
    from llamadiff.cli.complaint import complain
    from llamadiff.system import exits

    sys.exit(exits.run(_command, complain))


def _command() -> object:
    """Run the command, and llama.cpp's process beside the import of what judges."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # threads of NumPy's that have nothing to do sleep, not spin
    if sys.argv[1:2] == ["compare"] and not (RUNNER in os.environ or any(word.startswith(OTHER) for word in sys.argv)):
        from llamadiff.llamacpp import child

        child.begin()
    from llamadiff.cli.commands import app

    return app(sys.argv[1:] or ["--help"], standalone_mode=False)


if __name__ == "__main__":
    main()
