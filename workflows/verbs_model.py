"""The verbs from a trained model to its users: predict, export-model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exitwave.workflows import verbs_train  # noqa: F401  (its verbs stand before these in the help)
from exitwave.workflows.commands import TRAIN, Debug, Json, Quiet, verb
from exitwave.workflows.session import open_session


@verb(
    "predict",
    panel=TRAIN,
    purpose="Apply a trained network to an experimental or simulated 4D-STEM file.",
    more="Reads what RosettaSciIO reads (EMD, HyperSpy, MIB, DM4, MRC, …), also files larger than memory. What the "
    "file does not say and no option gives is estimated and printed: semi-angle or detector sampling from the bright "
    "disc, the scan's rotation from the curl of the centre of mass. Patterns are brought to the detector and the step "
    "of the training, predicted window by window and stitched. Beside FILE come its uncertainty and a picture.",
    example="exitwave predict runs/a scan.emd --energy-keV 200 --out potential.hspy\n"
    "exitwave predict runs/a stack.mib --scan-shape 256x256 --scan-step-A 0.3 --energy-keV 200 --semiangle-mrad 20 "
    "--out potential.emd",
    then="Open FILE in HyperSpy or py4DSTEM, or look at the picture beside it.",
    codes="0 written; 2 something is missing, or outside of what the model was trained on (unless --force); 3 damaged "
    "data.",
)
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training, or of `exitwave run`.")],
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="The 4D-STEM file.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The potential: FILE.hspy or FILE.emd.")],
    energy_keV: Annotated[float | None, typer.Option("--energy-keV", help="Beam energy.")] = None,
    semiangle_mrad: Annotated[
        float | None, typer.Option("--semiangle-mrad", min=0.01, help="Convergence semi-angle.")
    ] = None,
    scan_step_A: Annotated[
        str | None, typer.Option("--scan-step-A", metavar="STEP", help="Distance of positions; or Y,X.")
    ] = None,
    scan_shape: Annotated[
        str | None, typer.Option("--scan-shape", metavar="ROWSxCOLUMNS", help="Of a stack of patterns.")
    ] = None,
    q_sampling_per_A: Annotated[
        float | None, typer.Option("--q-sampling-per-A", min=1e-6, help="Width of a detector pixel.")
    ] = None,
    rotation_deg: Annotated[
        float | None, typer.Option("--rotation-deg", help="Of the scan against the detector.")
    ] = None,
    transpose: Annotated[
        bool | None, typer.Option("--transpose/--no-transpose", help="Exchange the detector's axes.")
    ] = None,
    flip: Annotated[
        str, typer.Option("--flip", metavar="none|y|x|yx", help="Detector axes that point the other way.")
    ] = "none",
    center: Annotated[
        str | None, typer.Option("--center", metavar="Y,X", help="Detector pixel of the zero frequency.")
    ] = None,
    gain: Annotated[
        float | None, typer.Option("--gain", min=1e-12, help="Detector units per electron, to judge the dose.")
    ] = None,
    defocus_A: Annotated[float | None, typer.Option("--defocus-A", help="Where the model wants it.")] = None,
    thickness_A: Annotated[
        float | None, typer.Option("--thickness-A", min=0.01, help="Where the model wants it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Predict outside of the training too.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.workflows.predicting import predict_file

    with open_session(json=json, quiet=quiet) as session:
        document = predict_file(
            session,
            run,
            source,
            out,
            scan_shape=scan_shape,
            scan_step_A=scan_step_A,
            center=center,
            flip=flip,
            transpose=transpose,
            force=force,
            energy_keV=energy_keV,
            semiangle_mrad=semiangle_mrad,
            q_sampling_per_A=q_sampling_per_A,
            rotation_deg=rotation_deg,
            gain=gain,
            defocus_A=defocus_A,
            thickness_A=thickness_A,
        )
        session.result(document, lambda: document["message"])


@verb(
    "export-model",
    panel=TRAIN,
    purpose="Write a trained network for other programs: safetensors, torch.export, ONNX.",
    example="exitwave export-model runs/a --out model --format safetensors,torch,onnx",
    then="`exitwave.train.export_model.load_exported` reads model.safetensors and config.json back.",
    codes="0 written; 2 no trained model, an unknown format, or its library is not installed.",
)
def export_model(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a training, or of `exitwave run`.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write, made if needed.")],
    formats: Annotated[
        str, typer.Option("--format", metavar="A,B", help="Of safetensors, torch, onnx.")
    ] = "safetensors,torch",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.train.export_model import export_model as export
    from exitwave.train.run import load_model

    with open_session(json=json, quiet=quiet) as session:
        inner = run / "train"
        model = load_model(inner if not (run / "model.pt").exists() and inner.is_dir() else run)
        made = export(model, out, [name.strip() for name in formats.split(",") if name.strip()])
        session.result({"out": str(out), "files": made}, lambda: "Wrote " + ", ".join(made.values()))
