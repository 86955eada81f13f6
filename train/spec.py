"""What to train: one frozen model per component, checked when it is read.

A `TrainSpec` is the `train:` section of a pipeline, or a file of its own. Names carry units, unknown keys are refused.
Two equal specs on the same data give the same loss curve (on one rank to the bit), unless `max_seconds` is set.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from exitwave.ingest.errors import UsageError
from exitwave.ingest.strict_model import StrictModel
from exitwave.train.series_spec import SeriesSpec

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EngineSpec",
    "LarcSpec",
    "LossScaleSpec",
    "LossSpec",
    "ModelSpec",
    "OptimizerSpec",
    "TrainSpec",
    "WindowSpec",
    "refuse_online",
    "spec_difference",
    "with_defaults",
]


class ModelSpec(StrictModel):
    """The network: a preset's sizes, each of which may be overridden."""

    name: Literal["fc-densenet"] = "fc-densenet"
    preset: Literal["tiny", "small", "paper-23M", "paper-40M", "paper-220M"] = "tiny"
    layout: Literal["detector-as-channels", "probes-as-channels"] = "detector-as-channels"
    growth: int | None = Field(default=None, ge=1, le=4096)
    layers: tuple[Annotated[int, Field(ge=1, le=64)], ...] | None = None
    kernel: int | None = Field(default=None, ge=1, le=255)
    up_kernel: int | None = Field(default=None, ge=1, le=255)
    skips: bool | None = None
    norm: Literal["group", "none"] | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)
    stem: tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None = None
    stem_kernel: int | None = Field(default=None, ge=1, le=255)

    def overrides(self) -> dict[str, object]:
        """The sizes that were given, by the names of `DenseNetSize`."""
        sizes = self.model_dump(exclude={"name", "preset", "layout"})
        return {name: value for name, value in sizes.items() if value is not None}


class DetectorOptions(StrictModel):
    """Strengths of what source, scan and detector do beside the dose, by the names of `ingest.detector_model`."""

    dose_e_per_A2: float | None = Field(default=None, gt=0, description="where data.dose_e_per_pattern is null")
    source_fwhm_A: float = Field(default=0.0, ge=0, description="at least two steps of the scan, or 0")
    scan_jitter_A: float = Field(default=0.0, ge=0, description="needs a source")
    mtf_nyquist: float = Field(default=1.0, ge=0, le=1)
    background: float = Field(default=0.0, ge=0, description="part of the beam, over the whole detector")
    ellipticity: float = Field(default=0.0, ge=0, le=0.5)
    descan_pixels: float = Field(default=0.0, ge=0)
    dead_fraction: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _source_for_jitter(self) -> DetectorOptions:
        if self.scan_jitter_A and not self.source_fwhm_A:
            raise ValueError("scan_jitter_A needs source_fwhm_A: between two positions there is nothing to read")
        return self


class WindowSpec(StrictModel):
    """How many shards and different structures a moving shuffle mixes at least; see `ingest.windows.Window`."""

    shards: int = Field(default=10, ge=1)
    structures: int = Field(default=64, ge=1)


