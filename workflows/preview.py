"""Pictures of a few samples before hours are spent: what the detector will see, and what would be learnt from it.

The cheapest sample of each structure is simulated, structures spread over the plan and cheapest first, until enough are
made or the time is up. Each shows the patterns side by side, their mean (logarithmic), the bright field as the scan
sees it, the label, and what was drawn. One self-contained HTML file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exitwave.ingest.files import write_atomic
from exitwave.simulate.cost import estimate_seconds
from exitwave.simulate.plan import Plan
from exitwave.simulate.simulator import Sample, get_simulator
from exitwave.simulate.tasks import SampleSpec
from exitwave.workflows.figures import image_png, shared_limits

__all__ = ["PreviewReport", "choose_samples", "pattern_grid", "virtual_bright_field", "write_preview"]

Array = npt.NDArray[Any]
MOST_SAMPLES = 6
BUDGET_S = 60.0
_MOST_PATTERNS = 6  # along each axis of the scan


@dataclass(frozen=True, kw_only=True)
class PreviewReport:
    """What was made: the page, how many samples of how many structures, and how long it took."""

    path: str
    samples: int
    structures: int
    seconds: float


def choose_samples(plan: Plan, most: int = MOST_SAMPLES) -> list[SampleSpec]:
    """The cheapest sample of each of `most` structures that are spread evenly over the plan; cheapest first."""
    cheapest: dict[int, tuple[float, SampleSpec]] = {}
    wanted = {s.index for s in _spread(list(plan.structures), most)}
    for task in plan.tasks:
        for sample in task.samples():
            index = sample.structure.index
            if index not in wanted:
                continue
            cost = estimate_seconds(sample, plan.simulator)
            if index not in cheapest or cost < cheapest[index][0]:
                cheapest[index] = (cost, sample)
    return [sample for _, sample in sorted(cheapest.values(), key=lambda pair: pair[0])]


def _spread(items: list[Any], most: int) -> list[Any]:
    n = min(most, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def pattern_grid(cbed: Array, most: int = _MOST_PATTERNS) -> Array:
    """Patterns (Ry, Rx, Qy, Qx) side by side as the scan has them, at most `most` each way, evenly spaced."""
    rows, columns = (np.array(_spread(list(range(n)), most)) for n in cbed.shape[:2])
    some = cbed[rows][:, columns]
    qy, qx = cbed.shape[2:]
    # (Ry, Rx, Qy, Qx) -> (Ry, Qy, Rx, Qx) -> one picture
    picture: Array = some.transpose(0, 2, 1, 3).reshape(len(rows) * qy, len(columns) * qx)
    return picture


def virtual_bright_field(cbed: Array, params: Any) -> Array:
    """The intensity within the aperture's disc at each position, (Ry, Rx)."""
    from exitwave.simulate.physics import wavelength_A

    radius = float(params["semiangle_mrad"]) * 1e-3 / wavelength_A(float(params["energy_keV"]))
    qy = (np.arange(cbed.shape[2]) - cbed.shape[2] // 2) * float(params["Q_sampling_y_per_A"])
    qx = (np.arange(cbed.shape[3]) - cbed.shape[3] // 2) * float(params["Q_sampling_x_per_A"])
    inside = np.hypot(qy[:, None], qx[None]) <= radius
    image: Array = np.asarray(cbed, dtype=np.float64)[..., inside].sum(-1)
    return image


def write_preview(
    plan: Plan, path: Path, *, budget_s: float = BUDGET_S, tell: Callable[[str], None] = lambda text: None
) -> PreviewReport:
    """Simulate a few samples in this process and write the page. The first sample is made whatever it costs."""
    began = time.monotonic()
    simulator = get_simulator(plan.simulator)
    made: list[tuple[SampleSpec, Sample]] = []
    for spec in choose_samples(plan):
        if made and time.monotonic() - began + estimate_seconds(spec, plan.simulator) > budget_s:
            break
        tell(f"preview: {spec.structure.formula} along [{' '.join(map(str, spec.structure.zone_axis))}] …")
        made.append((spec, next(iter(simulator.simulate([spec])))))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _page(plan, made, time.monotonic() - began).encode())
    return PreviewReport(
        path=str(path),
        samples=len(made),
        structures=len({spec.structure.index for spec, _ in made}),
        seconds=time.monotonic() - began,
    )


def _page(plan: Plan, made: list[tuple[SampleSpec, Sample]], seconds: float) -> str:
    from importlib import resources

    from jinja2 import Environment, StrictUndefined

    source = (resources.files("exitwave.workflows") / "templates" / "preview.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        name=plan.spec.name,
        summary=plan.summary(),
        seconds=seconds,
        samples=[_shown(spec, sample) for spec, sample in made],
    )


def _shown(spec: SampleSpec, sample: Sample) -> dict[str, Any]:
    params, arrays = sample.params, sample.arrays
    pictures: list[tuple[str, str]] = []
    if "cbed" in arrays:
        cbed = np.asarray(arrays["cbed"], dtype=np.float64)
        q = float(params["Q_sampling_x_per_A"])
        logarithm = np.log10(np.maximum(cbed.mean(axis=(0, 1)), cbed.max() * 1e-6))
        pictures.append(("patterns over the scan", image_png(pattern_grid(cbed), pixel=q, unit="/Å")))
        pictures.append(("mean pattern, log10", image_png(logarithm, pixel=q, unit="/Å")))
        bright = virtual_bright_field(cbed, params)
        step = float(params["R_sampling_x_A"])
        pictures.append(("bright field", image_png(bright, pixel=step, unit="Å", cmap="gray")))
    if "potential" in arrays:
        label = np.asarray(arrays["potential"], dtype=np.float64)
        limits = shared_limits([label])
        sampling = float(params["potential_sampling_A"])
        pictures.append(("potential, V·Å", image_png(label, pixel=sampling, unit="Å", limits=limits)))
    facts = [
        ("energy", f"{float(params['energy_keV']):g} keV"),
        ("semi-angle", f"{float(params['semiangle_mrad']):.3g} mrad"),
        ("defocus", f"{float(params['defocus_A']):.3g} Å"),
        ("C30", f"{float(params['C30_A']):.3g} Å"),
        ("thickness", f"{float(params['thickness_A']):.1f} Å"),
        ("tilt", f"{float(params['tilt_x_mrad']):.2g}, {float(params['tilt_y_mrad']):.2g} mrad"),
        ("strain", f"{100 * float(params['strain']):.2f} %"),
        ("cell", f"{float(params['extent_x_A']):.1f} × {float(params['extent_y_A']):.1f} Å"),
        ("grid", f"{int(params['grid_x'])} × {int(params['grid_y'])}"),
        ("captured", f"{float(params['captured_fraction']):.4f}"),
        ("split", spec.split),
    ]
    axis = " ".join(map(str, spec.structure.zone_axis))
    return {
        "title": f"{spec.structure.formula} along [{axis}]",
        "source": spec.structure.source,
        "pictures": pictures,
        "facts": facts,
    }
