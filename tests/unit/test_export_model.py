"""A model that leaves: each format is read back and gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.train.export_model import example_input, export_model, load_exported
from exitwave.train.preprocess import Preprocessing
from exitwave.train.run import TrainedModel, make_model
from exitwave.train.spec import TrainSpec


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    spec = TrainSpec.model_validate(
        {"model": {"growth": 4, "stem": [8], "dropout": 0.1}, "data": {"detector_bin": 4}, "steps": 1, "seed": 3}
    )
    prepared = Preprocessing(
        layout="detector-as-channels",
        scan_shape=(8, 8),
        detector_shape=(8, 8),
        label_shape=(16, 16),
        target_mean_VA=100.0,
        target_std_VA=20.0,
        com_std=0.1,
        icom_std_VA=10.0,
        trained={"energy_keV": (100.0, 200.0)},
    )
    return TrainedModel(
        module=make_model(spec, prepared).eval(),
        spec=spec,
        preprocessing=prepared,
        mean_image_V=torch.rand(16, 16),
        dataset_id="some",
        step=7,
    )


@pytest.fixture(scope="module")
def inputs(model):
    return torch.randn(3, *example_input(model).shape[1:], generator=torch.Generator().manual_seed(0))


def test_weights_and_configuration_make_the_same_model(model, inputs, tmp_path):
    made = export_model(model, tmp_path, ["safetensors"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = load_exported(tmp_path)
    assert torch.equal(again.module(inputs), model.module(inputs)) and torch.equal(
        again.mean_image_V, model.mean_image_V
    )
    assert (again.preprocessing, again.spec, again.step) == (model.preprocessing, model.spec, 7)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DamagedDataError):
        load_exported(tmp_path)
    with pytest.raises(UsageError, match="found none"):
        load_exported(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="expected safetensors, torch, onnx"):
        export_model(model, tmp_path, ["pickle"])
    assert set(made) == {"safetensors"}


def test_the_program_of_torch_takes_any_number_of_samples(model, inputs, tmp_path):
    export_model(model, tmp_path, ["torch"])
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.allclose(program(inputs), model.module(inputs), atol=1e-6)
    assert program(torch.cat([inputs, inputs])).shape == (6, 16, 16)


def test_onnx_gives_the_same_numbers(model, inputs, tmp_path):
    pytest.importorskip("onnxscript", reason="ONNX export is an extra")
    runtime = pytest.importorskip("onnxruntime", reason="ONNX export is an extra")
    export_model(model, tmp_path, ["onnx"])
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert np.allclose(out, model.module(inputs).detach().numpy(), atol=1e-4)
