"""What was given by mistake: what a file is by its first bytes and where it belongs, near names, a command's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamadiff.plugins import Slice

if TYPE_CHECKING:
    from llamadiff.judge.preflight.checks import Check
    from llamadiff.judge.study import Bench, Study
    from llamadiff.trace.reader import Trace


class Hints(Slice):
    """What was given by mistake: what a file is by its first bytes and where it belongs, near names, a command."""

    def mistake(self, given: str | Path | Sequence[str], place: str) -> str | None:
        from llamadiff.ext.hints.candidates import mistaken_candidate, mistaken_prompt
        from llamadiff.ext.hints.names import advice_on_names
        from llamadiff.ext.hints.places import mistaken_file

        if not isinstance(given, (str, Path)):
            return advice_on_names(given)
        if place == "prompt":
            return mistaken_prompt(str(given))
        return mistaken_candidate(str(given)) if place == "candidate" else mistaken_file(Path(given), place)

    def misuse(self, command: Any, given: Mapping[str, Any]) -> str | None:
        from llamadiff.ext.hints.values import mistaken_values

        return mistaken_values(command, given)

    def usage(self, error: Exception, commands: Mapping[str, Any], words: Sequence[str]) -> str:
        from llamadiff.ext.hints.usage import mistaken_usage

        return mistaken_usage(error, commands, words)

    def other_file(self, bench: Bench, study: Study, given: Trace) -> Check | None:
        from llamadiff.ext.hints.other_weights import other_weights, refuse_other_model, refuse_other_weights

        refuse_other_model(bench.model, given)
        refuse_other_weights(bench, study, given)
        return other_weights(bench, study)


slice_ = Hints()