class DataSpec(StrictModel):
    """What the network sees of a sample.

    input, target: fields of other simulators' samples, to learn the one from the other (`train.fields`): all that
        follows below, down to `augment`, is about diffraction patterns and has no meaning then.

    dose_e_per_pattern: mean counts per pattern of the Poisson noise; null for noise-free patterns.
    detector: what source, scan and detector do beside it, drawn by (epoch, uid).
    normalise: divide each sample by its detected sum (the incident beam is unknown in experiments), or not.
    transform: applied to the normalised patterns, scaled so that values are of order one; zscore acts on each pattern.
    detector_bin: the detector is summed down to this many pixels each way; null keeps it.
    physics: images derived from the same noisy patterns, added as channels: the centre of mass and its integral.
    conditions: what an experimenter knows, added as constant channels; thickness and defocus are seldom known.
    augment: mirror and transpose scan, detector and label together, drawn by (epoch, uid).
    window: shuffle through a moving window of shards, for a cache smaller than the data set; null mixes all samples.
    """

    input: str | tuple[str, ...] | None = None
    target: str | None = None
    dose_e_per_pattern: float | None = Field(default=1e4, gt=0)
    detector: DetectorOptions = DetectorOptions()
    normalise: Literal["detected-sum", "none"] = "detected-sum"
    transform: Literal["sqrt", "log1p", "zscore", "none"] = "sqrt"
    detector_bin: int | None = Field(default=16, ge=1)
    physics: tuple[Literal["com", "icom"], ...] = ("com", "icom")
    conditions: tuple[Literal["energy_keV", "semiangle_mrad", "R_sampling_A", "thickness_A", "defocus_A"], ...] = (
        "energy_keV",
        "semiangle_mrad",
        "R_sampling_A",
    )
    augment: Literal["none", "dihedral"] = "dihedral"
    window: WindowSpec | None = None
    workers: int = Field(default=0, ge=0, le=256, description="loader processes per rank; 0 reads in the rank itself")
    ahead: int = Field(default=2, ge=0, le=64, description="batches that a thread makes ready while a step runs")

    @model_validator(mode="after")
    def _input_with_target(self) -> DataSpec:
        if (self.input is None) != (self.target is None):
            raise ValueError("data.input and data.target belong together: name both fields, or neither")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class LarcSpec(StrictModel):
    """Layer-wise adaptive rates over the network's blocks, of sgd; see `train.larc`."""

    trust: float = Field(default=0.02, gt=0, description="a block's step is at most this part of its weights' norm")


class OptimizerSpec(StrictModel):
    """AdamW, SGD or LAMB with a warm-up and a decay; `clip` bounds the norm of the whole gradient (null: none).

    lr: of the given batch, or, with `lr_batch`, of a batch of so many samples: it is scaled by batch / lr_batch.
    schedule: cosine falls to `final_lr_fraction`; step multiplies by `decay_factor` every `decay_every_steps`.
    ema: the weights that are saved in the end are a running mean of those trained, with this decay; null: the last.
    """

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    lr: float = Field(default=2e-3, gt=0)
    lr_batch: int | None = Field(default=None, ge=1)
    weight_decay: float = Field(default=1e-2, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    eps: float = Field(default=1e-8, gt=0, description="of adamw: gradients well below it move a weight in proportion")
    momentum: float = Field(default=0.9, ge=0, lt=1)
    larc: LarcSpec | None = None
    schedule: Literal["cosine", "constant", "step"] = "cosine"
    decay_every_steps: int = Field(default=1000, ge=1)
    decay_factor: float = Field(default=0.1, gt=0, le=1)
    warmup_steps: int = Field(default=20, ge=0)
    final_lr_fraction: float = Field(default=0.01, ge=0, le=1)
    clip: float | None = Field(default=1.0, gt=0)
    ema: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _larc_with_sgd(self) -> OptimizerSpec:
        if self.larc is not None and self.name != "sgd":
            raise ValueError(
                f"larc scales gradients, which {self.name} does not notice: expected name: sgd (lamb has rates of "
                "its own for each tensor)"
            )
        return self


class LossSpec(StrictModel):
    """`offset_weight` weighs the error of a sample's mean against that of its structure, which is what is scored.

    pairwise: the squared error of differences between pixels, over all pairs.
    """

    name: Literal["mse", "huber", "l1", "pairwise"] = "huber"
    delta: float = Field(default=1.0, gt=0, description="of huber, in standard deviations of the target")
    offset_weight: float = Field(default=0.1, ge=0)
    unit: Literal["V", "VA"] = Field(
        default="VA", description="V judges potential over thickness, which is scored: thin samples count as thick ones"
    )


class LossScaleSpec(StrictModel):
    """Dynamic loss scaling of fp16: halved when a gradient overflows, doubled after `growth_steps` clean steps."""

    start: float = Field(default=2.0**24, gt=0)
    growth_steps: int = Field(default=2000, ge=1)


class EngineSpec(StrictModel):
    """Handed to `GroupedAllreduce` as it is."""

    protocol: str = "static"
    grouping: str = "bytes"
    overlap: str = "backward"
    timeout_s: float = Field(default=300.0, gt=0)


class CheckpointSpec(StrictModel):
    """A checkpoint every so many steps (and at the end); the last `keep` stay."""

    every_steps: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)


