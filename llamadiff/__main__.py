"""The command llamadiff, and python -m llamadiff: ready for Ctrl-C before anything is imported."""

import os
import signal
import sys

HELP = {"--help", "-h"}
ELSEWHERE = ("dir=", "runner=", "device=list")  # what makes llama-cpp-python's process not the one that is needed
RUNNER = "LLAMADIFF_RUNNER"  # a variable that has the words of runner=
LLAMA_CPP = "LLAMADIFF_LLAMA_CPP"  # a variable that stands for --llama-cpp


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
    from llamadiff.cli.renamed import in_new_names

    words = in_new_names(sys.argv[1:])
    if words[:1] == ["compare"] and RUNNER not in os.environ and not _elsewhere(words):
        from llamadiff.llamacpp import child

        child.begin()
    from llamadiff.cli.app import app

    return app(words or ["--help"], standalone_mode=False)


def _elsewhere(words: list[str]) -> bool:
    """Whether no process of llama-cpp-python's is needed, or one with other words."""
    given = [word.removeprefix("--llama-cpp=") for at, word in enumerate(words)
             if words[at - 1] == "--llama-cpp" or word.startswith("--llama-cpp=")]  # fmt: skip
    given += [os.environ[LLAMA_CPP]] if os.environ.get(LLAMA_CPP, "").strip() else []
    builds = any("=" not in word or any(key in word for key in ELSEWHERE) for word in given)
    return builds or not HELP.isdisjoint(words)


if __name__ == "__main__":
    main()
