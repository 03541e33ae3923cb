"""A .gguf file of a vocabulary of tiktoken's, which has no merges but ranks: ``ranks.py FILE.tiktoken GGUF PRE``."""

from __future__ import annotations

import sys
from base64 import b64decode
from pathlib import Path

import gguf

sys.path[:0] = [str(Path(__file__).parents[4])]

from ext.prompt.tokens.characters import alphabet  # noqa: E402
from ext.prompt.tokens.joining import merged  # noqa: E402

SPECIAL = {  # with their ids, as gpt-tokenizer has them
    "r50k_base": {"<|endoftext|>": 50256},
    "cl100k_base": {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
                    "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276},
    "o200k_base": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
}  # fmt: skip


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that made each token: the two pieces that are left of it under the merges before its own."""
    found = []
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        if len(token) > 1:
            below = lambda left, right, rank=rank: r if (r := ranks.get(left + right, rank)) < rank else None  # noqa: E731
            pieces = merged([token[at : at + 1] for at in range(len(token))], below)
            assert len(pieces) == 2, f"{token!r} is made of {pieces}"
            found.append((pieces[0], pieces[1]))
    return found


def write(source: Path, target: Path, pre: str, special: dict[str, int]) -> Path:
    """The file, with no BOS token added."""
    lines = (line.split() for line in source.read_text("ascii").splitlines())
    ranks = {b64decode(token): int(rank) for token, rank in lines}
    shown = alphabet()
    in_alphabet = lambda data: "".join(shown[byte] for byte in data)  # noqa: E731
    tokens = [f"[UNUSED_{i}]" for i in range(max(*ranks.values(), *special.values()) + 1)]
    kinds = [gguf.TokenType.UNUSED] * len(tokens)
    for token, rank in ranks.items():
        tokens[rank], kinds[rank] = in_alphabet(token), gguf.TokenType.NORMAL
    for text, i in special.items():
        tokens[i], kinds[i] = text, gguf.TokenType.CONTROL
    writer = gguf.GGUFWriter(target, "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{in_alphabet(left)} {in_alphabet(right)}" for left, right in merges_of(ranks)])
    writer.add_bos_token_id(special["<|endoftext|>"])
    writer.add_eos_token_id(special["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], SPECIAL[Path(sys.argv[1]).stem])
