"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.rejections import grouped, rejected_structures

__all__ = [
    "bench_table",
    "doctor_table",
    "failures_table",
    "inspect_table",
    "metrics_table",
    "plan_table",
    "sample_table",
    "status_table",
    "verify_table",
]

Row = Mapping[str, Any]


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def plan_table(document: Row) -> Group:
    """What a campaign would do."""
    whole = rejected_structures(document["rejected"])
    of = ("structures", str(document["structures"]) + (f", {whole} rejected" if whole else ""))
    if document.get("simulator"):  # a user's own
        fields = (f"{name} {'x'.join(map(str, shape))}" for name, _, shape, _ in document["fields"])
        of = ("simulator", f"{document['simulator']} ({', '.join(fields)})")
    rows = [
        ("samples", f"{document['samples']} in {document['shards']} shards" + _splits(document)),
        of,
        ("size", f"{human_bytes(document['bytes'])}" + _free(document)),
    ]
    if document.get("core_hours") is not None:
        error = f" ± {document['core_hours_error']:.2g}" if document.get("core_hours_error") else ""
        rows.append(("work", f"{document['core_hours']:.3g}{error} core-hours"))
    if document.get("eta_s") is not None:
        workers = f" on {document['workers']} workers" if document.get("workers") else ""
        start = f", {human_seconds(document['start_s'])} of it to start them" if document.get("start_s") else ""
        rows.append(("duration", f"about {human_seconds(document['eta_s'])}{workers}{start}"))
    if document.get("memory_per_worker_bytes"):
        rows.append(("memory", f"{human_bytes(document['memory_per_worker_bytes'])} a worker"))
    for row in document.get("staging") or ():
        fits = "" if row["fits"] else ", more than the local disk holds"
        told = f"{human_seconds(row['seconds'])} on {row['nodes']} nodes, {row['GB_per_node']:g} GB each{fits}"
        rows.append(("staging", told))
    if (resume := document.get("resume")) is not None:
        rows.append(("there", f"{resume['committed']} shards are committed, {resume['left']} are left to run"))
        rows += [("again", f"{count} shard{'s' * (count != 1)}: {why}") for why, count in resume["reasons"].items()]
    script = [Text(""), Text(document["slurm_script"].rstrip())] if document.get("slurm_script") else []
    return Group(_pairs(rows), *_rejections(document["rejected"]), *script)


def _rejections(rows: Sequence[Row]) -> list[Any]:
    """One paragraph for each reason; samples that are lost stand out."""
    parts: list[Any] = []
    for found in grouped(rows):
        n = len(found.sources)
        if found.samples:
            head = f"{found.samples} of {found.asked} samples rejected: {found.why}"
        else:
            head = f"{n} structure{'s' * (n != 1)} rejected: {found.why}"
        of = f"of {n} structures: " if found.samples and n != 1 else ""
        parts += [Text(""), Text(head, style="bold yellow"), Text(f"  {of}{', '.join(found.sources)}")]
    return parts


def _splits(document: Row) -> str:
    """Samples of each split, in the order of use."""
    splits = document.get("splits")
    if not isinstance(splits, Mapping) or not splits:
        return ""
    order = [name for name in ("train", "val", "test") if name in splits]
    order += [name for name in splits if name not in order]
    return " (" + ", ".join(f"{splits[name]} {name}" for name in order) + ")"


def _free(document: Row) -> str:
    free = document.get("free_bytes")
    return f", {human_bytes(free)} free on the disk" if free is not None else ""


def status_table(document: Row) -> Group:
    """How far a campaign is."""
    samples, shards = document["samples"], document["shards"]
    planned = samples.get("planned") or 0
    done = f"{samples['committed']} of {planned}" + (
        f" ({100 * samples['committed'] / planned:.0f} %)" if planned else ""
    )
    more = [f"{samples[k]} {k}" for k in ("failed", "rejected") if samples.get(k)]
    rows = [("state", str(document["state"]))] if document.get("state") else []
    rows += [
        ("samples", ", ".join([done, *more])),
        ("shards", ", ".join(f"{value} {name}" for name, value in shards.items())),
        ("attempts", str(document.get("attempts", ""))),
    ]
    if document.get("rate_samples_per_s"):
        rows.append(("rate", f"{document['rate_samples_per_s']:.3g} samples/s"))
    if document.get("eta_s"):
        rows.append(("left", f"about {human_seconds(document['eta_s'])}"))
    if document.get("cluster"):
        rows.append(("cluster", str(document["cluster"])))
    if document.get("dashboard"):
        rows.append(("dashboard", str(document["dashboard"])))
    if (steered := document.get("adaptive")) is not None:
        rows.append(("rounds", f"{steered['decided']} of {steered['rounds']} decided"))
        for made in steered["by_round"]:
            error = f"mean error before it {made['error']:.3g}, " if made["error"] is not None else ""
            most = max(made["regions"], key=lambda r: r["share"] / r["natural"] if r["natural"] else 0.0)
            times = f"{most['share'] / most['natural']:.2g} times its natural share"
            told = f"{made['samples']} samples, {error}{most['axis']} {most['region']}: {times}"
            rows.append((f"round {made['round']}", told))
    parts: list[Any] = []
    for name, value in (document.get("stages") or {}).items():
        parts.append(_pairs([(f"{name:<9}", value)]))
    return Group(*parts, _pairs(rows))


