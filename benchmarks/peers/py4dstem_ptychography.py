"""Ptychography by py4DSTEM, with a known probe: a script for an environment of its own (it needs an older NumPy).

    python benchmarks/peers/py4dstem_ptychography.py WORK SETTINGS_JSON

SETTINGS_JSON is a list of settings (`DEFAULT` below says which and what they mean); each WORK/sample-*.npz holds
one experiment: `counts` (Ry, Rx, Q, Q) with zero frequency at [Q//2, Q//2], `vacuum` (Q, Q) the mean pattern without a
specimen, `energy_eV`, `defocus_A` (positive: the crossover lies downstream of the entrance surface), `q_per_A` (a
detector pixel), `step_A`, `thickness_A`, `label_shape`, `label_A` (a label pixel; its [0, 0] lies at the first probe)
and `label_blur_A`. Detector, scan and label share their axes.

For each sample and each of the settings a file is written, whole or not at all, and found again by the next run:
made-SAMPLE-KEY.npz with `image_VA` (stops, blurs, H, W) projected potential [V·Å] after `stops` iterations, the last of
them where it ended, blurred by `blurs` times the label's own blur; `errors` (iterations,), `converged`, `seconds`. One
line of JSON is printed for each: {"file", "seconds", "kept"}; the last one is {"version"}.

The probe is known: amplitudes of the vacuum pattern, and the phases -χ(k) = π λ defocus k² of its defocus. The vacuum
pattern matters: with an ideal aperture instead, the disc's rim, a pixel wide, outweighs what a thin specimen does. The
object is a potential in radians, one slice or several with free space between (Maiden, Humphry, Rodenburg, JOSA A 29,
1606 (2012)), whose sum is the image. Gradient descent goes on to `most` iterations or until it has *converged*: the
algorithm's own error (py4DSTEM's: squared difference of amplitudes over the counts) has flattened, it fell by less than
`tolerance` of itself in the last ten iterations. That says nothing of whether the image is right: a model that cannot
explain the patterns comes to rest too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

DEFAULT: dict[str, Any] = {
    "slice_A": None,  # thickness of a slice; None: a single one
    "identical": False,  # all slices alike
    "plane": 0.0,  # a single slice sees the probe at this part of the thickness
    "step": 0.5,  # py4DSTEM's step_size
    "batch": 4,  # patterns an update
    "positive": True,  # no potential below zero
    "lowpass_per_A": None,  # Butterworth
    "tolerance": 0.002,
    "most": 300,
}
_CHUNK = 10
_STOPS = (20, 50, 100, 200)
_BLURS = (0.75, 1.0, 1.5)


def wavelength_A(energy_eV: float) -> float:
    """Relativistic de Broglie wavelength [Å] (Kirkland, Advanced Computing in Electron Microscopy, eq. 2.5)."""
    rest = 510998.95
    return 12398.419843 / float(np.sqrt(energy_eV * (2 * rest + energy_eV)))


def sigma_rad_per_VA(energy_eV: float) -> float:
    """The interaction parameter (Kirkland, eq. 5.6)."""
    rest = 510998.95
    return 2 * np.pi / (wavelength_A(energy_eV) * energy_eV) * (rest + energy_eV) / (2 * rest + energy_eV)


def known_probe(vacuum: Any, q_per_A: float, wavelength: float, defocus_A: float) -> Any:
    """(n, n) with its centre at [0, 0]: the vacuum pattern's amplitudes with the phases of a defocus."""
    n = len(vacuum)
    k = np.fft.fftfreq(n) * n * q_per_A
    k2 = k[:, None] ** 2 + k[None, :] ** 2
    amplitude = np.sqrt(np.fft.ifftshift(vacuum))
    return np.fft.ifft2(amplitude * np.exp(1j * np.pi * wavelength * defocus_A * k2))


def on_label(image: Any, pixel_A: float, offset_px: int, shape: tuple[int, ...], label_A: float, blur_A: float) -> Any:
    """The finite Fourier sum that an image's pixels are, blurred, at the label's pixels: (Py, Px) -> (H, W)."""
    spectrum = np.fft.fft2(image) / image.size
    ky, kx = (np.fft.fftfreq(n, d=pixel_A) for n in image.shape)
    spectrum = spectrum * np.exp(-2 * np.pi**2 * blur_A**2 * (ky[:, None] ** 2 + kx[None, :] ** 2))
    y, x = (np.arange(n) * label_A + offset_px * pixel_A for n in shape)
    return (np.exp(2j * np.pi * np.outer(y, ky)) @ spectrum @ np.exp(2j * np.pi * np.outer(kx, x))).real


