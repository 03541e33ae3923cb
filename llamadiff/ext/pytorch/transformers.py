"""``transformers:`` a third opinion: the same GGUF, or a Hugging Face directory, run by transformers.

    transformers:             the GGUF file under study, in float32
    transformers:bf16         the same in bfloat16 (or f16)
    transformers:DIR@bf16     a directory with config.json and .safetensors weights

An optional extra, transformers. Weights are read from GGUF or safetensors only, never
unpickled, and nothing is fetched.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamadiff.candidates.source import CandidateSource, Context, assemble
from llamadiff.engines.model_file import ModelFile
from llamadiff.ext.file.same_model import config_json, same_checkpoint
from llamadiff.ext.pytorch.module_taps import find_taps
from llamadiff.ext.pytorch.modules import run
from llamadiff.system.errors import UserError
from llamadiff.system.input import check_regular
from llamadiff.trace.reader import Trace
from llamadiff.trace.stated import reason

PREFIX = "transformers:"
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

STATE = ("A_log", ".D", "dt_bias")  # parameters whose numbers mean something where they are
# Sizes that transformers assumes for some architectures instead of reading the file's.
_ASSUMED = {"head_dim": "dim", "moe_intermediate_size": "ff_exp"}


def matches(spec: str) -> bool:
    """Whether transformers is asked for."""
    return spec.startswith(PREFIX)


def files(spec: str) -> Iterator[Path]:
    """The file, or those of the directory."""
    path, _ = _parsed(spec)
    if path is not None:
        yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)


def open_source(spec: str) -> CandidateSource:
    """The model, which is loaded once the tokens are known."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError("--candidate transformers: needs torch and transformers: pip install torch transformers")
    return CandidateSource(partial(_recorded, *_parsed(spec)))


def checkpoint_of(spec: str) -> Path | None:
    """The directory of a checkpoint that a ``--candidate`` runs; None if it is something else."""
    path = _parsed(spec)[0] if spec.startswith(PREFIX) else None
    return path if path is not None and path.is_dir() else None


def _recorded(path: Path | None, kind: str, context: Context) -> Trace:
    context.progress("loading the model into transformers")
    if path is not None and path.is_dir() and (path / "config.json").is_file():
        same_checkpoint(ModelFile(context.model.path), path, config_json(path))
    place = path or context.model.path
    model = loaded(place, kind, context.model.sizes)
    context.progress("running transformers")
    parameters = {name: dict(module.named_parameters(recurse=False)) for name, module in model.named_modules()}
    pieces, mapping = find_taps(parameters, partial(_values_of, model, place), context.model, context.tokens)
    mapped = Context(context.model, context.tokens, len(context.tokens), mapping)
    import transformers

    producer = {"name": "transformers", "version": f"{transformers.__version__}, {DTYPES[kind]}"}
    return assemble(pieces, mapped, producer)


def _values_of(model: Any, place: Path, tokens: Sequence[int]) -> Mapping[str, Any]:
    """What its modules put out and took in. Raises UserError for a model that does not run."""
    try:
        return run(model, tokens)
    except Exception as error:  # its models raise many kinds
        raise UserError(f"{place}: transformers cannot run it ({type(error).__name__}: {reason(error)})") from None


def _parsed(spec: str) -> tuple[Path | None, str]:
    """The file or directory to load (None: the model under study), and the type to compute in."""
    text = spec.removeprefix(PREFIX).strip()
    path, at, kind = text.rpartition("@")
    if not at:
        path, kind = ("", text) if text in DTYPES else (text, "f32")
    if kind not in DTYPES:
        raise UserError(f"--candidate {spec}: {kind!r} is no type; expected {', '.join(DTYPES)}")
    if path and not Path(path).exists():
        raise UserError(f"--candidate {spec}: no such file or directory")
    if path and not Path(path).is_dir():
        check_regular(Path(path), "a .gguf file, or a directory of a checkpoint")
    return Path(path) if path else None, kind


