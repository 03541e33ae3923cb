"""Trains the small llama model that ships with llamadiff and writes it as F16 and as Q4_K_M GGUF files.

    python -m llamadiff.shipped.train [--out DIR]

It needs torch, gguf and llama_cpp; everything is seeded, and it takes a few minutes on two processor cores.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import torch
from llama_cpp import llama_cpp
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from llamadiff.shipped.grammar import write_stories

SEED = 1
# Every width that a matrix multiplies is a multiple of 256, the block of the K-quants.
N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_CTX = 3, 256, 512, 4, 2, 512
HEAD_DIM = N_EMBD // N_HEAD
RMS_EPS, ROPE_BASE = 1e-5, 10000.0

N_VOCAB, UNK, BOS, EOS, FIRST_BYTE = 704, 0, 1, 2, 3
FIRST_PIECE = FIRST_BYTE + 256
SPACE = "\u2581"
# Pieces never reach across words: a run of letters, or one other character, with the space before it.
WORD = re.compile(f"{SPACE}?(?:[A-Za-z]+|[^A-Za-z{SPACE}])|{SPACE}")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'Story: ' if message['role'] == 'assistant' else 'User: ' }}{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}Story:{% endif %}"
)

N_STEP, N_WARMUP, BATCH, LEARNING_RATE, WEIGHT_DECAY = 700, 50, 4, 3e-3, 0.1

Weights = dict[str, Tensor]  # by GGUF tensor name; a matrix is [output, input]


# --- the tokenizer: SentencePiece-like, as llama.cpp's llm_tokenizer_spm (src/llama-vocab.cpp) runs it ---


def split_words(text: str) -> list[str]:
    """Splits text into the words inside which pieces may merge, spaces written as in the vocabulary."""
    return WORD.findall(SPACE + text.replace(" ", SPACE))


def merge_parts(parts: Sequence[str], ranks: Mapping[str, int]) -> list[str]:
    """Joins the adjacent pair of the lowest rank, the leftmost on a tie, until no pair is a piece."""
    merged = list(parts)
    while pairs := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(merged)) if a + b in ranks]:
        _, at = min(pairs)
        merged[at : at + 2] = [merged[at] + merged[at + 1]]
    return merged


def learn_merges(words: Mapping[str, int], count: int) -> dict[str, int]:
    """Ranks `count` merged pieces by how often their two parts are adjacent in the counted words."""
    ranks: dict[str, int] = {}
    splits = {word: list(word) for word in words}
    while len(ranks) < count:
        pairs: Counter[str] = Counter()
        for word, parts in splits.items():
            pairs.update({a + b: 0 for a, b in pairwise(parts)})
            for a, b in pairwise(parts):
                pairs[a + b] += words[word]
        ranks[min(pairs, key=lambda piece: (-pairs[piece], piece))] = len(ranks)
        splits = {word: merge_parts(parts, ranks) for word, parts in splits.items()}
    return ranks


@dataclass(frozen=True)
class Vocabulary:
    """The merged pieces by rank, then the single characters; after them the text falls back to bytes."""

    ranks: dict[str, int]
    characters: tuple[str, ...]

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Learns as many pieces from the texts as bring the vocabulary to `size` tokens."""
        words = Counter(word for text in texts for word in split_words(text) if word != "\n")
        characters = tuple(sorted({character for word in words for character in word}))
        return cls(learn_merges(words, size - FIRST_PIECE - len(characters)), characters)

    def tokens(self) -> list[tuple[str, float, gguf.TokenType]]:
        """Lists the text, score and type of every token in the order of their ids."""
        special = [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
        raw_bytes = [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)]
        pieces = [*self.ranks, *self.characters]
        scored = [(piece, -float(rank), gguf.TokenType.NORMAL) for rank, piece in enumerate(pieces)]
        return [(text, 0.0, kind) for text, kind in special + raw_bytes] + scored

    def encode(self, text: str) -> list[int]:
        """Tokenizes text as llama.cpp does, without BOS or EOS."""
        return [token for word in split_words(text) for token in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        return [token for part in merge_parts(word, self.ranks) for token in self._encode_part(part)]

    def _encode_part(self, part: str) -> list[int]:
        if part in self.ranks:
            return [FIRST_PIECE + self.ranks[part]]
        if part in self.characters:
            return [FIRST_PIECE + len(self.ranks) + self.characters.index(part)]
        return [FIRST_BYTE + byte for byte in part.encode()]


# --- the model: the maths of llama.cpp's src/models/llama.cpp, with RoPE on interleaved pairs ---


def matrix_shapes() -> dict[str, tuple[int, int]]:
    """The [output, input] shape of each matrix, by GGUF name."""
    width_kv = N_HEAD_KV * HEAD_DIM
    block = {
        "attn_q": (N_EMBD, N_EMBD),
        "attn_k": (width_kv, N_EMBD),
        "attn_v": (width_kv, N_EMBD),
        "attn_output": (N_EMBD, N_EMBD),
        "ffn_gate": (N_FF, N_EMBD),
        "ffn_up": (N_FF, N_EMBD),
        "ffn_down": (N_EMBD, N_FF),
    }
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(N_LAYER) for name, shape in block.items()}
    return {"token_embd.weight": (N_VOCAB, N_EMBD)} | blocks


