"""The first layer that is to blame is named."""

from __future__ import annotations

import torch
from torch import nn

from exitwave.train.nonfinite import first_bad_layer


def test_names_the_first_bad_layer():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    x = torch.ones(4, 2)
    assert first_bad_layer(model, x) == "(the loss, or the label)"
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    assert first_bad_layer(model, x) == "1"
    x[2, 1] = float("inf")
    assert first_bad_layer(model, x) == "(the input itself)"
    assert not model[0]._forward_hooks, "the hooks are gone"
