"""llama.cpp's tokenizer: this file, run by ``LlamaTokens``, answers from a process of its own, since it may abort."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class LlamaTokens:
    """What llama.cpp makes of texts with a file's vocabulary."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def encoded(self, texts: Iterable[str], special: bool = True, add: bool = True) -> list[list[int]]:
        """The ids of each text. Raises AssertionError with llama.cpp's last words where it died."""
        return [json.loads(line) for line in self._ask("encode", texts, special, add)]

    def decoded(self, ids: Iterable[list[int]], special: bool = True) -> list[bytes]:
        """The text of each list of ids, all at once."""
        return [bytes.fromhex(line) for line in self._ask("decode", ids, special, False)]

    def pieces(self, special: bool = True) -> list[bytes]:
        """The bytes of each token of the vocabulary."""
        return [bytes.fromhex(line) for line in self._ask("pieces", [0], special, False)]

    def _ask(self, what: str, asked: Iterable[Any], special: bool, add: bool) -> list[str]:
        command = [sys.executable, __file__, str(self.path), what, str(int(special)), str(int(add))]
        lines = "".join(json.dumps(each) + "\n" for each in asked)
        done = subprocess.run(command, input=lines, capture_output=True, text=True, encoding="utf-8", check=False)
        assert done.returncode == 0, f"llama.cpp ended with {done.returncode}: {done.stderr[-300:]}"
        return done.stdout.split("\n")[:-1]


def answer(path: str, what: str, special: bool, add: bool) -> Iterator[str]:
    """A line for each line of standard input: ids as JSON, or bytes as hexadecimal digits."""
    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    parameters = llama.llama_model_default_params()
    parameters.vocab_only = True
    model = llama.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise SystemExit("llama.cpp refuses the file")
    vocab = llama.llama_model_get_vocab(model)
    ids, text = (llama.llama_token * (1 << 16))(), ctypes.create_string_buffer(1 << 20)
    for line in sys.stdin:
        asked = json.loads(line)
        if what == "encode":
            data = asked.encode("utf-8", "surrogateescape")
            n = llama.llama_tokenize(vocab, data, len(data), ids, len(ids), add, special)
            yield json.dumps(ids[:n])
        elif what == "decode":
            given = (llama.llama_token * len(asked))(*asked)
            n = llama.llama_detokenize(vocab, given, len(asked), text, len(text), False, special)
            yield text[:n].hex()
        else:
            for i in range(llama.llama_vocab_n_tokens(vocab)):
                n = llama.llama_token_to_piece(vocab, i, text, len(text), 0, special)
                yield text[:n].hex()


if __name__ == "__main__":
    for said in answer(sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1"):
        print(said)
