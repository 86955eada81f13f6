"""Learns the initial temperature from the later one: a plain PyTorch loop over exitwave's parts, on all ranks.

torchrun --nproc-per-node 2 train.py data/heat --epochs 20
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, collate
from exitwave.train import GroupedAllreduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="samples of one step, over all ranks")
    choices = parser.parse_args()
    dist.init_process_group("gloo")  # torchrun says which rank this is
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    data = ShardDataset(choices.data, fields=("later", "initial"), split="train")
    sampler = GlobalSampler(data, rank=rank, world_size=world, global_batch=choices.batch, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)

    def layer(channels: int, out: int) -> nn.Module:
        return nn.Conv2d(channels, out, 5, padding=2, padding_mode="circular")

    network = nn.Sequential(layer(1, 16), nn.GELU(), layer(16, 16), nn.GELU(), layer(16, 1))
    model = GroupedAllreduce(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(choices.epochs):
        for batch in loader:
            later, initial = batch["later"][:, None], batch["initial"][:, None]
            loss = nn.functional.mse_loss(later + model(later), initial)  # what was lost on the way is learnt
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sampler.commit(choices.batch)
        if rank == 0:
            print(f"epoch {epoch}: {loss.item() ** 0.5:.4f} K")

    if rank == 0:
        test = ShardDataset(choices.data, fields=("later", "initial"), split="test")
        batch = collate([test[i] for i in range(len(test))])
        later, initial = batch["later"][:, None], batch["initial"][:, None]
        with torch.no_grad():
            learnt = nn.functional.mse_loss(later + network(later), initial) ** 0.5
        untouched = nn.functional.mse_loss(later, initial) ** 0.5
        print(f"test: {learnt:.4f} K, {untouched:.4f} K without the network")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
