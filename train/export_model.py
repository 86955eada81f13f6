"""A trained model for others: weights as safetensors with all that is needed to use them, a torch program, ONNX.

    OUT/model.safetensors   the weights, no code in it (huggingface/safetensors)
        config.json         the training's configuration, its preprocessing, what it was trained on
        model.pt2           the network as a program of `torch.export`, any number of samples
        model.onnx          the same for other runtimes, where asked for

`config.json` says in words what goes in and comes out; `load_exported` gives the same `TrainedModel` as the run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exitwave.ingest.errors import DamagedDataError, UsageError
from exitwave.ingest.files import read_plain_text, write_atomic
from exitwave.train.preprocess import Preprocessing, input_channels
from exitwave.train.run import TrainedModel, make_model
from exitwave.train.spec import TrainSpec

__all__ = ["FORMATS", "example_input", "export_model", "load_exported"]

FORMATS = ("safetensors", "torch", "onnx")
_KIND, _VERSION = "exitwave-exported-model", 1


def example_input(model: TrainedModel, samples: int = 2) -> Tensor:
    """Zeros of the network's input shape (samples, channels, h, w)."""
    prepared, spec = model.preprocessing, model.spec
    channels = input_channels(spec.data, spec.model.layout, prepared.scan_shape, prepared.detector_shape)
    plane = prepared.scan_shape
    if spec.model.layout == "probes-as-channels":
        bins = spec.data.detector_bin or max(prepared.detector_shape)
        plane = (min(bins, prepared.detector_shape[0]), min(bins, prepared.detector_shape[1]))
    return torch.zeros(samples, channels, *plane)


def export_model(model: TrainedModel, out: Path, formats: Sequence[str] = FORMATS[:2]) -> dict[str, Any]:
    """Writes the formats into the folder `out`, each file whole or not at all; returns format -> path.

    Raises UsageError for a format that is unknown, or whose library is not installed.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise UsageError(f"--format: expected {', '.join(FORMATS)}, got {unknown[0]!r}")
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {}
    if "safetensors" in formats:
        made["safetensors"] = str(_weights(model, out))
    if "torch" in formats:
        made["torch"] = str(_program(model, out / "model.pt2"))
    if "onnx" in formats:
        made["onnx"] = str(_onnx(model, out / "model.onnx"))
    return made


def load_exported(folder: Path) -> TrainedModel:
    """The model of `export_model`, in evaluation mode, from model.safetensors and config.json.

    Raises UsageError where it is none or of another version, DamagedDataError where it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "config.json"
    if not path.exists():
        raise UsageError(f"{path}: expected an exported model, found none")
    try:
        config = json.loads(read_plain_text(path))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedDataError(f"{folder}: expected an exported model, could not read it ({error})") from error
    if (config.get("kind"), config.get("version")) != (_KIND, _VERSION):
        raise UsageError(
            f"{path}: expected {_KIND} version {_VERSION}, got {config.get('kind')} {config.get('version')}"
        )
    spec = TrainSpec.model_validate(config["spec"])
    preprocessing = Preprocessing.from_json(config["preprocessing"])
    module = make_model(spec, preprocessing)
    mean_image = tensors.pop("mean_image_V")
    module.load_state_dict(tensors)
    return TrainedModel(
        module=module.eval(),
        spec=spec,
        preprocessing=preprocessing,
        mean_image_V=mean_image,
        dataset_id=config["dataset_id"],
        step=config["step"],
    )


def _weights(model: TrainedModel, out: Path) -> Path:
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError("safetensors is not installed: pip install 'exitwave[export]'") from None
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.module.state_dict().items()}
    config = {
        "kind": _KIND,
        "version": _VERSION,
        "spec": model.spec.canonical(),
        "preprocessing": model.preprocessing.to_json(),
        "dataset_id": model.dataset_id,
        "step": model.step,
        "input": {
            "shape": ["samples", *example_input(model).shape[1:]],
            "dtype": "float32",
            "made_by": "network_input",
        },
        "output": {
            "shape": ["samples", *model.preprocessing.label_shape],
            "meaning": "standardised projected potential; V·Å = value * target_std_VA + target_mean_VA",
        },
    }
    path = out / "model.safetensors"
    write_atomic(path, save({**tensors, "mean_image_V": model.mean_image_V.contiguous()}))
    write_atomic(out / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    return path


def _program(model: TrainedModel, path: Path) -> Path:
    exported = _exported(model)
    partial = path.with_name(f".{path.name}")
    torch.export.save(exported, partial)
    partial.replace(path)
    return path


def _onnx(model: TrainedModel, path: Path) -> Path:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UsageError("ONNX export needs onnx and onnxscript: pip install 'exitwave[export]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            model.module,
            (example_input(model),),
            dynamo=True,
            verbose=False,
            input_names=["patterns"],
            output_names=["potential"],
            dynamic_shapes=({0: torch.export.Dim("samples")},),
        )
    partial = path.with_name(f".{path.name}")
    program.save(str(partial), external_data=False)
    partial.replace(path)
    return path


def _exported(model: TrainedModel) -> Any:
    return torch.export.export(
        model.module, (example_input(model),), dynamic_shapes=({0: torch.export.Dim("samples")},)
    )