def failures_table(rows: Sequence[Row]) -> Any:
    """What failed."""
    if not rows:
        return "Nothing failed."
    table = _table("task", "state", "attempts", "host", "why", right=("attempts",))
    for row in rows:
        cells = [row.get("task"), row.get("state"), row.get("attempts"), row.get("host"), row.get("why")]
        table.add_row(*(Text("" if c is None else str(c)) for c in cells))
    return table


def verify_table(document: Row) -> Group:
    """What a re-reading found."""
    head = f"{document['shards']} shards, {document['samples']} samples, {human_bytes(document['bytes'])} read: "
    unfinished = [Text(document["unfinished"], style="yellow")] if document.get("unfinished") else []
    if document["ok"]:
        return Group(Text(head + "all whole."), *unfinished)
    table = _table("shard", "sample", "field", "what is wrong")
    for bad in document["bad"]:
        uid = bad.get("uid")
        cells = [bad.get("shard"), f"{uid:016x}" if isinstance(uid, int) else uid, bad.get("field"), bad.get("why")]
        table.add_row(*(Text("" if c is None else str(c)) for c in cells))
    return Group(Text(head + f"{len(document['bad'])} damaged or missing."), *unfinished, Text(""), table)


def metrics_table(document: Row) -> Group:
    """The network beside the classical methods: all samples, then by thickness and by dose, then what was aimed at."""
    if document.get("task") == "classify":
        return _class_table(document)
    parts: list[Any] = [_scores(document["metrics"])]
    for title, key in (("thickness Å", "thickness_A"), ("electrons a pattern", "dose_e_per_pattern")):
        rows = document.get("by_thickness" if key == "thickness_A" else "by_dose") or ()
        if len(rows) > 1:
            parts += [Text(""), _errors(title, key, rows)]
    if other := document.get("ptychography"):
        about = f"these {other['n']} samples alone, for every method; {other['library']}: {other['how']}"
        parts += [Text(""), _scores(other["metrics"]), Text(about, style="dim")]
    if document.get("targets"):
        aims = _table("exitwave's own aim", "reached", "wanted", "", right=("reached", "wanted"))
        for row in document["targets"]:
            met = "met" if row["holds"] else "missed"
            aims.add_row(row["name"], _figure(row["value"]), _figure(row["target"]), met)
        whose = "what exitwave asks of the network of examples/reconstruct.yaml; a shorter training may miss it"
        parts += [Text(""), aims, Text(whose, style="dim")]
    notes = [document.get(key) for key in ("edge_note", "step_note", "focus_note")]
    tail = [_about(document), *(note for note in notes if note)]
    return Group(*parts, Text(""), *(Text(line, style="dim") for line in tail))


def _class_table(document: Row) -> Group:
    table = _table("method", "top-1", "F1", right=("top-1", "F1"))
    for method, figures in document["metrics"].items():
        table.add_row(method, _figure(figures["top1"]), _figure(figures["f1"]))
    about = f"{document['n']} samples of split {document['split']}, {len(document['classes'])} space groups"
    return Group(table, Text(""), Text(f"{about}, {document['ms_per_sample']:.3g} ms a sample", style="dim"))


def _scores(metrics: Row) -> Any:
    columns: tuple[tuple[str, str], ...] = (
        ("rmse_VA", "RMSE V·Å"),
        ("rmse_V", "RMSE V"),
        ("rmse_V_fitted", "RMSE V, rescaled"),
        ("r2", "R²"),
        ("psnr", "PSNR dB"),
        ("ssim", "SSIM"),
        ("column_pm", "columns pm"),
    )
    names = [name for _, name in columns]
    table = _table("method", *names, right=names)
    for method, figures in metrics.items():
        table.add_row(
            method, *(_figure(figures.get(key)) for key, _ in columns), style="bold" if method == "model" else ""
        )
    return table


def _errors(title: str, key: str, rows: Sequence[Row]) -> Any:
    """RMSE in V of each method, one row for each bin."""
    methods = list(rows[0]["metrics"])
    table = _table(title, "samples", *methods, right=("samples", *methods))
    for row in rows:
        value = row[key]
        name = " to ".join(f"{v:.0f}" for v in value) if isinstance(value, list | tuple) else _figure(value)
        table.add_row(name, str(row["n"]), *(_figure(row["metrics"][m].get("rmse_V")) for m in methods))
    return table


