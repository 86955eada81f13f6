"""The 3D U-Net: shapes, blocks, gradients for every parameter, refusals."""

from __future__ import annotations

import pytest
import torch

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.groups import assign_blocks
from exitwave.train.models.unet3d import UNet3D


def test_the_output_has_the_inputs_grid_and_every_parameter_a_gradient():
    model = UNet3D(in_channels=2, out_channels=3, width=4, levels=2)
    y = model(torch.randn(2, 2, 4, 8, 12))
    assert y.shape == (2, 3, 4, 8, 12)
    y.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    blocks = set(assign_blocks([name for name, _ in model.named_parameters()]).values())
    assert blocks == {"down1", "down2", "bottom", "unpool1", "unpool2", "up1", "up2", "final"}


def test_it_sees_far_and_learns_a_volume():
    torch.manual_seed(0)
    model = UNet3D(width=4, levels=1)
    x = torch.randn(1, 1, 4, 4, 4)
    wanted = x.roll(1, dims=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_grid_that_cannot_be_pooled_is_refused():
    with pytest.raises(UsageError, match=r"depth divisible by 8, .*got \(4, 8, 8\)"):
        UNet3D()(torch.zeros(1, 1, 4, 8, 8))
    with pytest.raises(UsageError, match="at least 1"):
        UNet3D(levels=0)
    with pytest.raises(UsageError, match="widening"):
        UNet3D(widening="third")


def test_flat_volumes_keep_their_depth_at_the_lowest_levels():
    y = UNet3D(width=2, levels=3, flat=2)(torch.randn(1, 1, 2, 8, 16))
    assert y.shape == (1, 1, 2, 8, 16)
