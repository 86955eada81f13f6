"""What a training on through-focal series is told: the keys under `series:` of a training.

Two tasks use the same samples: `volume` recovers the potential by slabs, `regress` a few numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from exitwave.ingest.strict_model import StrictModel

__all__ = ["SeriesSpec"]


class SeriesSpec(StrictModel):
    """Input and network of the tasks `volume` and `regress`.

    input, target: fields of the samples: (F, H, W) images and, of `volume`, (Z, H, W) slabs.
    targets: parameters that `regress` learns.
    crop: only the middle crop x crop pixels of each sample are read and trained on; null: all.
    dose_e_per_pixel: mean counts a pixel of Poisson noise, drawn by (epoch, uid, image, row); null: noise-free.
    width, levels: channels of the U-Net's first level, and its poolings.
    filters, hidden: CosmoFlow's convolutions and fully connected layers; dropout before the latter.
    norm: of the U-Net group or batch; of CosmoFlow batch or none (`group` counts as none there).
    store: keep tiles in memory after they were read once, or read them from the shards in every epoch.
    """

    input: str = "images"
    target: str = "volume"
    targets: tuple[str, ...] = ("thickness_A", "tilt_x_mrad", "tilt_y_mrad")
    crop: int | None = Field(default=None, ge=2)
    dose_e_per_pixel: float | None = Field(default=None, gt=0)
    width: int = Field(default=16, ge=1, le=4096)
    levels: int = Field(default=3, ge=1, le=8)
    filters: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (16, 32, 64, 128, 256, 256, 256)
    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = (2048, 256)
    dropout: float = Field(default=0.2, ge=0, lt=1)
    norm: Literal["group", "batch"] = "group"
    store: Literal["memory", "none"] = "memory"
    overlap: bool = Field(default=True, description="compute a tile's interior while its halos travel")
