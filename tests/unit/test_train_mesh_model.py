"""The performance model of meshes: by hand on one layer, and what it picks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.cost import LinkCost
from exitwave.train.mesh_choice import rank_meshes
from exitwave.train.mesh_model import Machine, estimate, fastest, fit_computation, halo_bytes, meshes
from exitwave.train.models.cosmoflow import CosmoFlow
from exitwave.train.models.counting import count
from exitwave.train.spec import TrainSpec
from tests.support.series_data import make_series

LINK = LinkCost(alpha_s=1e-3, beta_s_per_byte=1e-9)
MACHINE = Machine(s_per_flop=1e-9, s_per_layer=0.0, halos=LINK, gradients=LINK, overlap=False)


def one_layer():
    return count(nn.Conv3d(2, 3, 3, padding=1, bias=False), (1, 2, 4, 8, 16))


def test_one_layer_by_hand():
    counted = one_layer()
    flop = 2 * 3 * 4 * 8 * 16 * 2 * 27
    assert counted.flop == flop
    halo = 1 * 2 * 4 * 16 * 4  # one row of 2 channels x 4 planes x 16 values, in bytes
    assert halo_bytes(counted.layers[0], samples=1, neighbours=1) == halo
    assert halo_bytes(counted.layers[0], samples=3, neighbours=2) == 6 * halo
    parameters = 2 * 3 * 27 * 4
    got = estimate(counted, 1, 2, batch=1, machine=MACHINE)
    reduce = 2 * (1e-3 + parameters / 2 * 1e-9)
    assert got.step_s == pytest.approx(3 * flop / 2 * 1e-9 + 2 * (1e-3 + halo * 1e-9) + reduce)
    alone = estimate(counted, 1, 1, batch=1, machine=MACHINE)
    assert alone.step_s == pytest.approx(3 * flop * 1e-9)
    hidden = estimate(counted, 1, 2, batch=1, machine=replace(MACHINE, overlap=True))
    forward, back = flop / 2 * 1e-9, flop * 1e-9
    travel = 1e-3 + halo * 1e-9
    assert hidden.step_s == pytest.approx(max(forward, travel) + max(max(back, travel), reduce))


def test_ranks_without_a_core_of_their_own_take_turns():
    counted = one_layer()
    machine = replace(MACHINE, cores=2)
    assert estimate(counted, 1, 4, batch=1, machine=machine).compute_s == pytest.approx(
        estimate(counted, 1, 2, batch=1, machine=machine).compute_s
    )


def test_what_is_picked():
    with torch.device("meta"):
        counted = count(CosmoFlow(in_shape=(128,) * 3), (1, 4, 128, 128, 128))
    # samples enough for all ranks: no halos are cheaper than halos
    assert fastest(counted, 4, batch=8, rows=128, machine=MACHINE)[0].name == "4x1"
    # one sample: all ranks share it
    assert fastest(counted, 4, batch=1, rows=128, machine=MACHINE)[0].name == "1x4"
    # two samples, four ranks
    assert fastest(counted, 4, batch=2, rows=128, machine=MACHINE)[0].name == "2x2"
    # a sample needs 0.82 GiB: with half of that, every sample is split
    tight = replace(MACHINE, memory_bytes=0.45 * 2**30)
    names = {one.name: one.fits for one in fastest(counted, 4, batch=2, rows=128, machine=tight)}
    assert names == {"2x2": True, "1x4": True}
    with pytest.raises(UsageError, match="more ranks or a smaller batch"):
        fastest(counted, 2, batch=2, rows=128, machine=replace(MACHINE, memory_bytes=2**20))
    with pytest.raises(UsageError, match="cannot share"):
        fastest(counted, 8, batch=1, rows=4, machine=MACHINE)


def test_meshes_of_a_world():
    assert meshes(12, batch=4, rows=6) == [(4, 3), (3, 4), (2, 6)]


def test_fitting_gives_back_what_made_the_measurements():
    counted = one_layer()
    made = replace(MACHINE, s_per_flop=2e-9, s_per_layer=1e-3)
    measured = [(part, 3 * counted.flop * part * 2e-9 + 2 * 1e-3) for part in (1.0, 0.5, 0.25)]
    fitted = fit_computation(MACHINE, counted, measured)
    assert fitted.s_per_flop == pytest.approx(made.s_per_flop)
    assert fitted.s_per_layer == pytest.approx(made.s_per_layer)


def test_a_trainings_mesh_follows_from_its_data_and_batch(tmp_path: Path):
    data = make_series(tmp_path, train=2, val=0, side=16)
    for task in ("volume", "regress"):
        series = {"width": 2, "levels": 2, "filters": [4, 4], "hidden": [4]}
        spec = TrainSpec.model_validate({"task": task, "series": series, "batch": 1, "steps": 1})
        assert [one.name for one in rank_meshes(spec, data, 4, MACHINE)] == ["1x4"]
        wide = spec.model_copy(update={"batch": 4})
        assert rank_meshes(wide, data, 4, MACHINE)[0].name == "4x1"
        assert {one.name for one in rank_meshes(wide, data, 4, MACHINE)} == {"4x1", "2x2", "1x4"}