def loaded(path: Path, kind: str, sizes: Mapping[str, int]) -> Any:
    """The model, in evaluation mode, with plain attention. ``sizes``: what a GGUF file has. Raises UserError."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, options = (path, {}) if path.is_dir() else (path.absolute().parent, {"gguf_file": path.name})
    quiet = redirect_stderr(io.StringIO())  # its progress bars know no other way to be silent
    local = {"local_files_only": True, "trust_remote_code": False, **options}
    try:
        with quiet:
            config = transformers.AutoConfig.from_pretrained(folder, **local)
        if options:
            config.pad_token_id = None  # files carry 4294967295 for "none"
        for name, size in _ASSUMED.items():
            if options and hasattr(config, name):
                setattr(config, name, sizes[size])
        with quiet:
            model = _class_of(config).from_pretrained(
                folder, config=config, dtype=getattr(torch, DTYPES[kind]), attn_implementation="eager",
                **({} if options else {"use_safetensors": True}), **local,
            )  # fmt: skip
    except Exception as error:  # its loaders raise many kinds
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: transformers cannot load it ({type(error).__name__}: {said})") from None
    return model.eval()


def _class_of(config: Any) -> Any:
    """What builds a config's model: with a head for the next token, but for a model that embeds a text."""
    import transformers

    embeds = [name for name in config.architectures or () if not name.endswith(("LM", "LMHeadModel", "Generation"))]
    return transformers.AutoModel if embeds else transformers.AutoModelForCausalLM


def loaded_whole(path: Path) -> Any:
    """The model with what sees and hears, by the class that its config names, in float32. Raises UserError."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with redirect_stderr(io.StringIO()):
            config = transformers.AutoConfig.from_pretrained(path, **local)
            names = [str(name) for name in getattr(config, "architectures", None) or ()]
            kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
            if kind is None:
                raise ValueError(f"it has no {', '.join(names) or 'class for it'}")
            model = kind.from_pretrained(
                path, config=config, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, **local
            )
    except Exception as error:  # its loaders raise many kinds
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: transformers cannot load it ({type(error).__name__}: {said})") from None
    return model.eval()


def tokenizer_of(checkpoint: str) -> Any:
    """The tokenizer of a checkpoint's directory. Raises what its loaders raise."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)


def config_of(path: Path) -> Any:
    """The config of a checkpoint, which need not have weights. Raises UserError."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError("this needs torch and transformers: pip install torch transformers")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its loaders raise many kinds
        raise UserError(f"{path}: transformers cannot read its config.json ({reason(error)})") from None


def randomly(kind: Any, config: Mapping[str, Any], seed: int, path: Path) -> Any:
    """The model of a config of this class, with random weights of which none is trivial.

    Raises UserError, about ``path``.
    """
    import torch

    torch.manual_seed(seed)
    try:
        with redirect_stderr(io.StringIO()):
            own = kind.from_dict(dict(config))
            model = _class_of(own).from_config(own, attn_implementation="eager")
    except Exception as error:  # its models raise many kinds
        raise UserError(f"{path}: transformers cannot build a small model of it ({reason(error)})") from None
    with torch.no_grad():
        for name, x in model.named_parameters():
            if not name.endswith(STATE):
                x.add_((0.3 if x.ndim == 1 else 0.05) * torch.randn_like(x))
    return model.float().eval()


@contextmanager
def config_read() -> Iterator[set[str]]:
    """The names that transformers' models read of their configs meanwhile; none where it is not installed."""
    if find_spec("transformers") is None:
        yield set()
        return
    from transformers.configuration_utils import PreTrainedConfig

    read, usual = set[str](), PreTrainedConfig.__getattribute__

    def watched(self: Any, name: str) -> Any:
        read.add(name)
        return usual(self, name)

    PreTrainedConfig.__getattribute__ = watched
    try:
        yield read
    finally:
        PreTrainedConfig.__getattribute__ = usual