def reconstruct(sample: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """`image_VA`, `stops`, `blurs`, `errors` and `converged` of one experiment (see above)."""
    from py4DSTEM.process.phase import MultislicePtychography, SingleslicePtychography

    counts = np.asarray(sample["counts"], dtype=np.float64)
    rows, columns, n, _ = counts.shape
    energy, q, thickness = (float(sample[name]) for name in ("energy_eV", "q_per_A", "thickness_A"))
    wavelength, pixel = wavelength_A(energy), 1.0 / (n * q)
    slices = 1 if settings["slice_A"] is None else max(1, round(thickness / settings["slice_A"]))
    defocus = float(sample["defocus_A"]) - (settings["plane"] * thickness if slices == 1 else 0.0)
    probe = known_probe(sample["vacuum"], q, wavelength, defocus)
    # as many counts in the probe as a pattern has in the mean; transforms of py4DSTEM are NumPy's
    probe *= np.sqrt(counts.sum(axis=(-2, -1)).mean() / (np.abs(np.fft.fft2(probe)) ** 2).sum())
    offset = n // 2 + 1
    step = float(sample["step_A"]) / pixel
    i, j = np.meshgrid(np.arange(rows) * step, np.arange(columns) * step, indexing="ij")
    positions = np.stack([i.ravel(), j.ravel()], axis=-1) + offset
    extent = tuple(int(np.ceil((count - 1) * step)) + 2 * offset for count in (rows, columns))

    common: dict[str, Any] = {"energy": energy, "object_type": "potential", "verbose": False, "device": "cpu"}
    shape: tuple[int, ...] = extent
    if slices == 1:
        engine: Any = SingleslicePtychography(**common)
    else:
        engine = MultislicePtychography(num_slices=slices, slice_thicknesses=thickness / slices, **common)
        shape = (slices, *extent)
    amplitudes = np.fft.ifftshift(np.sqrt(counts.reshape(-1, n, n)), axes=(-2, -1))
    engine.slim_preprocess(amplitudes, probe, np.zeros(shape), positions, reciprocal_sampling=(q, q))
    if slices > 1:
        # what its own preprocess() does and slim_preprocess() leaves out
        engine._propagator_arrays = engine._precompute_propagator_arrays(
            (n, n), engine.sampling, energy, engine._slice_thicknesses, engine._theta_x, engine._theta_y
        )
    options: dict[str, Any] = {
        "num_iter": _CHUNK,
        "step_size": settings["step"],
        "max_batch_size": min(settings["batch"], len(positions)),
        "seed_random": 0,
        "fix_probe": True,
        "fix_potential_baseline": False,
        "object_positivity": settings["positive"],
        "gaussian_filter": False,
        "butterworth_filter": settings["lowpass_per_A"] is not None,
        "q_lowpass": settings["lowpass_per_A"],
        "tv_denoise": False,
        "progress_bar": False,
    }
    if slices > 1:
        options |= {"identical_slices": settings["identical"], "kz_regularization_filter": False}
        options["tv_denoise_chambolle"] = False
    label = (tuple(int(m) for m in sample["label_shape"]), float(sample["label_A"]))

    def images() -> list[Any]:
        phase = np.asarray(engine._object, dtype=np.float64)
        phase = phase if slices == 1 else phase.sum(axis=0)
        blurs = [blur * float(sample["label_blur_A"]) for blur in _BLURS]
        return [on_label(phase, pixel, offset, *label, blur) / sigma_rad_per_VA(energy) for blur in blurs]

    errors: list[float] = []
    stops, made, rest = [], [], False
    while len(errors) < settings["most"] and not rest:
        engine.reconstruct(**options, reset=not errors)
        errors += [float(error) for error in engine.error_iterations[-_CHUNK:]]
        rest = len(errors) > _CHUNK and errors[-1] > (1.0 - settings["tolerance"]) * errors[-1 - _CHUNK]
        if len(errors) in _STOPS or rest or len(errors) >= settings["most"]:
            stops.append(len(errors))
            made.append(images())
    return {"image_VA": np.array(made), "stops": stops, "blurs": _BLURS, "errors": errors, "converged": rest}


def key(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def main(work: Path, given: list[dict[str, Any]]) -> None:
    import py4DSTEM

    for settings in (DEFAULT | one for one in given):
        for path in sorted(work.glob("sample-*.npz")):
            out = path.with_name(f"{path.stem.replace('sample-', 'made-')}-{key(settings)}.npz")
            began, kept = time.perf_counter(), out.exists()
            if not kept:
                with np.load(path) as file:
                    made = reconstruct(dict(file), settings)
                beside = out.with_suffix(".tmp")
                with beside.open("wb") as stream:
                    np.savez(stream, **made, seconds=time.perf_counter() - began, settings=json.dumps(settings))
                    stream.flush()
                    os.fsync(stream.fileno())
                beside.rename(out)
            seconds = time.perf_counter() - began
            print(json.dumps({"file": out.name, "seconds": seconds, "kept": kept}), flush=True)
    print(json.dumps({"version": py4DSTEM.__version__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
