"""Runs a model's trunk and then its heads in llama.cpp, as common/speculative.cpp feeds them; in its process.

Each token goes in with the trunk's hidden state of the token before it, the first one with zeros.
"""

from __future__ import annotations

from llamadiff.ext.heads.head_library import HeadLibrary
from llamadiff.llamacpp.interface import Handle, Library
from llamadiff.llamacpp.observer import GRAPH, PLACES, Observer
from llamadiff.llamacpp.request import TOKENIZING, Request, Say
from llamadiff.llamacpp.session import Quiet, load, tokenize, without_bos
from llamadiff.llamacpp.tensor_transport import Feed
from llamadiff.system.errors import UserError


def run_heads(library: Library, request: Request, say: Say, feed: Feed) -> None:
    """An errand: the graphs of trunk and heads, then the values that are asked for."""
    heads = HeadLibrary(library)
    say(phase="loading the model into llama.cpp")
    with Quiet(library):
        model = load(library, request)
        count = heads.count(model)
        if not count:
            raise no_head(request.model)
        request = without_bos(library, model, request)
        say(phase=TOKENIZING)
        tokens = list(request.tokens) or tokenize(library, model, request)
        if len(tokens) < 2:
            raise UserError(f"{request.model}: a head pairs a token with the one before it; give at least 2 tokens")
        say(phase="running llama.cpp")
        observer = HeadObserver(library, model, request, tokens, feed)
        observer.heads, observer.count = heads, count
        observer.run(say)
        library.lib.llama_model_free(model)


def no_head(model: str) -> UserError:
    """What to say of a model without one."""
    return UserError(
        f"{model}: has no head that predicts a token more (nextn_predict_layers); llamadiff compare judges the model "
        "itself"
    )


class HeadObserver(Observer):
    """A run of the trunk, then of each head: their graphs; then, in contexts anew, values of some nodes."""

    heads: HeadLibrary
    count: int

    def run(self, say: Say) -> None:
        self._tell(GRAPH, whole=True)
        self._run_parts()
        self.feed.send({"asks": True})
        wanted = self.feed.await_word("places")
        self._tell(PLACES)
        self._run_parts(wanted)
        self.feed.send({"ended": {"tokens": self.tokens, "weights_read": sorted(self.weights_read)}})

    def _run_parts(self, wanted: list[list[int]] | None = None) -> None:
        """The trunk (part 0) and the heads, each in a context of its own: so no tensor has another's address."""
        hidden = b""
        for part in range(self.count + 1):
            self.heads.begin(part > 0)
            context = self._context()
            self.heads.show_hidden(context, masked=part > 0)
            if part:
                self.heads.choose(context, part - 1)
                self.heads.pair_with(self._moved_on(hidden))
            self.places, self.kinds = set(wanted[part]) if wanted else set(), set()
            self._begin()
            self.feed.send({"part": part})
            self._decode(context, self.tokens, 0)
            hidden = hidden or self._hidden(context)
        self.heads.begin(False)
        self.close()
        self.contexts.clear()

    def _hidden(self, context: Handle) -> bytes:
        return self.heads.hidden(context, len(self.tokens) * self.heads.width(self.model))

    def _moved_on(self, hidden: bytes) -> bytes:
        """Each token's row is that of the token before."""
        row = len(hidden) // len(self.tokens)
        return bytes(row) + hidden[: len(hidden) - row]
