"""Keyed dropout: the mask belongs to (seed, step, uid, layer) and to nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exitwave.train.dropout import KeyedDropout, set_dropout_key
from exitwave.train.keys import key_of


def _masks(uids, *, seed=1, step=5, p=0.2):
    model = nn.Sequential(KeyedDropout(p), nn.Identity(), KeyedDropout(p))
    set_dropout_key(model, seed=seed, step=step, uids=uids)
    x = torch.ones(len(uids), 4, 16, 16)
    return model[0](x), model[2](x)


def test_mask_does_not_depend_on_the_batch():
    first, _ = _masks([7, 8, 9])
    alone, _ = _masks([8])
    assert torch.equal(first[1], alone[0])
    swapped, _ = _masks([9, 8, 7])
    assert torch.equal(first, swapped.flip(0))


def test_mask_differs_by_uid_step_seed_and_layer():
    first, second = _masks([7])
    others = [_masks([8])[0], _masks([7], step=6)[0], _masks([7], seed=2)[0], second]
    assert all(not torch.equal(first, other) for other in others)


def test_keeps_the_mean_and_does_nothing_in_evaluation():
    first, _ = _masks(list(range(200)), p=0.25)
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float(first.mean()) - 1) < 0.01
    layer = KeyedDropout(0.5).eval()
    x = torch.randn(3, 4)
    assert torch.equal(layer(x), x)


def test_a_forgotten_key_is_an_error():
    with pytest.raises(RuntimeError, match="expected the uids of 2 samples, have none"):
        KeyedDropout(0.5)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="probability"):
        KeyedDropout(1.0)


def test_keys_do_not_run_into_one_another():
    assert key_of("a", 1, 23) != key_of("a", 12, 3)
    assert key_of("1") != key_of(1)
    assert key_of("dose", 0, 2**64 - 1) == key_of("dose", 0, 2**64 - 1)
