"""A small model with a tokenizer of letters and line breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from models import small


def with_tokenizer(path: Path, template: str | None = None, adds_bos: bool | None = None, **options: Any) -> Path:
    """A small model that tokenizes letters; ``options`` are write_model's."""

    def write(writer: gguf.GGUFWriter) -> None:
        texts = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "<0x0A>"]
        texts += [f"piece{i}" for i in range(small.VOCAB - len(texts) - 1)] + ["\x1b[2J[red]x"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([0.0] * len(texts))
        writer.add_token_types([2, 3, 3] + [1] * 27 + [6] + [1] * (len(texts) - 31))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if adds_bos is not None:
            writer.add_add_bos_token(adds_bos)
        if template is not None:
            writer.add_chat_template(template)

    return small.write_model(path, tokenizer=write, **{"layers": 1, **options})
