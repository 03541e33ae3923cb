"""What is wrong with the values of a command line that was understood, before anything is read or run for them.

What a file is, is asked here for every command: by its first bytes, and by the place that it was given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from llamadiff.candidates import TRACES
from llamadiff.cli.inputs import FILES
from llamadiff.ext.hints import file_kinds as kinds
from llamadiff.ext.hints import places
from llamadiff.report.formats import formats
from llamadiff.system.commands import quote

# A parameter of any command, or of one -> the place that its value has. Traces of check are refused each by itself.
_PLACES = {
    "model": places.MODEL, "recorded": places.NODES, "tolerance": places.TOML, "steps": places.TEXT,
    "name_map": places.TOML, "plan": places.TOML, "baseline": places.TRACE, "texts": places.TEXT, "text": places.TEXT,
    "checkpoint": places.CHECKPOINT, "converter": places.TEXT, "diff candidate": places.TRACE,
    "tokens candidate": places.ENGINE, "template candidate": places.ENGINE, "replay paths": places.OP,
    "weights other": places.WEIGHTS, "loss other": places.MODEL, "template model": "",
}  # fmt: skip
_FOLDERS = ("keep", "out", "vectors", "tiny output")  # that are made
# Two of a command that say nothing beside one another where they are one file.
_APART = ("candidate", "model", "paths")
_NAMELESS, _MODEL = ("llama.cpp:", "http://", "https://"), ".gguf"  # candidates whose taps have one name
_COMMAND, _SUCH = "cmd:", "./engine --tokens {tokens} --dump {out}"
_ADAPTER = re.compile(r"(?:^|,)lora=([^,]+?)(?::[-\d.e]+)?(?:,|$)")
_NODES, EVERYTHING = ".nodes", "*"  # of all taps: what is not recorded of long prompts else
_FORMATS = tuple(f".{ending}" for ending in FILES if ending not in ("safetensors", "st", "dump", "out", "raw", "dat"))


def mistaken_values(command: Any, given: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of them that cannot be meant, in one line."""
    if given.get("help"):
        return None
    return next(_mistakes(command, given), None)


def _mistakes(command: Any, given: Mapping[str, Any]) -> Iterator[str]:
    name, labels = str(command.name), {each.name: _label(each) for each in command.params}
    texts = {each: _words(given.get(each)) for each in labels}  # in their order, whatever was typed first
    for each in command.params:
        if "" in texts.get(each.name, ()) and not str(each.metavar).startswith("--"):
            yield f"{labels[each.name]} is empty (is a variable unset?); give a value, or leave it out"
    yield from _command_without_quotes(texts)
    yield from _model_behind(name, texts)
    for each, words in texts.items():
        for word in filter(None, words):
            yield from filter(None, [_misplaced(name, each, labels[each], word)])
            adapter = _ADAPTER.search(word) if each == "llama_cpp" else None
            said = places.mistaken_file(Path(adapter[1]), places.MODEL) if adapter else None
            yield from [f"--llama-cpp lora={said}"] * bool(said)
            if (each in _FOLDERS or f"{name} {each}" in _FOLDERS) and Path(word).is_file():
                yield f"{word}: is a file; {labels[each]} takes a directory, which is made if it is not there"
    yield from _same_file(texts, labels)
    yield from _recorded_already(name, texts)
    yield from _of_no_use(name, texts, given)
    if name == "capture":
        yield from _names_of_traces(texts["output"], bool(given.get("nodes")))
    elif name != "tiny" and not given.get("force"):
        read = [word.removeprefix("@") for each, words in texts.items() if each != "output" for word in words]
        yield from _written_over(texts.get("output", ()), read, "force" in labels)


def _words(value: Any) -> Sequence[str]:
    """The texts that one parameter is given."""
    return [each for each in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(each, str)]


def _label(each: Any) -> str:
    return str(each.opts[0] if each.param_type_name == "option" else each.metavar or each.name.upper())


def _misplaced(command: str, parameter: str, label: str, word: str) -> str | None:
    """That a file is not what its place takes. A directory may hold what is looked for."""
    place, path = _PLACES.get(f"{command} {parameter}", _PLACES.get(parameter)), Path(word)
    if parameter == "prompt" and word.endswith(_NODES):
        place = places.TRACE
    if not place:
        return None
    if not places.exists(path):
        is_lacking = place == places.MODEL and label.startswith("-")
        return f"{label} {places.mistaken_file(path, place) or f'{path}: no such file'}" if is_lacking else None
    if path.is_dir() and place not in (places.MODEL, places.OP):
        return None
    said = places.mistaken_file(path, place)
    return f"{label} {said}" if said is not None and label.startswith("-") else said


