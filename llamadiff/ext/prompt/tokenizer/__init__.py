"""An independent tokenizer: text to ids and back, from a GGUF file's own tables.

Five kinds, each a module: ``spm``, ``bpe``, ``wpm``, ``ugm``, ``rwkv``. What engines get wrong is a field of ``Rules``,
so that ``dataclasses.replace`` makes a tokenizer with a mistake.
"""

from llamadiff.ext.prompt.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from llamadiff.ext.prompt.tokenizer.rules import KINDS, Rules, as_original, rules_of
from llamadiff.ext.prompt.tokenizer.tokenizer import Tokenizer
from llamadiff.ext.prompt.tokenizer.vocabulary import BYTE, CONTROL, NORMAL, SPECIAL, UNKNOWN, UNUSED, USER_DEFINED

__all__ = [
    "BYTE", "CONTROL", "KINDS", "NORMAL", "PRE_TOKENIZERS", "SPECIAL", "UNKNOWN", "UNUSED", "USER_DEFINED", "Rules",
    "Tokenizer", "as_original", "rules_of",
]  # fmt: skip
