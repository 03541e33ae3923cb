"""Turns a user's arguments into a Request to llama.cpp, or a UserError that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llamadiff import plugins
from llamadiff.engines.model_file import ModelFile
from llamadiff.engines.run_spec import Run
from llamadiff.llamacpp.request import Request
from llamadiff.system.errors import UserError
from llamadiff.trace import taps


def request_for(model: ModelFile, run: Run, output: Path) -> Request:
    """The capture that a user asks for. Raises UserError for words that ask for nothing, or for two things.

    Of a model that no engine has opened, which taps there are is found out when llama.cpp runs.
    """
    request, layers = text_request(model, run, output), run.layers
    _check_layers(layers, model.describe("")["layers"])
    bounds = None if layers is None else (layers.start, layers.stop)
    request = replace(request, patterns=tuple(run.patterns), layers=bounds, scales_queries=model.scales_queries)
    if model.taps:
        return replace(request, wanted=_select_taps(model, run.patterns, layers), scores=bool(run.patterns))
    return request


def text_request(model: ModelFile, run: Run, output: Path) -> Request:
    """The run that a user asks for, with all taps. Raises UserError for words that ask for nothing, or two things."""
    model.check_is_model()
    prompt, tokens, chat = run.prompt, run.tokens, run.chat
    if prompt is not None and tokens:
        raise UserError("give a prompt or --tokens, not both")
    if not prompt and not tokens:
        said = f"the prompt is {'missing' if prompt is None else 'empty'}"
        raise UserError(f'{said}: give one ("Once upon a time") or token ids with --tokens 1,2,3')
    if chat and not prompt:
        raise UserError("--chat needs a prompt: token ids are past the chat template")
    if chat and prompt:
        prompt = _through_template(model, prompt)
    adapter = plugins.ask_first(lambda each: each.adapter) or ""
    if run.settings.lora and not adapter:
        raise UserError(f"lora={run.settings.lora}: the slice that applies an adapter is missing; leave it out")
    if prompt is not None and not _is_unicode(prompt):
        raise UserError("the prompt is not valid Unicode text; give it as UTF-8, or token ids with --tokens 1,2,3")
    return Request(
        model=str(model.path), files=tuple(map(str, model.weights.files)), text=prompt,
        bos=model.special_token("bos") if chat else "", tokens=tuple(tokens), n_predict=run.n_predict,
        output=str(output), model_info={"architecture": model.architecture, "file": model.path.name},
        settings=run.settings, adapter=adapter,
    )  # fmt: skip


def _through_template(model: ModelFile, typed: str) -> str:
    """A prompt as the model's own template has it. Raises UserError where that says nothing, or nobody renders it."""
    render = plugins.ask_first(lambda each: each.chat_template())
    if render is None:
        raise UserError("--chat: the slice that renders templates is missing; give the prompt as the template has it")
    prompt = render(model, typed)
    if not prompt:
        raise UserError(f"{model.path}: the chat template wrote nothing for the prompt; leave out --chat")
    return prompt


def _is_unicode(text: str) -> bool:
    """Whether text has a UTF-8 form: stray bytes of a command line, or of a template, have none."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _select_taps(model: ModelFile, patterns: Sequence[str], layers: range | None) -> tuple[str, ...]:
    """The taps that are asked for. Raises UserError for a pattern that no tap fits, and for layers it has not."""
    for pattern in patterns:
        if not any(taps.is_selected(tap.name, tap.layer, [pattern], None) for tap in model.taps):
            raise UserError(f"no tap fits --only {pattern}; llamadiff taps {model.path.name} lists them")
    asked = (tap for tap in model.taps if taps.is_selected(tap.name, tap.layer, patterns, layers))
    wanted = tuple(tap.name for tap in asked if not tap.kind.optional)
    if not wanted:
        raise UserError(f"no tap of these layers fits --only {' '.join(patterns)}")
    return wanted


def _check_layers(layers: range | None, n_layer: int) -> None:
    if layers is not None and not 0 <= layers.start < layers.stop <= n_layer:
        asked = f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
        raise UserError(f"--only {asked}: the model has layers 0 to {n_layer - 1}")