def _command_without_quotes(texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A command of several words, of which the first is the candidate; traces behind --candidate, and none before."""
    for spec in texts.get("candidate", ()):
        if spec.strip() in (_COMMAND, _COMMAND[:-1]):
            yield f'--candidate {spec} has no command; all of it stands in quotes: --candidate "{_COMMAND} {_SUCH}"'
        elif "paths" in texts and not texts["paths"] and kinds.kind_of(Path(spec)) in (kinds.TRACES, kinds.TRACE):
            yield f"PATHS is missing: recorded traces, or their directories; {spec} is such: give it before --candidate"


def _model_behind(command: str, texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A model that stands where what is judged by it does, and that where the model does."""
    for first in texts.get("model", ()):
        for second in (*texts.get("prompt", ()), *texts.get("other", ())):
            kind = kinds.kind_of(Path(first))
            if kind not in ("", kinds.MODEL) and kinds.kind_of(Path(second)) == kinds.MODEL:
                line = " ".join(map(quote, ("llamadiff", command, second, first)))
                yield f"{second}: is a model, which comes first: {line}"


def _same_file(texts: Mapping[str, Sequence[str]], labels: Mapping[str, str]) -> Iterator[str]:
    """Two that are compared and are one file: all would be right."""
    given = [(each, word) for each, words in texts.items() if each in _APART for word in words]
    for (one, first), (two, second) in combinations(given, 2):
        if one != two and _is_one_file(first, second):
            yield (
                f"{second}: is given twice, as {labels[one]} and as {labels[two]}, and is right beside itself; "
                "give the other side"
            )


def _is_one_file(first: str, second: str) -> bool:
    return os.path.isfile(first) and os.path.isfile(second) and os.path.samefile(first, second)


def _recorded_already(command: str, texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Taps that llama.cpp is to record alone, beside a trace of which all are judged."""
    given = (*texts.get("prompt", ()), *texts.get("candidate", ()))
    traces = [word for word in given if word.endswith(TRACES) and Path(word).is_file()]
    if command == "compare" and traces and texts.get("only") and EVERYTHING not in texts["only"]:
        yield (
            f"--only {texts['only'][0]}: limits what is recorded, and {traces[0]} is recorded: all of its taps are "
            "judged; leave out --only"
        )


def _of_no_use(command: str, texts: Mapping[str, Sequence[str]], given: Mapping[str, Any]) -> Iterator[str]:
    """Options that another one leaves nothing to do."""
    if given.get("nodes") and given.get("sketch"):
        yield "--sketch: is of a trace, and --nodes records another file; give one of them"
    candidates = [*texts.get("candidate", ()), *(word for word in texts.get("prompt", ()) if word.endswith(TRACES))]
    nameless = next((each for each in candidates if each.startswith(_NAMELESS) or each.endswith(_MODEL)), None)
    if command in ("compare", "check") and texts.get("name_map") and (nameless or not candidates):
        what = f"{nameless} has none of its own" if nameless else "there is no --candidate"
        yield f"--map {texts['name_map'][0]}: translates a candidate's names, and {what}; leave it out"


def _names_of_traces(outputs: Sequence[str], nodes: bool) -> Iterator[str]:
    """A trace under a name that no command takes for one; of a file that is there it is said what it is."""
    for path in (Path(text) for text in outputs if not places.exists(Path(text))):
        if nodes and path.suffix in (*TRACES, *_FORMATS):
            yield f"-o {path}: what --nodes writes is no {path.suffix}; give {path.with_suffix(_NODES)}"
        elif not nodes and path.suffix in (_NODES, *_FORMATS):
            yield f"-o {path}: what this writes is a trace, no {path.suffix}; give {path.with_suffix(TRACES[0])}"


def _written_over(outputs: Sequence[str], read: Sequence[str], can_force: bool) -> Iterator[str]:
    """A file that is there and is none of ours: to GitHub's own a report is added; what is read is told later."""
    gathering = [place for form in formats() if form.also and (place := os.environ.get(form.also))]
    for text in (each for each in outputs if os.path.basename(each)):
        name, _, rest = text.partition(":")
        file = Path(rest if rest and name.replace("-", "").isalpha() and not places.exists(Path(text)) else text)
        kind = kinds.kind_of(file) if places.exists(file) and file.is_file() else kinds.EMPTY
        is_known = any(_is_one_file(place, str(file)) for place in (*gathering, *read))
        if kind not in (kinds.REPORT, kinds.EMPTY, kinds.MODEL) and not is_known:
            what = f"is {kind}, and no report" if kind else "is there, and is no report"
            yield f"-o {file}: {what} of llamadiff's; give another name{', or --force to overwrite it' * can_force}"
