"""The driver of ptychography: the same field at the same dose, and a known answer recovered where it is known."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from exitwave.ingest.errors import UsageError
from exitwave.simulate.plan import make_plan
from exitwave.simulate.simulator import simulate_sample
from exitwave.simulate.spec import CampaignSpec
from exitwave.simulate.tasks import draw_sample

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "ptychography.py"
_spec = importlib.util.spec_from_file_location("ptychography_driver", _FILE)
sys.path.insert(0, str(_FILE.parent))  # as when it is run
assert _spec is not None and _spec.loader is not None
driver = importlib.util.module_from_spec(_spec)
sys.modules["ptychography_driver"] = driver
_spec.loader.exec_module(driver)

PEER = os.environ.get("EXITWAVE_PY4DSTEM")
GEOMETRY = driver.Geometry(positions=4, overlap=0.6, dose_e_per_pattern=1e6)


def drawn(**changes):
    """Magnesium oxide, two cells thick, turned and scanned at angles that no symmetry of it hides."""
    content = {
        "name": "thin",
        "samples_per_structure": 1,
        "samples_per_shard": 1,
        "structures": [{"prototype": "rocksalt", "elements": ["Mg", "O"], "a_A": 4.212}],
        "cell": {"min_extent_A": 16.5},
        "sampling": {
            "semiangle_mrad": 20,
            "thickness_A": 8,
            "crystal_rotation_deg": 53,
            "scan_rotation_deg": 20,
            "scan_origin": [3.3, 1.2],
        }
        | changes,
        "scan": {"shape": [24, 24], "step_A": 0.28},
        "grid": {"sampling_A": 0.19},
        "detector": {"shape": [16, 16], "max_q_per_A": 1.2},
        "label": {"shape": [24, 24], "blur_A": 0.3},
    }
    spec = CampaignSpec.model_validate(content)
    return draw_sample(make_plan(spec, base_dir=Path()).structures[0], spec.recipe(), 0, "test")


@pytest.fixture(scope="module")
def sample():
    """As a data set gives it."""
    made = simulate_sample(
        dataclasses.replace(drawn(), recipe=drawn().recipe.model_copy(update={"fields": ("potential",)}))
    )
    return {"uid": made.uid, "params": made.params, **made.arrays}


@pytest.fixture(scope="module")
def arrays(sample):
    return driver.experiment(driver.defocused(drawn(), GEOMETRY), sample, "auto", GEOMETRY)


def test_the_defocused_scan_covers_the_field_at_the_same_dose(arrays):
    counts = arrays["counts"]
    assert counts.shape[:2] == (4, 4)
    assert float(arrays["step_A"]) * 4 == pytest.approx(24 * 0.28)
    # but for what atoms scatter past the detector, a part in a thousand
    assert 0.998 < counts.sum() / (24 * 24 * 1e6) < 1.0005
    diameter = 2 * 0.020 * float(arrays["defocus_A"])
    assert 1 - float(arrays["step_A"]) / diameter == pytest.approx(0.6)
    # the window holds the probe
    assert 1 / float(arrays["q_per_A"]) > 3 * diameter


def test_the_vacuum_pattern_is_the_probe_s_own(arrays):
    vacuum, mean = arrays["vacuum"], arrays["counts"].mean(axis=(0, 1))
    assert vacuum.sum() == pytest.approx(1, abs=1e-6)
    # what is not scattered stays in the disc: the same rim, to a few parts in a thousand of the amplitudes
    assert ((np.sqrt(vacuum) - np.sqrt(mean / mean.sum())) ** 2).sum() < 0.02


def test_another_experiment_is_refused(sample):
    elsewhere = drawn(scan_origin=[3.3, 1.3])
    with pytest.raises(UsageError, match="scan_origin_x_A"):
        driver.experiment(driver.defocused(elsewhere, GEOMETRY), sample, "auto", GEOMETRY)
    with pytest.raises(SystemExit, match="C30_A"):
        driver.defocused(drawn(C30_A=1e4), GEOMETRY)


@pytest.mark.long
@pytest.mark.skipif(not PEER, reason="no environment with py4DSTEM; EXITWAVE_PY4DSTEM names its Python")
def test_a_thin_specimen_is_recovered_where_it_lies_and_not_mirrored(sample, arrays, tmp_path):
    np.savez(tmp_path / "sample-000.npz", **arrays)
    truth = sample["potential"].astype(np.float64)
    known = driver.Experiments(
        folder=tmp_path,
        truth=truth[None],
        params=np.array([sample["params"]]),
        uids=[1],
        formulas=["MgO"],
        step_A=1.68,
        defocus_A=[105.0],
    )
    made = known.reconstructed(Path(PEER), {}, driver.Progress(2))
    assert made.converged == [True]
    inside = slice(6, -6)  # one probe diameter from the edge
    image, label = (a[inside, inside] - a[inside, inside].mean() for a in (made.images_VA(None, 1.0)[0], truth))
    agreement = np.corrcoef(image.ravel(), label.ravel())[0, 1]
    assert agreement > 0.95
    assert (image * label).sum() / (image * image).sum() == pytest.approx(1, abs=0.15)  # volts are volts
    assert max(abs(s) for s in shift_between(image, label)) < 0.5
    for mirrored in (image.T, image[::-1], image[:, ::-1]):
        assert np.corrcoef(mirrored.ravel(), label.ravel())[0, 1] < agreement - 0.3


def shift_between(image, label):
    """By how many pixels (y, x) an image lies off its label, by the gradients' least squares."""
    gy, gx = np.gradient(label)
    design = np.stack([-gy.ravel(), -gx.ravel(), label.ravel()], axis=1)
    y, x, scale = np.linalg.lstsq(design, image.ravel(), rcond=None)[0]
    return y / scale, x / scale
