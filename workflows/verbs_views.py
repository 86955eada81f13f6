"""The verbs between data sets and other formats: export, ingest, subset, merge, migrate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from exitwave.workflows import verbs_stored  # noqa: F401  (its verbs stand before these in the help)
from exitwave.workflows.commands import DATA, Debug, Json, Quiet, verb
from exitwave.workflows.session import Session, open_session
from exitwave.workflows.verbs_data import DatasetFolder

Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Which samples, e.g. \"energy_keV>=150 and split=='train'\". Comparisons of parameters, split, formula, "
        "space_group or uid, joined by and, or, not and brackets.",
    ),
]


def _feeding(feed: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def emit(kind: str, **fields: Any) -> None:
        feed({"kind": kind, **fields})

    return emit


@verb(
    "export",
    panel=DATA,
    purpose="Write samples as files that other programs open: EMD, hspy, Zarr, WebDataset.",
    more="emd and hspy: one calibrated 4-D cube a file, PATH is a file for one sample and a folder for several. "
    "emd opens with emdfile and any EMD 1.0 reader; py4dstem is the same as a DataCube, which `py4DSTEM.read` gives "
    "back calibrated. zarr (opened by xarray) and webdataset (tar files) take the whole selection with all fields. "
    "Nothing is overwritten, and nothing half-written is left.",
    example="exitwave export data/quick --format hspy --uid '#0' --out gold.hspy\n"
    "exitwave export data/quick --format py4dstem --split test --dose 1e4 --out exported/\n"
    "exitwave export data/quick --format webdataset --fields cbed,potential --out tars/",
    then="Open it: `py4DSTEM.read(FILE)`, `hyperspy.api.load(FILE)`, `xarray.open_zarr(PATH)`, "
    "`webdataset.WebDataset(...)`.",
    codes="0 written; 2 usage: unknown sample or field, PATH exists; 3 a source shard is damaged; 75 interrupted or "
    "disk full, the same command goes on.",
)
def export(
    dataset: DatasetFolder,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="emd, py4dstem, hspy, zarr or webdataset.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="The file or folder to write; it must not exist.")],
    uid: Annotated[
        list[str] | None, typer.Option("--uid", metavar="UID", help="A sample's id, or #N. May be given several times.")
    ] = None,
    split: Annotated[str | None, typer.Option("--split", metavar="NAME", help="Samples of this split only.")] = None,
    where: Where = None,
    dose: Annotated[
        float | None,
        typer.Option("--dose", metavar="ELECTRONS", help="Add counting noise: incident electrons per probe position."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise; it is keyed by seed and uid.")] = 0,
    fields: Annotated[
        str | None,
        typer.Option("--fields", metavar="A,B", help="Which fields; by default cbed for emd and hspy, else all."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.ingest.dataset import open_dataset
    from exitwave.ingest.exporting import ExportSpec, export_samples
    from exitwave.ingest.selection import select_samples
    from exitwave.workflows.datasets import find_dataset
    from exitwave.workflows.progress import human_bytes

    with open_session(json=json, quiet=quiet) as session:
        wanted = tuple(name.strip() for name in (fields or "").split(",") if name.strip())
        spec = ExportSpec(format=format, fields=wanted, dose_e_per_pattern=dose, seed=seed)
        data, numbers = select_samples(open_dataset(find_dataset(dataset)), uids=uid or (), split=split, where=where)

        def work(emit: Callable[..., None]) -> Any:
            return export_samples(data, numbers, spec, out, emit=emit, stopped=session.stop.is_set)

        report = run_work(session, work)
        document = report.to_json()
        document["message"] = (
            f"{report.samples} samples in {report.files} files, {human_bytes(report.bytes)}: {report.out}"
        )
        session.result(document, lambda: document["message"])


@verb(
    "ingest",
    panel=DATA,
    purpose="Bring other people's HDF5, EMD, hspy, Zarr or .npy arrays into a data set.",
    more="MAP.yaml says which array is which field, the order of its axes, units, where parameters stand, and the "
    "split; `exitwave inspect FILE --draft-map` writes a first one. Shapes, units and finite values are checked before "
    "anything counts; files may be larger than memory.",
    example="exitwave inspect scan12.hspy --draft-map > map.yaml\n"
    "exitwave ingest scan*.hspy --map map.yaml --out data/scans",
    then="`exitwave inspect DATASET`, `exitwave verify DATASET`, `exitwave train TRAIN.yaml --data DATASET --out RUN` "
    "(`exitwave init TRAIN.yaml` writes one).",
    codes="0 ingested; 2 the map or a file does not fit (nothing is written); 3 a file is damaged; 75 interrupted or "
    "disk full, the same command goes on.",
)
def ingest(
    files: Annotated[list[Path], typer.Argument(metavar="FILES…", help="Files or Zarr folders; one map for all.")],
    map: Annotated[Path, typer.Option("--map", metavar="MAP.yaml", help="What the arrays are.")],
    out: Annotated[Path, typer.Option("--out", metavar="DATASET", help="The data set to make; it must not exist.")],
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.ingest.foreign_ingest import ingest_files
    from exitwave.ingest.foreign_map import MapSpec
    from exitwave.workflows.config import load_document, validate
    from exitwave.workflows.progress import human_bytes

    with open_session(json=json, quiet=quiet) as session:
        spec = validate(load_document(map), MapSpec)

        def work(emit: Callable[..., None]) -> Any:
            return ingest_files(files, spec, out, emit=emit, stopped=session.stop.is_set)

        report = run_work(session, work)
        splits = ", ".join(f"{name} {n}" for name, n in report.splits.items())
        if report.unmapped:
            session.note(f"The map gives no {', '.join(report.unmapped)}: they are zero in the data set.")
        document = report.to_json()
        document["message"] = (
            f"{report.samples} samples ({splits}) from {report.files} files in {report.shards} shards, "
            f"{human_bytes(report.bytes)}: {out}"
        )
        session.result(document, lambda: document["message"])
        session.hint(f"exitwave inspect {out}")


OutDataset = Annotated[Path, typer.Option("--out", metavar="DATASET", help="The data set to make; it must not exist.")]


def _show_view(session: Session, report: Any) -> None:
    splits = ", ".join(f"{name} {n}" for name, n in sorted(report.splits.items()))
    document = report.to_json()
    document["message"] = (
        f"{report.samples} samples ({splits}) in {report.shards} shards, {report.linked} taken whole and "
        f"{report.rewritten} written anew; {report.dropped} samples left out: {report.out}"
    )
    session.result(document, lambda: document["message"])
    session.hint(f"exitwave verify {report.out}")


@verb(
    "subset",
    panel=DATA,
    purpose="Make a data set of some samples of another: by split, parameters, structure or id.",
    more="Whole shards are linked (or copied to another disk), of others the wanted rows are written anew. The source "
    "stays as it is; how the subset was made stands in its manifest.",
    example="exitwave subset data/quick --where \"energy_keV>=150 and split=='train'\" --out data/high\n"
    "exitwave subset data/quick --where \"formula in ('Au', 'Cu')\" --out data/metals",
    then="`exitwave inspect DATASET`, `exitwave train TRAIN.yaml --data DATASET --out RUN` "
    "(`exitwave init TRAIN.yaml` writes one).",
    codes="0 made; 2 the condition cannot be read or leaves nothing, --out exists; 3 a source shard is damaged; 75 "
    "interrupted or disk full, the same command goes on.",
)
def subset(
    dataset: DatasetFolder,
    out: OutDataset,
    where: Where = None,
    split: Annotated[str | None, typer.Option("--split", metavar="NAME", help="Samples of this split only.")] = None,
    uid: Annotated[
        list[str] | None, typer.Option("--uid", metavar="UID", help="A sample's id, or #N. May be given several times.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.ingest.subset import subset_dataset
    from exitwave.workflows.datasets import find_dataset

    with open_session(json=json, quiet=quiet) as session:
        source = find_dataset(dataset)

        def work(emit: Callable[..., None]) -> Any:
            return subset_dataset(
                source, out, where=where, split=split, uids=uid or (), emit=emit, stopped=session.stop.is_set
            )

        _show_view(session, run_work(session, work))


@verb(
    "merge",
    panel=DATA,
    purpose="Make one data set of several.",
    more="Fields and parameters must be the same. A sample that stands in several is taken once; one id for different "
    "samples is refused, and so is a composition that one data set trains on and another tests on.",
    example="exitwave merge data/first data/second --out data/both",
    then="`exitwave verify DATASET`, `exitwave train TRAIN.yaml --data DATASET --out RUN` "
    "(`exitwave init TRAIN.yaml` writes one).",
    codes="0 made; 2 the data sets do not go together, --out exists; 3 a source shard is damaged; 75 interrupted or "
    "disk full, the same command goes on.",
)
def merge(
    datasets: Annotated[list[Path], typer.Argument(metavar="D1 D2…", help="Two data sets or more, or RUNs.")],
    out: OutDataset,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    from exitwave.ingest.merge import merge_datasets
    from exitwave.workflows.datasets import find_dataset

    with open_session(json=json, quiet=quiet) as session:
        sources = [find_dataset(folder) for folder in datasets]

        def work(emit: Callable[..., None]) -> Any:
            return merge_datasets(sources, out, emit=emit, stopped=session.stop.is_set)

        _show_view(session, run_work(session, work))


@verb(
    "migrate",
    panel=DATA,
    purpose="Bring a data set of an older format to the present one.",
    more="Samples keep their ids, bytes and order. The new data set is built and compared beside the old one, then "
    "takes its place in one step; the old one is kept as DATASET.version-N until you remove it.",
    example="exitwave migrate data/old",
    then="`exitwave verify DATASET`; then remove DATASET.version-N.",
    codes="0 migrated, or nothing to do; 2 it is being written to, or no way leads from its version; 3 a shard is "
    "damaged; 75 interrupted or disk full: the data set is as it was, the same command goes on.",
)
def migrate(dataset: DatasetFolder, json: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    from exitwave.ingest.migrate import migrate_dataset
    from exitwave.workflows.datasets import find_dataset

    with open_session(json=json, quiet=quiet) as session:
        source = find_dataset(dataset) if dataset.exists() else dataset  # a killed swap is finished where it can be

        def work(emit: Callable[..., None]) -> Any:
            return migrate_dataset(source, emit=emit, stopped=session.stop.is_set)

        report = run_work(session, work)
        document = report.to_json()
        document["message"] = (
            f"{report.dataset}: version {report.version_before} -> {report.version}, {report.samples} samples in "
            f"{report.shards} shards; the old data set is {report.kept}"
            if report.kept
            else f"{report.dataset}: is of version {report.version} already; nothing to do."
        )
        session.result(document, lambda: document["message"])


def run_work(session: Session, work: Callable[[Callable[..., None]], Any]) -> Any:
    """Runs `work(emit)` with progress; it looks at `session.stop` between two units."""
    with session.progress() as feed, session.finishing("the sample in hand"):
        return work(_feeding(feed))