def init_weights(seed: int) -> Weights:
    """Draws each matrix with a variance of 1 / input, and sets the norms to one."""
    rng = torch.Generator().manual_seed(seed)
    matrices = {
        name: torch.randn(shape, generator=rng) / math.sqrt(shape[1]) for name, shape in matrix_shapes().items()
    }
    norm_names = [f"blk.{i}.{name}_norm.weight" for i in range(N_LAYER) for name in ("attn", "ffn")]
    norms = {name: torch.ones(N_EMBD) for name in [*norm_names, "output_norm.weight"]}
    return {name: weight.requires_grad_() for name, weight in (matrices | norms).items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Scales each row of x to a root mean square of one, then by the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS) * weight


@cache
def rope_angles() -> Tensor:
    """The angle of each position and pair: position * base^(-2 pair / head_dim), [token, pair]."""
    frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.outer(torch.arange(N_CTX), frequencies)


def rope(x: Tensor) -> Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of each head by their angles; x is [batch, head, token, dim]."""
    angles = rope_angles()[: x.shape[-2]]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def split_heads(x: Tensor) -> Tensor:
    """[batch, token, head * dim] -> [batch, head, token, dim]"""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def attention(x: Tensor, weights: Weights, block: str) -> Tensor:
    """Causal attention with grouped queries."""
    q, k, v = (split_heads(x @ weights[f"{block}.attn_{name}.weight"].T) for name in "qkv")
    k, v = (heads.repeat_interleave(N_HEAD // N_HEAD_KV, 1) for heads in (k, v))
    mixed = scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2) @ weights[f"{block}.attn_output.weight"].T


def feed_forward(x: Tensor, weights: Weights, block: str) -> Tensor:
    """SwiGLU."""
    gate, up = (x @ weights[f"{block}.ffn_{name}.weight"].T for name in ("gate", "up"))
    return (silu(gate) * up) @ weights[f"{block}.ffn_down.weight"].T


def forward(tokens: Tensor, weights: Weights) -> Tensor:
    """[batch, token] -> logits [batch, token, vocabulary]; the output matrix is the embedding."""
    x = weights["token_embd.weight"][tokens]
    for i in range(N_LAYER):
        x = x + attention(rms_norm(x, weights[f"blk.{i}.attn_norm.weight"]), weights, f"blk.{i}")
        x = x + feed_forward(rms_norm(x, weights[f"blk.{i}.ffn_norm.weight"]), weights, f"blk.{i}")
    return rms_norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T


# --- training ---


def pack_rows(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Lays whole documents end to end, each between BOS and EOS, and cuts every row at `length`."""
    row: list[int] = []
    for document in documents:
        row += [BOS, *document, EOS]
        if len(row) >= length:
            yield row[:length]
            row = []


def batches(vocabulary: Vocabulary, texts: Iterable[str]) -> Iterator[Tensor]:
    """Yields [batch, token] tensors of one token more than the context, as the last is only predicted."""
    rows = pack_rows(map(vocabulary.encode, texts), N_CTX + 1)
    yield from map(torch.tensor, zip(*[rows] * BATCH, strict=False))


def learning_rate(step: int) -> float:
    """Rises linearly for the warm-up, then falls to a twentieth along a cosine."""
    done = max(0, step - N_WARMUP) / (N_STEP - N_WARMUP)
    return LEARNING_RATE * min(1.0, (step + 1) / N_WARMUP) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def make_optimizer(weights: Weights) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms."""
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    norms = [weight for weight in weights.values() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def train(weights: Weights, data: Iterable[Tensor]) -> Iterator[float]:
    """Changes the weights in place, one batch a step, and yields each step's loss in nats a token."""
    optimizer = make_optimizer(weights)
    for step, tokens in zip(range(N_STEP), data, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = cross_entropy(forward(tokens[:, :-1], weights).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        yield loss.item()


# --- the files ---


def add_model_metadata(writer: gguf.GGUFWriter) -> None:
    """Says what the model is and gives its shape."""
    writer.add_name("llamadiff tiny")
    writer.add_license("mit")
    writer.add_description("A tiny llama model that tells stories drawn from a grammar, to test inference engines.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(N_VOCAB)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Writes the vocabulary in SentencePiece's form."""
    texts, scores, types = zip(*vocabulary.tokens(), strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_f16(path: Path, weights: Weights, vocabulary: Vocabulary) -> None:
    """Writes the model with its matrices in F16 and its norms in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    add_model_metadata(writer)
    add_tokenizer(writer, vocabulary)
    for name, weight in weights.items():
        writer.add_tensor(name, weight.detach().to(torch.float16 if weight.ndim == 2 else torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path) -> None:
    """Writes a Q4_K_M copy of a GGUF file, as llama.cpp makes it. Raises RuntimeError if it cannot."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if code := llama_cpp.llama_model_quantize(bytes(source), bytes(target), byref(params)):
        raise RuntimeError(f"{source}: llama_model_quantize returned {code} instead of 0; its log says why")


def main() -> None:
    """Trains, writes both files and prints the loss on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to write the two files")
    out = parser.parse_args().out
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    texts = write_stories(N_STEP * BATCH * N_CTX // 100, SEED)
    vocabulary, weights = Vocabulary.learn(texts, N_VOCAB), init_weights(SEED)
    for step, loss in enumerate(train(weights, batches(vocabulary, texts)), start=1):
        if step % 50 == 0:
            print(f"step {step:4d} of {N_STEP}  loss {loss:.4f}", flush=True)
    write_f16(out / "tiny.F16.gguf", weights, vocabulary)
    quantize(out / "tiny.F16.gguf", out / "tiny.Q4_K_M.gguf")


if __name__ == "__main__":
    main()
