"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from exitwave.simulate import make_plan
from exitwave.simulate.spec import CampaignSpec
from exitwave.workflows.config import load_document, validate

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_campaign_can_be_planned_and_loses_nothing(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "my.yaml"
    path.write_text(block, encoding="utf-8")
    plan = make_plan(validate(load_document(path), CampaignSpec), base_dir=tmp_path)
    assert plan.rejected == () and plan.rejected_samples == 0
    assert {task.split for task in plan.tasks} == {"train", "val", "test"}


def test_python_blocks_compile() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "README.md", "exec")


def test_files_it_names_are_there() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)|`((?:examples|simulate|docs)/[^`*]+)`", README):
        path = name[0] or name[1]
        assert (ROOT / path).exists(), path
