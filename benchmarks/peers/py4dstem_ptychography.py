"""Ptychography by py4DSTEM, with a known probe: a script for an environment of its own (it needs an older NumPy).

    python benchmarks/peers/py4dstem_ptychography.py WORK

WORK/settings.json is a list of settings (`DEFAULT` below says which and what they mean); each WORK/sample-*.npz holds
one experiment: `counts` (Ry, Rx, Q, Q) with zero frequency at [Q//2, Q//2], `vacuum` (Q, Q) the mean pattern without a
specimen, `energy_eV`, `defocus_A` (positive: the crossover lies downstream of the entrance surface), `q_per_A` (a
detector pixel), `step_A`, `thickness_A`, `label_shape`, `label_A` (a label pixel; its [0, 0] lies at the first probe)
and `label_blur_A`. Detector, scan and label share their axes. Written beside each sample: `made-*.npz` with `image_VA`
(settings, H, W) projected potential [V·Å], and `iterations`, `error`, `converged`, `seconds` (settings,). Prints
{"version"}.

The probe is known: amplitudes of the vacuum pattern, and the phases -χ(k) = π λ defocus k² of its defocus. The vacuum
pattern matters: with an ideal aperture instead, the disc's rim, a pixel wide, outweighs what a thin specimen does. The
object is a potential in radians, one slice or several with free space between (Maiden, Humphry, Rodenburg, JOSA A 29,
1606 (2012)), whose sum is the image. Gradient descent goes on until the error (py4DSTEM's own: squared difference of
amplitudes over the counts) falls by less than `tolerance` of itself in ten iterations, or to `most` iterations.
"""

from __future__ import annotations

import json
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
    "blur": 1.0,  # Gaussian of the result, in units of the label's own
    "tolerance": 0.005,
    "most": 300,
}
_CHUNK = 10


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


def reconstruct(sample: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, int, float, bool]:
    """Image [V·Å] on the label's pixels, iterations, error, and whether it came to rest."""
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
    before, error, done, rest = np.inf, np.inf, 0, False
    while done < settings["most"] and not rest:
        engine.reconstruct(**options, reset=done == 0)
        done += _CHUNK
        before, error = error, float(engine.error_iterations[-1])
        rest = bool(error > (1.0 - settings["tolerance"]) * before)
    phase = np.asarray(engine._object, dtype=np.float64)
    phase = phase if slices == 1 else phase.sum(axis=0)
    shape_out = tuple(int(m) for m in sample["label_shape"])
    blur = settings["blur"] * float(sample["label_blur_A"])
    image = on_label(phase, pixel, offset, shape_out, float(sample["label_A"]), blur)
    return image / sigma_rad_per_VA(energy), done, error, rest


def main(work: Path) -> None:
    import py4DSTEM

    chosen = [DEFAULT | given for given in json.loads((work / "settings.json").read_text())]
    for path in sorted(work.glob("sample-*.npz")):
        with np.load(path) as file:
            sample = dict(file)
        made: dict[str, list[Any]] = {name: [] for name in ("image_VA", "iterations", "error", "converged", "seconds")}
        for settings in chosen:
            began = time.perf_counter()
            for name, value in zip(made, reconstruct(sample, settings), strict=False):
                made[name].append(value)
            made["seconds"].append(time.perf_counter() - began)
        np.savez(path.with_name(path.name.replace("sample-", "made-")), **{k: np.array(v) for k, v in made.items()})
    print(json.dumps({"version": py4DSTEM.__version__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
