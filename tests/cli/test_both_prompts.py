"""Every option of every command that takes a prompt, with a text and with --tokens: the same answer, and no crash."""

from __future__ import annotations

import pytest
from command import run
from optional import needs_slices
from typer.main import get_command

from llamadiff.cli.app import app
from llamadiff.llamacpp.child import Child
from llamadiff.llamacpp.request import Request
from llamadiff.llamacpp.shipped import shipped_model
from llamadiff.system.errors import UserError

TEXT, IDS = "Once upon", "1,403,407"
# Option -> a value; of a flag, none. ``{here}`` is a directory.
VALUES = {
    "--n-predict": "1", "--candidate": "llama.cpp:kv=f16", "--steps": "{here}/none.json", "--map": "hf",
    "--timeout": "60", "--only": "l_out-*", "--rows": "0-1", "--partial": "", "--engine": "graph",
    "--llama-cpp": "flash_attn=on",
    "--explain": "1", "--tolerance": "{here}/none.toml", "--fail-on": "never", "--expect": "5", "--full": "",
    "--output": "json:-", "--sketch": "", "--nodes": "", "--force": "", "--keep": "{here}/kept", "--node": "norm-0",
    "--recorded": "{here}/none.safetensors", "--text": "{here}/none.txt", "--spend": "64M", "--schedule": "3",
    "--seed": "7", "--chat": "", "--tokens": "", "--image": "{here}/none.png", "--audio": "{here}/none.wav",
}  # fmt: skip
# Key of a variant -> a value.
WAYS = {
    "kv": "f16", "type_k": "bf16", "type_v": "f16", "flash_attn": "on", "repack": "off", "threads": "1",
    "gpu_layers": "0", "device": "cpu", "split": "layer", "tensor_split": "1/1", "dir": "/none", "batch": "2",
    "ubatch": "2", "sequences": "2", "interleaved": "2", "chunked": "2", "drafted": "3", "used": "on", "freed": "on",
    "forked": "on", "restored": "on", "shifted": "on", "reused": "off", "callback": "off", "rotated": "on",
    "rope_base": "20000", "rope_scale": "0.5", "schedule": "3", "seed": "",
}  # fmt: skip
OTHER = {"loss": ["{model}"], "port": ["{here}"]}  # what stands after the model
NEEDED = {"capture": ["-o", "{here}/trace.safetensors"]}
COMMANDS = get_command(app).commands
PROMPTED = sorted(
    name for name, command in COMMANDS.items() if {"prompt", "tokens"} <= {each.name for each in command.params}
)


def ways(name):
    """The command lines of one command, without the prompt."""
    options = [option.opts[-1] for option in COMMANDS[name].params if option.opts[0].startswith("-")]
    words = [[option, *filter(None, [VALUES[option]])] for option in options if option not in ("--tokens", "--chat")]
    if name == "variants":
        words = [each for each in words if each[0] not in ("--only", "--seed")]
        words += [["--only", f"{key}={value}"] for key, value in WAYS.items() if value]
        words = [each if each[0] == "--only" else [*each, "--only", "kv=f16"] for each in words]
    return [each for each in words if name not in NEEDED or each[0] != "--output"]


@needs_slices("loss", "port", "state")
def test_every_option_and_key_is_in_the_tables():
    from llamadiff.ext.state.variation import KEYS  # a slice: others here need it not

    assert len(PROMPTED) >= 6
    options = {option.opts[-1] for name in PROMPTED for option in COMMANDS[name].params if option.opts[0][0] == "-"}
    assert options == {*VALUES}
    assert {*WAYS} == {*KEYS}


def ended(name, option, prompt, here, model):
    words = [*OTHER.get(name, []), *([prompt[0]] if len(prompt) == 1 else prompt), *option, *NEEDED.get(name, [])]
    done = run(name, model, *(word.format(here=here, model=model) for word in words))
    assert done.returncode in (0, 1, 2), f"{option} {prompt}: {done.stderr}"
    return done


@pytest.mark.parametrize("name", PROMPTED)
def test_what_is_asked_with_a_text_is_asked_with_its_ids(name, tmp_path, monkeypatch):
    """Up to llama.cpp, which is not there: both are refused in the same words."""

    def absent(self, *_):
        raise UserError("llama.cpp was to be asked")

    monkeypatch.setattr(Child, "__init__", absent)
    for option in ways(name):
        text, ids = (ended(name, option, prompt, tmp_path, shipped_model()) for prompt in ([TEXT], ["--tokens", IDS]))
        assert (text.returncode, text.stderr) == (ids.returncode, ids.stderr), option


@pytest.mark.parametrize("name", [name for name in PROMPTED if name != "port"])
def test_a_text_is_answered_as_its_ids_are(name, tmp_path):
    for number, option in enumerate(ways(name)):
        codes = []
        for prompt in ([TEXT], ["--tokens", IDS]):
            here = tmp_path / f"{number}-{len(prompt)}"
            here.mkdir()
            codes.append(ended(name, option, prompt, here, shipped_model()).returncode)
        assert codes[0] == codes[1], option


@needs_slices("state")
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_way_runs_any_number_of_tokens_once(count):
    """A text that nobody has tokenized yet is one of them."""
    from llamadiff.ext.state.variants import STAND_IN
    from llamadiff.ext.state.variation import varied

    request = Request("m", tokens=tuple(range(1, count + 1)) if count > 1 else STAND_IN)
    for key, value in WAYS.items():
        steps = varied(request, f"{key}={value}").way.steps if value else ()
        decoded = [step.tokens[place] for step in steps for place in step.places]
        assert decoded == [*request.tokens] or not steps, key
