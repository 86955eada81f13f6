"""Small data sets for tests of the trainer: real shards, committed by the real writer, of a cheap but true physics.

Each sample is a lattice of Gaussian columns seen through the phase object approximation (one slice, exact in the
phase): exit wave = probe · exp(iσV), its Fourier transform squared is the pattern. Sign and units are those of the
contract. `tests` of the classical reconstructions use the same function as their oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from exitwave.ingest.manifest import ManifestWriter, create_dataset
from exitwave.ingest.records import Header, StructureInfo
from exitwave.ingest.schema import PARAMS_DTYPE, FieldSpec
from exitwave.ingest.shard import ShardWriter
from exitwave.train.classical import interaction_parameter_rad_per_VA, wavelength_A

GRID = 64
SAMPLING_A = 0.2
EXTENT_A = GRID * SAMPLING_A
DETECTOR = 32


def columns(material: int, rng: np.random.Generator, thickness_A: float) -> tuple[np.ndarray, np.ndarray]:
    """Column positions (n, 2) [Å] and amplitudes (n,) [V·Å] of one of endless materials, randomly placed."""
    made = np.random.default_rng(1000 + material)
    spacing = made.uniform(1.6, 3.0)
    strengths = made.uniform(2.0, 12.0, size=2) * thickness_A
    index = np.arange(-12, 13)
    y, x = np.meshgrid(index, index, indexing="ij")
    cell = np.stack([y.ravel(), x.ravel()], axis=1) * spacing
    shift = rng.uniform(0, spacing, size=2) + EXTENT_A / 2
    positions = np.concatenate([cell + shift, cell + shift + spacing / 2])
    amplitudes = np.repeat(strengths, len(cell))
    return positions, amplitudes


def potential(positions: np.ndarray, amplitudes: np.ndarray, y: np.ndarray, x: np.ndarray, width_A: float = 0.4) -> Any:
    """Projected potential [V·Å] of Gaussian columns on the grid y × x [Å]."""
    gy = np.exp(-((y[None] - positions[:, :1]) ** 2) / (2 * width_A**2))
    gx = np.exp(-((x[None] - positions[:, 1:]) ** 2) / (2 * width_A**2))
    return np.einsum("k,ki,kj->ij", amplitudes, gy, gx)


def potential_at(positions: np.ndarray, amplitudes: np.ndarray, y: np.ndarray, x: np.ndarray) -> Any:
    """The same at any points y, x (n, n) [Å]."""
    total = np.zeros(y.shape)
    for (py, px), amplitude in zip(positions, amplitudes, strict=True):
        total += amplitude * np.exp(-((y - py) ** 2 + (x - px) ** 2) / (2 * 0.4**2))
    return total


def diffract(field_VA: np.ndarray, probes_A: np.ndarray, *, energy_keV: float, semiangle_mrad: float) -> np.ndarray:
    """Patterns (n, 32, 32) [fraction of the beam] of probes at (n, 2) [Å], zero frequency at [16, 16]."""
    q = np.fft.fftfreq(GRID, SAMPLING_A)
    qy, qx = q[:, None], q[None, :]
    aperture = np.hypot(qy, qx) * wavelength_A(energy_keV) <= semiangle_mrad * 1e-3
    transmit = np.exp(1j * interaction_parameter_rad_per_VA(energy_keV) * field_VA)
    keep = slice(GRID // 2 - DETECTOR // 2, GRID // 2 + DETECTOR // 2)
    out = []
    for y, x in probes_A:
        probe = np.fft.ifft2(aperture * np.exp(-2j * np.pi * (qy * y + qx * x)))
        probe /= np.sqrt((np.abs(probe) ** 2).sum())
        intensity = np.abs(np.fft.fft2(probe * transmit)) ** 2 / GRID**2
        out.append(np.fft.fftshift(intensity)[keep, keep])
    return np.array(out)


def scan_points(n: int, step_A: float, rotation_deg: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions y and x (n, n) [Å] of pixels (i, j) from the scan's corner, in the convention of the labels."""
    i, j = np.meshgrid(np.arange(n) * step_A, np.arange(n) * step_A, indexing="ij")
    cos, sin = np.cos(np.deg2rad(rotation_deg)), np.sin(np.deg2rad(rotation_deg))
    return i * cos + j * sin, j * cos - i * sin