def _about(document: Row) -> str:
    speed = document.get("ms_per_sample")
    tail = f"{document['n']} samples of split {document['split']}" + (f", {speed:.3g} ms a sample" if speed else "")
    groups, interval = document.get("groups") or {}, (document.get("rmse_VA_interval_95") or {}).get("model")
    if interval:
        tail += (
            f"; the model's RMSE is {interval[0]:.3g} to {interval[1]:.3g} V·Å with 95 % confidence over "
            f"{groups['n']} {groups['by']}s"
        )
    if groups.get("anecdotal"):
        tail += "; anecdotal: fewer than five held-out prototypes tell of these alone"
    return tail


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"


def inspect_table(document: Row) -> Group:
    """What a shard or a data set holds."""
    parts: list[Any] = [_pairs([(k, str(v)) for k, v in document.get("facts", {}).items()]), Text("")]
    if "arrays" in document:
        return Group(*parts, *_foreign_parts(document))
    table = _table("field", "shape of a sample", "type", "unit", "axes")
    for f in document.get("fields", ()):
        table.add_row(f["name"], "×".join(map(str, f["shape"])), f["dtype"], f["unit"], " ".join(f["axes"]))
    parts.append(table)
    if document.get("structures"):
        structures = _table("structure", "space group", "zone axis", "split", "samples", "source", right=("samples",))
        for s in document["structures"]:
            structures.add_row(
                Text(str(s["formula"])),
                str(s["space_group"]),
                str(s["zone_axis"]),
                str(s["split"]),
                str(s["samples"]),
                Text(str(s["source"])),
            )
        parts += [Text(""), structures]
    if document.get("uids"):
        parts += [Text(""), Text("first samples: " + "  ".join(document["uids"]))]
    return Group(*parts)


def _foreign_parts(document: Row) -> list[Any]:
    """The arrays of a file that is not ours, and what a mapping file would need."""
    table = _table("array", "shape", "type", "attributes")
    shown = [a for a in document["arrays"] if a["shape"]] or document["arrays"]
    for a in shown:
        told = ", ".join(f"{k}={_rounded(v)}" for k, v in a["attributes"].items() if isinstance(v, str | int | float))
        shape = "×".join(map(str, a["shape"])) or "scalar"
        table.add_row(Text(a["path"], overflow="fold"), shape, a["dtype"], Text(told[:80]))
    notes = [Text(note, style="yellow") for note in document["notes"]]
    if hidden := len(document["arrays"]) - len(shown):
        notes.insert(0, Text(f"and {hidden} single values, which --json lists", style="dim"))
    return [table, Text(""), *notes, Text("`exitwave inspect --draft-map FILE` prints a mapping file to start from.")]


def sample_table(document: Row) -> Group:
    """One sample's parameters; aberrations that are zero stand together in one line."""
    params = document["params"]
    zero = [k for k, v in params.items() if k in _ABERRATIONS and v == 0]
    angles = {f"phi{k[1:3]}_deg" for k in zero}  # the direction of nothing
    rows = [(k, _rounded(v)) for k, v in params.items() if k not in zero and k not in angles]
    if zero:
        rows.insert(
            next((i for i, (k, _) in enumerate(rows) if k.startswith("tilt_")), len(rows)),
            ("all other aberrations" if len(zero) < len(_ABERRATIONS) else "all aberrations", "0"),
        )
    return Group(
        Text(f"sample {document['uid']}: {document['formula']}"), _pairs(rows), Text(f"picture: {document['picture']}")
    )


def bench_table(document: Row) -> Group:
    """What was measured, and the targets. Columns are those of the benchmark's own rows."""
    columns = list(document["rows"][0])
    table = _table(*columns, right=[c for c in columns if not isinstance(document["rows"][0][c], str)])
    for row in document["rows"]:
        table.add_row(*(str(row[c]) for c in columns))
    targets = _table("target", "value", "wanted", "holds", right=("value", "wanted"))
    for t in document["targets"]:
        targets.add_row(t["name"], str(t["value"]), str(t["target"]), "yes" if t["holds"] else "no")
    return Group(table, Text(""), targets)


_ABERRATIONS = ("defocus_A", "C12_A", "C21_A", "C23_A", "C30_A", "C32_A", "C34_A", "C50_A")


def _rounded(value: Any) -> str:
    """Six significant digits, as far as they say anything: 52.644539999999985 is 52.6445."""
    if isinstance(value, list | tuple):
        return "[" + " ".join(_rounded(v) for v in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor_table(document: Row) -> Group:
    """The checks of this machine."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in document["checks"]:
        text = Text(str(check["found"]))
        if check.get("hint"):
            text.append(f"\n{check['hint']}", style="italic")
        table.add_row(_MARKS[check["state"]], check["name"], text)
    counts = {s: sum(c["state"] == s for c in document["checks"]) for s in ("ok", "warn", "fail")}
    return Group(table, Text(""), Text(", ".join(f"{n} {s}" for s, n in counts.items())))
