"""Hugging Face's tokenizers, in Rust: ``tokenizers_rust.py TOKENIZER.json [--back]``, lines as engine.py has them."""

import json
import sys

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

tokenizer = Tokenizer.from_file(sys.argv[1])


def encode(text: str) -> list[int]:
    return tokenizer.encode(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")).ids


def decode(ids: list[int]) -> list[str]:
    stream = DecodeStream([], False)
    return [stream.step(tokenizer, i) or "" for i in ids]


answer = decode if "--back" in sys.argv else encode
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
