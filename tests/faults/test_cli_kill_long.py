"""Many kills at moments that nobody chose: whatever they hit, the line ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from line import end, exitwave, planned_uids, start, uids_of, write_pipeline

from exitwave.ingest.files import hash_file


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_the_line_ends_the_same(seed: int, tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, ("steps: 12", "steps: 60"))
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    assert exitwave("simulate", path, "--out", whole, "--cluster", "inline").returncode == 0
    chance = random.Random(seed)
    for _ in range(10):
        process = start("run", path, "--out", broken, log=log)
        try:
            time.sleep(chance.uniform(0.2, 25))
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
            assert process.wait(60) in (0, 75, -9)
        finally:
            end(process)
    done = exitwave("run", path, "--out", broken)
    assert done.returncode == 0, done.stderr
    assert sorted(uids_of(broken / "dataset")) == sorted(planned_uids(path))
    shards = sorted((whole / "shards").rglob("*.h5"))
    assert len(shards) == 8
    for shard in shards:
        assert hash_file(shard) == hash_file(broken / "dataset" / shard.relative_to(whole))
    assert "Traceback" not in log.read_text()
