"""Why llama.cpp's graph parts from a model: a known bug, with the sides exchanged.

What the model has in a node's place is judged as a candidate's tap that was computed from llama.cpp's own inputs. The
edit of llama.cpp's graph that gives the model's values is what the model does, and the graph does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamadiff.comparison.judging import judge
from llamadiff.diagnose.diagnosis import Cause
from llamadiff.engines.graph_model import GraphModel
from llamadiff.engines.run_spec import How
from llamadiff.ggml.graph import GraphNode, tap_axes
from llamadiff.port.lineup import Departed
from llamadiff.trace.reader import Trace

Array = NDArray[Any]


def cause_of(model: GraphModel, baseline: Trace, parting: Departed, how: How) -> Cause | None:
    """What the model does there, as if it were a bug of its own; None where no known one gives the model's values.

    ``baseline``: llama.cpp's run.
    """
    for number in range(parting.fused, len(parting.nodes) + 1):
        cause = _cause_at(model, baseline, parting.nodes[:number], parting.values, how)
        if cause is not None:
            return cause
    return None


def _cause_at(
    model: GraphModel, baseline: Trace, nodes: Sequence[GraphNode], values: Array | None, how: How
) -> Cause | None:
    """That of the last of some nodes, of which the others have no values of the model's."""
    label = nodes[-1].label
    if label is None or values is None:
        return None
    names = list(model.graph.labelled)
    between = [node.label for node in nodes]
    before = [name for name in names[: names.index(label)] if name in baseline and name not in between]
    shape = baseline.shape(label) if label in baseline else tap_axes(label, values.shape, len(model.graph.tokens))
    if int(np.prod(shape)) != values.size:
        return None
    arrays = {**{name: baseline[name] for name in before}, label: values.astype(np.float32).reshape(shape)}
    info = replace(baseline.info, producer={"name": "the model"})
    found = judge(model, baseline, Trace(info, arrays, dict.fromkeys(arrays, "F32")), how)
    causes = [cause for each in found.diagnosis if label in each.taps for cause in each.causes]
    return causes[0] if causes else None
