"""What a checkpoint's folder says of its pooling, and the model with it."""

from __future__ import annotations

import json

import pytest
from ext.port.architectures import pool
from optional import needs

from llamadiff import UserError
from llamadiff.ext.port.pooling import mode_of, with_pooling

ROWS = [[1.0, 10.0], [4.0, 20.0], [1.0, 60.0], [2.0, 38.0]]
POOLED = {
    "cls_token": [1.0, 10.0], "mean_tokens": [2.0, 32.0], "lasttoken": [2.0, 38.0], "max_tokens": [4.0, 60.0],
}  # fmt: skip


@needs("torch", "transformers")
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken", "max_tokens"])
def test_a_model_gives_one_row_for_a_text(mode, tmp_path):
    import torch

    class Own(torch.nn.Module):
        def forward(self, ids):
            return (torch.tensor([ROWS]), ids)

    model = with_pooling(Own(), mode_of(pool(tmp_path, mode)))
    assert model(None).tolist() == [POOLED[mode]]
    assert type(model).__name__ == "Own"


def test_the_newer_form_of_a_config_is_read(tmp_path):
    (pool(tmp_path, "cls_token") / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert mode_of(tmp_path) == "mean"


def test_a_checkpoint_without_modules_has_no_pooling(tmp_path):
    assert mode_of(tmp_path) is None


@pytest.mark.parametrize(
    "said", [{}, [1], {"pooling_mode": "weightedmean"}, {"pooling_mode_cls_token": 1, "pooling_mode_max_tokens": 1}]
)
def test_a_pooling_that_is_not_known_is_refused(said, tmp_path):
    (pool(tmp_path, "cls_token") / "1_Pooling/config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"pooling by .*; known are cls, mean"):
        mode_of(tmp_path)


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "5", "[", '[{"path": 5, "type": "a.Pooling"}]'])
def test_modules_that_are_none_are_refused_or_none(text, tmp_path):
    (tmp_path / "modules.json").write_text(text)
    if text == "[":
        with pytest.raises(UserError, match="not JSON"):
            mode_of(tmp_path)
    else:
        assert mode_of(tmp_path) is None