class TrainSpec(StrictModel):
    """The whole of a training. `batch` counts samples over all ranks.

    task: `reconstruct` the projected potential from patterns (`model`, `data`), `classify` patterns by the crystal's
        space group (`data`; of `model` only growth, the first width, and dropout), or, from through-focal series
    (`series`), the potential's `volume`, or `regress` parameters.
    """

    task: Literal["reconstruct", "classify", "volume", "regress"] = "reconstruct"
    model: ModelSpec = ModelSpec()
    series: SeriesSpec = SeriesSpec()
    data: DataSpec = DataSpec()
    batch: int = Field(default=16, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0)
    optimizer: OptimizerSpec = OptimizerSpec()
    loss: LossSpec = LossSpec()
    engine: EngineSpec = EngineSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    seed: int = Field(default=0, ge=0, lt=2**63)
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = Field(
        default="fp32",
        description="bf16 and fp16: where the operator allows it, with weights and their updates in fp32; fp64 is slow",
    )
    loss_scale: LossScaleSpec = LossScaleSpec()
    accumulate: int = Field(default=1, ge=1, description="backward passes a step, each over its part of the batch")
    gradient_checkpointing: bool = Field(default=False, description="compute activations again: less memory, slower")
    compile: bool = Field(default=False, description="torch.compile; needs a C++ compiler, and minutes to begin")
    device: Literal["cpu", "cuda"] = "cpu"
    deterministic: bool | Literal["any-ranks"] = Field(
        default=True,
        description="true: the same bits on the same number of ranks; any-ranks: on any number of them (slower)",
    )
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    train_split: str = "train"
    val_split: str = "val"
    eval_every_steps: int | None = Field(default=None, ge=1, description="validation loss this often; null: never")

    @model_validator(mode="after")
    def _check(self) -> TrainSpec:
        if self.epochs is None and self.steps is None and self.max_seconds is None:
            raise ValueError("how long to train? give epochs, steps or max_seconds (the first to be reached ends it)")
        if self.max_seconds is not None and self.deterministic:
            raise ValueError(
                "max_seconds makes the number of steps depend on the machine's speed; set deterministic: false with it"
            )
        if self.engine.overlap == "step" and self.optimizer.name == "lamb":
            raise ValueError("engine.overlap: step updates parts of tensors, lamb needs whole ones: use backward")
        if self.engine.overlap == "step" and self.optimizer.larc is not None:
            raise ValueError("engine.overlap: step updates parts of tensors, larc needs whole ones: use backward")
        if self.deterministic == "any-ranks" and self.engine.overlap == "step":
            raise ValueError("deterministic: any-ranks sums gradients by itself: expected engine.overlap: backward")
        if self.deterministic == "any-ranks" and self.accumulate > 1:
            raise ValueError("deterministic: any-ranks takes one sample at a time by itself: leave accumulate at 1")
        return self

    def canonical(self) -> dict[str, Any]:
        """The spec as plain JSON values, defaults filled in."""
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    def fingerprint(self) -> str:
        """A short hash of the canonical form."""
        return hashlib.sha256(json.dumps(self.canonical(), sort_keys=True).encode()).hexdigest()[:16]


def with_defaults(old: dict[str, Any]) -> dict[str, Any]:
    """A canonical spec of an older version with the defaults of options that came since; as it is where none fits."""
    try:
        return TrainSpec.model_validate(old).canonical()
    except ValueError:
        return old


def spec_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `key.path: old -> new` for all that differs between two canonical specs; empty where they agree."""
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)  # an option that came later is null where it is absent
        if isinstance(before, dict) and isinstance(after, dict):
            lines += spec_difference(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}")
    return lines


def refuse_online(spec: TrainSpec) -> None:
    """UsageError for a training that cannot begin before its data is there."""
    if spec.task != "reconstruct":
        raise UsageError(
            f"--online: a training of task {spec.task} measures its whole training set first; run it without --online"
        )
    if spec.data.workers:
        raise UsageError("--online: a thread of each rank reads; expected train.data.workers: 0")
    if spec.data.window is not None:
        raise UsageError("--online: the order comes from the reservoir; leave train.data.window out")
