"""Lightning's Trainer on two ranks with our engine gives DDPStrategy's weights. Needs `lightning` (an extra)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import rank_checks
import torch

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

import lightning
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from exitwave.train.lightning_strategy import GroupedAllreduceStrategy


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.seen.append(float((self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def the_weights_are_those_of_ddp(rank: int, size: int) -> None:
    samples = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(3)))
    found = {}
    for name, strategy in {
        "ddp": DDPStrategy(process_group_backend="gloo"),
        "backward": GroupedAllreduceStrategy(process_group_backend="gloo"),
        "step": GroupedAllreduceStrategy(process_group_backend="gloo", engine={"overlap": "step"}),
    }.items():
        model = Small()
        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=size,
            max_epochs=3,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(samples, batch_size=4), DataLoader(samples, batch_size=8))
        found[name] = (torch.cat([p.detach().flatten() for p in model.parameters()]), model.seen)
    seen = found["ddp"][1]  # two of the sanity check, then three an epoch
    assert sum(seen[-3:]) < sum(seen[2:5]), "it did not learn; the comparison says little"
    for name in ("backward", "step"):
        torch.testing.assert_close(found[name][0], found["ddp"][0], rtol=1e-5, atol=1e-6)
        assert found[name][1] == pytest.approx(found["ddp"][1], rel=1e-4)


CHECKS = [the_weights_are_those_of_ddp]


@pytest.mark.long
def test_two_ranks(tmp_path):
    results = rank_checks.launch(__file__, 2, tmp_path)
    for check in CHECKS:
        rank_checks.expect_passed(results, check)


if __name__ == "__main__":
    rank_checks.run_here(CHECKS, Path(sys.argv[1]))
