"""Trains the small llama model that ships with llamadiff and writes it as F16 and as Q4_K_M GGUF files.

    python tests/tools/training/train.py [--out DIR]

It needs torch, gguf and llama_cpp; everything is seeded, and it takes a few minutes on two processor cores.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from ctypes import byref
from itertools import islice
from pathlib import Path

import gguf
import torch
import torch_model
from grammar import write_stories
from llama_cpp import llama_cpp
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_model import N_CTX, N_VOCAB, Weights, forward, init_weights
from vocabulary import BOS, EOS, UNK, Vocabulary

from llamadiff.llamacpp.shipped import shipped_model

SEED, N_VOCABULARY_STORY = 1, 5000
N_STEP, N_WARMUP, BATCH, LEARNING_RATE, WEIGHT_DECAY = 700, 50, 4, 3e-3, 0.1

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'Story: ' if message['role'] == 'assistant' else 'User: ' }}{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}Story:{% endif %}"
)


# --- training ---


def pack_rows(documents: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Lays whole documents end to end, each between BOS and EOS, and cuts every row at `length`."""
    row: list[int] = []
    for document in documents:
        row += [BOS, *document, EOS]
        if len(row) >= length:
            yield row[:length]
            row = []


def batches(rows: Iterator[list[int]]) -> Iterator[Tensor]:
    """Stacks rows into [batch, token] tensors; a last batch that is not full is left out."""
    while len(batch := list(islice(rows, BATCH))) == BATCH:
        yield torch.tensor(batch)


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
        torch.autograd.backward(loss)
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
    writer.add_embedding_length(torch_model.N_EMBD)
    writer.add_block_count(torch_model.N_LAYER)
    writer.add_feed_forward_length(torch_model.N_FF)
    writer.add_head_count(torch_model.N_HEAD)
    writer.add_head_count_kv(torch_model.N_HEAD_KV)
    writer.add_layer_norm_rms_eps(torch_model.RMS_EPS)
    writer.add_rope_dimension_count(torch_model.HEAD_DIM)
    writer.add_rope_freq_base(torch_model.ROPE_BASE)


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


def run(out: Path) -> None:
    """Trains, prints the loss on the way, and writes both files."""
    vocabulary = Vocabulary.learn(islice(write_stories(SEED), N_VOCABULARY_STORY), N_VOCAB)
    # The last token of a row is only predicted.
    rows = pack_rows(map(vocabulary.encode, write_stories(SEED)), N_CTX + 1)
    weights = init_weights(SEED)
    for step, loss in enumerate(train(weights, batches(rows)), start=1):
        if step % 50 == 0:
            print(f"step {step:4d} of {N_STEP}  loss {loss:.4f}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_f16(out / "tiny.F16.gguf", weights, vocabulary)
    quantize(out / "tiny.F16.gguf", out / "tiny.Q4_K_M.gguf")


def main() -> None:
    """Reads the command line and fixes everything that could differ between two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=shipped_model().parent, help="where to write the two files")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    run(parser.parse_args().out)


if __name__ == "__main__":
    main()
