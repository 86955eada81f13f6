"""One rank that reads its batches and writes down what it has committed: started, and killed, by tests."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from exitwave.ingest import GlobalSampler, ShardDataset, Window, collate


def main(settings: dict[str, Any]) -> None:
    data: Any = ShardDataset(settings["root"])
    window = settings["window"]
    sampler = GlobalSampler(
        data,
        rank=settings["rank"],
        world_size=settings["world_size"],
        global_batch=settings["batch"],
        seed=5,
        window=None if window is None else Window(shards=window[0], structures=window[1]),
    )
    if settings["state"] is not None:
        sampler.load_state_dict(settings["state"])
    workers: dict[str, Any] = {"num_workers": settings["workers"]}
    if settings["workers"]:
        workers |= {"multiprocessing_context": "forkserver", "prefetch_factor": 4}
    with open(settings["log"], "w") as log:  # noqa: PTH123
        for step, batch in enumerate(DataLoader(data, batch_sampler=sampler, collate_fn=collate, **workers), start=1):
            sampler.commit(settings["batch"])
            uids = batch["uid"].numpy().view(np.uint64).tolist()
            log.write(json.dumps({"uids": uids, "state": sampler.state_dict()}) + "\n")
            log.flush()
            if settings["slow_after"] is not None and step >= settings["slow_after"]:
                time.sleep(60)  # until the test kills it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