def sample(
    material: int, index: int, *, scan: int = 8, label: int = 32, step_A: float = 0.6, rotation_deg: float = 0.0
) -> dict[str, Any]:
    rng = np.random.default_rng((material, index))
    params = np.zeros((), dtype=PARAMS_DTYPE)
    params["energy_keV"] = rng.choice([100.0, 200.0])
    params["semiangle_mrad"] = 20.0
    params["thickness_A"] = rng.uniform(10, 40)
    params["Q_sampling_y_per_A"] = params["Q_sampling_x_per_A"] = 1 / EXTENT_A
    params["R_sampling_y_A"] = params["R_sampling_x_A"] = step_A
    params["potential_sampling_A"] = step_A * scan / label
    params["structure"], params["sample_index"] = material, index
    origin = EXTENT_A / 2 - scan * step_A / 2
    params["scan_origin_y_A"] = params["scan_origin_x_A"] = origin
    positions, amplitudes = columns(material, rng, float(params["thickness_A"]))
    grid = np.arange(GRID) * SAMPLING_A
    field = potential(positions, amplitudes, grid, grid)
    params["scan_rotation_deg"] = rotation_deg
    probes = origin + np.stack(scan_points(scan, step_A, rotation_deg), axis=-1).reshape(-1, 2)
    cbed = diffract(
        field, probes, energy_keV=float(params["energy_keV"]), semiangle_mrad=float(params["semiangle_mrad"])
    )
    y, x = (origin + at for at in scan_points(label, float(params["potential_sampling_A"]), rotation_deg))
    return {
        "uid": (material + 1) * 100_000 + index,
        "params": params,
        "cbed": cbed.reshape(scan, scan, DETECTOR, DETECTOR).astype(np.float32),
        "potential": potential_at(positions, amplitudes, y, x).astype(np.float32),
    }


def add_gold(shard: ShardWriter, *, index: int) -> None:
    """The structure that these samples say they are of."""
    shard.add_structure(
        StructureInfo(
            index=index,
            formula="Au",
            space_group=225,
            prototype_group=0,
            source="columns",
            licence="",
            sha256="0" * 64,
            zone_axis=(0, 0, 1),
        ),
        numbers=np.array([79]),
        positions_A=np.zeros((1, 3)),
        cell_A=np.eye(3) * 4,
        pbc=np.ones(3, dtype=bool),
        wyckoff="a",
    )


def make_dataset(
    root: Path,
    *,
    train: int = 4,
    val: int = 1,
    test: int = 2,
    per_material: int = 16,
    scan: int = 8,
    label: int = 32,
    step_A: float = 0.6,
    classes: int = 1,
    label_name: str = "potential",
    spoil: Callable[[dict[str, Any]], None] = lambda sample: None,
) -> Path:
    """A committed data set: so many materials in each split, one shard for each."""
    fields = (
        FieldSpec(name="cbed", dtype="<f4", shape=(scan, scan, DETECTOR, DETECTOR)),
        FieldSpec(name=label_name, dtype="<f4", shape=(label, label)),
    )
    create_dataset(root, Header(dataset_id="fake-columns", campaign_hash="fake", fields=fields))
    splits = ["train"] * train + ["val"] * val + ["test"] * test
    with ManifestWriter(root, epoch=1) as manifest:
        for material, split in enumerate(splits):
            made = [sample(material, index, scan=scan, label=label, step_A=step_A) for index in range(per_material)]
            for one in made if classes > 1 else ():
                one["params"]["space_group"] = 200 + material % classes
            with ShardWriter(
                root,
                shard_id=f"{material:016x}",
                task=material,
                campaign_hash="fake",
                simulator="columns",
                n=per_material,
                fields=fields,
                params_dtype=PARAMS_DTYPE,
            ) as shard:
                add_gold(shard, index=material)
                for row, one in enumerate(made):
                    spoil(one)
                    arrays = {"cbed": one["cbed"], label_name: one["potential"]}
                    shard.write(row, uid=one["uid"], params=one["params"], arrays=arrays)
                published = shard.publish()
            manifest.commit(published, split=split, producer={})
    return root
