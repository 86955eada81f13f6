"""FC-DenseNet: the paper's sizes by arithmetic, the layouts' shapes, blocks, and the grids' registration."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from exitwave.ingest.errors import UsageError
from exitwave.train.models import build_model
from exitwave.train.models.fc_densenet import interpolation_matrix


@pytest.mark.parametrize(("preset", "millions"), [("paper-23M", 22.9), ("paper-40M", 39.6), ("paper-220M", 220.1)])
@pytest.mark.parametrize("norm", ["group", "none"])
def test_parameter_counts_of_the_paper(preset, millions, norm):
    with torch.device("meta"):
        model = build_model(
            preset=preset,
            layout="probes-as-channels",
            in_channels=1024,
            in_shape=(512, 512),
            out_shape=(512, 512),
            overrides={"norm": norm},
        )
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize(("preset", "tera"), [("paper-23M", 8.0), ("paper-40M", 19.9), ("paper-220M", 87.5)])
def test_floating_point_operations_of_a_training_sample_are_the_paper_s(preset, tera):
    """Forward and twice that backward, 1024 patterns of 512 x 512; multiplications and additions count apart."""
    with torch.device("meta"):
        model = build_model(
            preset=preset,
            layout="probes-as-channels",
            in_channels=1024,
            in_shape=(512, 512),
            out_shape=(512, 512),
            overrides={"norm": "none"},
        ).eval()
        sample = torch.empty(1, 1024, 512, 512)
    with FlopCounterMode(display=False) as counted:
        model(sample)
    assert round(3 * counted.get_total_flops() / 1e12, 1) == tera


@pytest.mark.parametrize(
    ("layout", "channels", "plane"), [("detector-as-channels", 70, (8, 8)), ("probes-as-channels", 66, (16, 16))]
)
@pytest.mark.parametrize("up_kernel", [1, 3])
@pytest.mark.parametrize("skips", [True, False])
def test_layouts_give_the_label_grid_and_every_parameter_a_gradient(layout, channels, plane, up_kernel, skips):
    model = build_model(
        preset="tiny",
        layout=layout,
        in_channels=channels,
        in_shape=plane,
        out_shape=(32, 32),
        overrides={"growth": 4, "up_kernel": up_kernel, "skips": skips},
    )
    out = model(torch.randn(2, channels, *plane))
    assert out.shape == (2, 32, 32)
    out.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().any()] == []


def test_every_parameter_lies_in_a_block_the_final_layer_too():
    model = build_model(
        preset="tiny", layout="detector-as-channels", in_channels=8, in_shape=(8, 8), out_shape=(32, 32)
    )
    blocks = {name for name, _ in model.named_children()}
    assert {name.split(".")[0] for name, _ in model.named_parameters()} <= blocks
    assert {"stem", "initial", "down1", "pool1", "bottleneck", "up1", "final"} <= blocks


def test_interpolation_keeps_the_common_origin_and_a_linear_ramp():
    weights = interpolation_matrix(8, 32).double()
    ramp = weights @ torch.arange(8.0).double()
    expected = (torch.arange(32).double() / 4).clamp(max=7)
    assert torch.allclose(ramp, expected, atol=1e-6)
    assert torch.equal(interpolation_matrix(1, 4), torch.ones(4, 1))


def test_a_grid_that_pooling_does_not_divide_is_refused_by_name():
    with pytest.raises(UsageError, match=r"model\.layers.*30x30.*divisible by 4"):
        build_model(preset="tiny", layout="detector-as-channels", in_channels=8, in_shape=(8, 8), out_shape=(30, 30))
