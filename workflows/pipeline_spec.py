"""The sections of a pipeline file, and reading one of them.

A verb that uses one section checks them all, so that a slip is told by the first verb that sees the file and not by
the last, hours later. A file for `plan`, `simulate` or `train` alone may lack what these do not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from exitwave.ingest.errors import UsageError
from exitwave.ingest.strict_model import StrictModel
from exitwave.simulate.cluster import EXPECTED, is_cluster_name
from exitwave.simulate.cluster_spec import SlurmSpec
from exitwave.simulate.spec import CampaignSpec
from exitwave.train.spec import TrainSpec
from exitwave.workflows.adaptive_spec import AdaptiveSection, conflict
from exitwave.workflows.config import Document, apply_overrides, parse_bytes, validate
from exitwave.workflows.nodes_spec import LaunchSection
from exitwave.workflows.online_spec import OnlineSection
from exitwave.workflows.tune_space import space_faults
from exitwave.workflows.tune_spec import TuneSpec

__all__ = ["PipelineSections", "PipelineSpec", "read_sections"]


class ClusterSection(StrictModel):
    """Where the simulation runs. `tls` encrypts what goes between processes: by default only where it leaves a host."""

    kind: str = "local"
    workers: int | None = Field(default=None, ge=1, le=100_000)
    tls: bool | None = None
    slurm: SlurmSpec = SlurmSpec()

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if not is_cluster_name(value):
            raise ValueError(f"expected {EXPECTED}; got {value!r}")
        return value


class StageSection(StrictModel):
    """How much of the local disk the cache may take, and what it holds: `replicate`, all; `stream`, what comes next."""

    mode: Literal["replicate", "stream"] = "replicate"
    capacity: str | None = None

    @model_validator(mode="after")
    def _stream_has_a_capacity(self) -> StageSection:
        if self.mode == "stream" and self.capacity is None:
            raise ValueError("mode stream needs a capacity; without one, say replicate")
        return self

    @field_validator("capacity", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        if value is not None:
            try:
                parse_bytes(value, "capacity")
            except UsageError as error:
                raise ValueError(str(error).removeprefix("capacity: ")) from None
        return None if value is None else str(value)


SplitName = Literal["train", "val", "test", "new_composition", "new_prototype"]


class EvaluateSection(StrictModel):
    """Which samples the network is measured on; of several splits the first one leads the report."""

    split: SplitName | Annotated[tuple[SplitName, ...], Field(min_length=1)] = "test"

    @property
    def splits(self) -> tuple[SplitName, ...]:
        return (self.split,) if isinstance(self.split, str) else self.split


class PipelineSections(StrictModel):
    """A pipeline file of which a verb uses one section."""

    name: str = Field(default="run", min_length=1)
    campaign: CampaignSpec | None = None
    cluster: ClusterSection = ClusterSection()
    stage: StageSection = StageSection()
    train: TrainSpec | None = None
    ranks: int = Field(default=1, ge=1, le=100_000)
    launch: LaunchSection = LaunchSection()
    evaluate: EvaluateSection = EvaluateSection()
    adaptive: AdaptiveSection | None = None
    online: OnlineSection | None = None
    tune: TuneSpec | None = None

    @model_validator(mode="after")
    def _steerable(self) -> PipelineSections:
        if self.adaptive is None or self.campaign is None or self.train is None:
            return self
        if (reason := conflict(self.adaptive, self.campaign, self.train)) is not None:
            raise ValueError(f"adaptive: {reason}")
        return self

    @model_validator(mode="after")
    def _space_fits(self) -> PipelineSections:
        faults = [] if self.tune is None else space_faults(self.tune, self.train)
        if faults:
            details = [
                InitErrorDetails(
                    type=PydanticCustomError("value_error", "{text}", {"text": fault.message}),
                    loc=fault.path,
                    input=None,
                )
                for fault in faults
            ]
            raise ValidationError.from_exception_data("tune", details)
        return self


class PipelineSpec(PipelineSections):
    """The whole line."""

    campaign: CampaignSpec
    train: TrainSpec


def read_sections(
    document: Document, overrides: Sequence[str], section: Literal["campaign", "train"]
) -> PipelineSections:
    """All sections of a pipeline file, checked; `section` is the one whose keys `--set` means, and must be there.

    Raises UsageError naming file, line and key of every fault.
    """
    apply_overrides(document, overrides, section=section)
    sections = validate(document, PipelineSections)
    if getattr(sections, section) is None:
        have = ", ".join(key for key in document.data if key in PipelineSections.model_fields)
        raise UsageError(f"{document.source}: this pipeline has no `{section}:` section (it has: {have}).")
    return sections
