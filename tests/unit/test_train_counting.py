"""CosmoFlow and the 3D U-Net are the published ones: parameters, FLOP and memory of the published table."""

from __future__ import annotations

import pytest
import torch

from exitwave.ingest.errors import UsageError
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.counting import count
from exitwave.train.models.unet3d import UNet3D


@pytest.mark.parametrize(
    ("side", "gflop", "digits", "gib"), [(128, 18.52, 2, 0.824), (256, 147.9, 1, 6.59), (512, 1183, 0, 52.7)]
)
def test_cosmoflow_is_that_of_the_published_table(side: int, gflop: float, digits: int, gib: float):
    with torch.device("meta"):
        model = CosmoFlow(in_shape=(side,) * 3)
    counted = count(model, (1, 4, side, side, side))
    assert counted.parameters == 9_437_636
    assert round(counted.convolution_flop / 1e9, digits) == gflop
    assert float(f"{counted.memory_GiB:.3g}") == gib
    # what the fully connected layers add is the same at all sizes
    assert counted.flop - counted.convolution_flop == 2 * (2048 * 2048 + 2048 * 256 + 256 * 4)


def test_cosmoflow_pools_as_the_paper_says():
    with torch.device("meta"):
        pools = {n: _pooled(CosmoFlow(in_shape=(n,) * 3)) for n in (128, 256, 512)}
    assert pools == {128: [1, 2, 3, 4, 5], 256: [1, 2, 3, 4, 5, 6], 512: [1, 2, 3, 4, 5, 6, 7]}


def _pooled(model: CosmoFlow) -> list[int]:
    return [k for k in range(1, 8) if any(isinstance(m, torch.nn.AvgPool3d) for m in getattr(model, f"conv{k}"))]


def test_cosmoflow_with_batch_norm_adds_two_numbers_a_filter():
    with torch.device("meta"):
        model = CosmoFlow(in_shape=(128,) * 3, norm="batch")
    assert sum(p.numel() for p in model.parameters()) == 9_437_636 + 2 * (16 + 32 + 64 + 128 + 3 * 256)


def test_cosmoflow_of_flat_samples_learns_two_numbers():
    torch.manual_seed(0)
    model = CosmoFlow(in_shape=(4, 16, 8), in_channels=1, outputs=2, widths=(4, 8, 8, 8), hidden=(16,), dropout=0.0)
    x = torch.randn(16, 1, 4, 16, 8)
    wanted = torch.stack([x.mean(dim=(1, 2, 3, 4)) * 20, x.std(dim=(1, 2, 3, 4))], dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("wrong", [{"in_shape": (128, 128)}, {"in_shape": (96, 128, 128)}, {"norm": "group"}])
def test_cosmoflow_refuses_other_shapes(wrong: dict[str, object]):
    with pytest.raises(UsageError, match="expected"):
        CosmoFlow(**({"in_shape": (128, 128, 128)} | wrong))  # type: ignore[arg-type]


def test_the_papers_unet_has_19_07_million_parameters():
    with torch.device("meta"):
        model = UNet3D(width=32, levels=3, widening="second", norm="batch")
    counted = count(model, (1, 1, 64, 64, 64))
    assert round(counted.parameters / 1e6, 2) == 19.07
    convolutions = [layer for layer in counted.layers if layer.kind == "Conv3d"]
    assert [(layer.in_shape[1], layer.out_shape[1]) for layer in convolutions[:8]] == [
        (1, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512),
    ]  # fmt: skip


def test_flop_of_small_layers_by_hand():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2, padding=1, groups=1), torch.nn.ConvTranspose2d(4, 2, 2, stride=2)
    )
    counted = count(model, (2, 3, 8, 8))
    # 2 x (4 channels x 4 x 4 places x 27 weights); 2 x (4 channels x 4 x 4 places x 8 weights), two samples
    assert [layer.flop for layer in counted.layers] == [2 * 2 * 64 * 27, 2 * 2 * 64 * 8]
    grouped = count(torch.nn.Conv2d(4, 4, 3, padding=1, groups=2), (1, 4, 5, 5))
    assert grouped.flop == 2 * 4 * 25 * (2 * 9)
    assert next(model.parameters()).device.type == "cpu"
