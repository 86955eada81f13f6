"""What a folder keeps of its configuration is a configuration: every resolved document is read back as itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cluster_spec import SlurmSpec
from exitwave.simulate.spec import CampaignSpec
from exitwave.workflows.config import apply_overrides, is_pipeline, parse_document, validate
from exitwave.workflows.pipeline_folder import _resolved, claim
from exitwave.workflows.pipeline_spec import PipelineSpec, read_sections
from exitwave.workflows.resolved import dump_yaml
from exitwave.workflows.scaffold import template_names, template_text
from exitwave.workflows.tune import _resolved as _resolved_search

SLURM = ("cluster.slurm.workers_per_job=4", "launch.nodes=2", "launch.slurm.partition=gpu", "ranks=2")
SPACE = "tune={trials: 2, space: {train.optimizer.lr: {log_uniform: [1e-4, 1e-2]}}, budget: {steps: 200}}"


def read(text: str, model: type[Any], *overrides: str) -> Any:
    document = parse_document(text, source="p.yaml", folder=Path())
    apply_overrides(document, overrides)
    return validate(document, model)


LARGE = ("reconstruct",)  # 30 kB, which YAML takes seconds to read


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LARGE else []) for name in template_names()]
)
def test_the_resolved_document_of_every_template_is_read_back_as_itself(name: str) -> None:
    text = template_text(name)
    if not is_pipeline(parse_document(text, source="p.yaml", folder=Path())):
        campaign = read(text, CampaignSpec)
        assert read(dump_yaml(campaign.model_dump(mode="json")), CampaignSpec) == campaign
        return
    spec = read(text, PipelineSpec, *SLURM, SPACE)
    resolved = _resolved(spec)
    again = read(dump_yaml(resolved), PipelineSpec)
    assert again == spec and _resolved(again) == resolved
    assert _resolved_search(again, None) == _resolved_search(spec, None)


def test_workers_of_a_job_are_still_no_question_of_a_training() -> None:
    with pytest.raises(UsageError, match="workers_per_job is for campaigns"):
        read(template_text("quickstart"), PipelineSpec, "launch.slurm.workers_per_job=2")


def test_a_site_fills_in_what_a_resolved_file_calls_null() -> None:
    resolved = SlurmSpec.model_validate(SlurmSpec().model_dump(mode="json"))
    filled = resolved.filled({"queue": "cpu", "account": "phys", "job-script-prologue": ["module load x"]})
    assert (filled.partition, filled.account, filled.prologue) == ("cpu", "phys", ("module load x",))


def test_a_folder_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """A key that came since has its default there; a key that means another run is still told."""
    spec = read(template_text("quickstart"), PipelineSpec)
    old = _resolved(spec)
    for name in set(old["train"]) - spec.train.model_fields_set:
        del old["train"][name]
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(old))
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.json").write_text("{}")  # a training has begun
    assert claim(tmp_path, spec, fresh=False)
    with pytest.raises(UsageError, match=r"train\.batch"):
        claim(tmp_path, read(template_text("quickstart"), PipelineSpec, "train.batch=3"), fresh=False)


def test_sections_are_set_by_their_names_whatever_the_verb() -> None:
    document = parse_document(template_text("quickstart"), source="p.yaml", folder=Path())
    sections = read_sections(document, ["online.watermark_samples=8", "adaptive=null"], "campaign")
    assert sections.online is not None and sections.adaptive is None
