"""Checkpoints are told by their names; what somebody else puts beside them is none."""

from __future__ import annotations

from pathlib import Path

from exitwave.train.checkpoints import checkpoint_name, last_step, whole_checkpoints


def test_only_whole_checkpoints_count_and_by_their_step(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    folder = tmp_path / "checkpoints"
    for name in (
        checkpoint_name(20),
        checkpoint_name(3),
        "step-100000000",
        "step-old",
        "step-²",
        ".step-00000030.part",
    ):
        (folder / name).mkdir(parents=True)
    (folder / checkpoint_name(40)).write_text("no folder")
    assert [step for step, _ in whole_checkpoints(folder)] == [3, 20, 100_000_000]
    assert last_step(tmp_path) == 100_000_000
