"""What is wrong with a dumped weight."""

from __future__ import annotations

from llamadiff.engines.reference_model import Model
from llamadiff.ext.file.weight_faults import weight_fault


def test_faults_of_weights_are_told_apart(small_model):
    model = Model(small_model("llama", "Q8_0"))
    weight = model.engine.w.whole("blk.0.ffn_up.weight")
    assert weight_fault(model, "blk.0.ffn_up.weight", weight) is None
    other = model.engine.w.whole("blk.1.ffn_up.weight")
    assert weight_fault(model, "blk.0.ffn_up.weight", other) == "these are the values of blk.1.ffn_up.weight"
    shifted = weight.reshape(-1).copy()
    shifted[32 * 100 :] = 0
    fault = weight_fault(model, "blk.0.ffn_up.weight", shifted)
    assert "number 100 of 4096" in fault
    assert fault.endswith("every block from there on is wrong")
    nibbles = weight.reshape(-1, 2)[:, ::-1].reshape(-1)
    told = weight_fault(model, "blk.0.ffn_up.weight", nibbles)
    assert told == "of every 2 columns the order is another: 1, 0"
    assert "5 values where the file has" in weight_fault(model, "blk.0.ffn_up.weight", weight.reshape(-1)[:5])
    one = weight.copy()
    one[3, 70] += 1
    assert "1 are wrong in all" in weight_fault(model, "blk.0.ffn_up.weight", one)
