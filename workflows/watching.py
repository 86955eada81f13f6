"""`exitwave status --watch`: a picture that is drawn anew each second; in a pipe a line for each change."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from exitwave.workflows.progress import human_bytes, human_seconds
from exitwave.workflows.session import Session
from exitwave.workflows.status import status_document
from exitwave.workflows.training_seen import FollowedTraining
from exitwave.workflows.tune_status import study_line, study_table

__all__ = ["plain_line", "watch_status", "watch_view"]

_EVERY_S = 1.0
_SILENT_S = 5.0
_BAR = 48
_QUIET = "bright_black"
_COLOURS = {
    "committed": "green",
    "running": "yellow",
    "failed": "red",
    "rejected": "magenta",
    "pending": "bright_black",
}


def watch_status(session: Session, folder: Path) -> None:
    """Until everything is committed and nobody is at work, or Ctrl-C."""
    console = Console(highlight=False)
    training = FollowedTraining(folder / "train")

    def look() -> dict[str, Any]:
        return status_document(folder, training=training.look())

    document = look()
    if not console.is_terminal:
        _watch_lines(session, document, look)
        return
    with Live(watch_view(document), console=console, auto_refresh=False) as live:
        while not _ended(document):
            if session.stop.wait(_EVERY_S):
                return
            document = look()
            live.update(watch_view(document), refresh=True)


def _watch_lines(session: Session, document: dict[str, Any], look: Any) -> None:
    before = ""
    while True:
        key = json.dumps(
            [document["samples"], _ended(document), document.get("trials"), (document.get("trainer") or {}).get("step")]
        )
        if key != before:
            print(plain_line(document), flush=True)
            before = key
        if _ended(document) or session.stop.wait(_EVERY_S):
            return
        document = look()


def _ended(document: Mapping[str, Any]) -> bool:
    if document.get("running"):
        return False
    stages = document.get("stages")
    return stages is None or stages["report"] != "not yet" or not document["samples"]["planned"]


def plain_line(document: Mapping[str, Any]) -> str:
    """`48 of 480 samples, running, 12 samples/s, about 36 s left, 3 attempts failed`"""
    if "trials" in document:
        return study_line(document)
    samples = document["samples"]
    words = [f"{samples['committed']} of {samples['planned']} samples", str(document["state"]).split(":")[0]]
    if document.get("running"):
        words += _pace(document)
    if failed := _failed_attempts(document):
        words.append(f"{failed} attempt{'s' * (failed != 1)} failed")
    if trainer := document.get("trainer"):
        words.append(f"training at step {trainer['step']}")
    return ", ".join(words)


def _pace(document: Mapping[str, Any]) -> list[str]:
    words = []
    if document.get("rate_samples_per_s"):
        words.append(f"{document['rate_samples_per_s']:.3g} samples/s")
    if document.get("eta_s"):
        words.append(f"about {human_seconds(document['eta_s'])} left")
    return words


def _failed_attempts(document: Mapping[str, Any]) -> int:
    return sum((document.get("failed_attempts") or {}).values())


def watch_view(document: Mapping[str, Any]) -> Group:
    """A bar of the shards by state, rate and time left, workers, attempts, why some failed, and the training."""
    if "trials" in document:
        return study_table(document)
    parts: list[Any] = [
        Text.assemble((str(document.get("name") or "campaign"), "bold"), "  ", (str(document["state"]), "cyan")),
        _bar(document["shards"]),
        _figures(document),
    ]
    if (reasons := document.get("reasons")) and _failed_attempts(document):
        table = Table("failed as", "times", "why", box=None, pad_edge=False, header_style="dim")
        for row in reasons[:4]:
            table.add_row(Text(str(row["state"]), style="red"), str(row["count"]), Text(str(row["why"])[:160]))
        parts += [Text(""), table]
    if stages := document.get("stages"):
        parts += [Text(""), _grid([(name, Text(str(value))) for name, value in stages.items()])]
    return Group(*parts)


def _bar(shards: Mapping[str, int]) -> Text:
    """A bar whose parts are as long as there are shards of each state, and the legend to it."""
    total = sum(shards.values())
    bar, legend, drawn, so_far = Text(), Text(), 0, 0
    for state, colour in _COLOURS.items():
        count = shards.get(state, 0)
        so_far += count
        upto = round(_BAR * so_far / total) if total else 0
        bar.append("━" * (upto - drawn), style=colour)
        drawn = upto
        if count or state in ("committed", "pending"):
            legend.append(f"  {count:,} {state}".replace(",", " "), style=colour)
    share = f" {100 * shards.get('committed', 0) / total:.0f} %" if total else ""
    return Text.assemble(bar, ("━" * (_BAR - drawn), _QUIET), (share, "bold"), legend)


def _figures(document: Mapping[str, Any]) -> Table:
    samples = document["samples"]
    more = "".join(f", {samples[k]} {k}" for k in ("failed", "rejected") if samples.get(k))
    rows = [("samples", Text(f"{samples['committed']} of {samples['planned']}{more}"))]
    if pace := _pace(document):
        rows.append(("pace", Text(", ".join(pace))))
    if size := document.get("bytes"):
        rows.append(("size", Text(f"{human_bytes(size['committed'])} of about {human_bytes(size['planned'])}")))
    if document.get("attempts"):
        failed = _failed_attempts(document)
        classes = ", ".join(f"{n} {name}" for name, n in (document.get("failed_attempts") or {}).items() if n)
        told = f"{document['attempts']}" + (f", {failed} failed ({classes})" if failed else "")
        rows.append(("attempts", Text(told)))
    if document.get("running") and document.get("workers"):
        held = document.get("oldest_in_hand_s")
        longest = f", longest task in hand {human_seconds(held)}" if held is not None else ""
        rows.append(("workers", Text(f"{document['workers']} ({document.get('cluster') or '?'}){longest}")))
    if trainer := document.get("trainer"):
        step = f"step {trainer['step']}" + (f" of {trainer['total_steps']}" if trainer.get("total_steps") else "")
        loss = f", loss {trainer['loss']:.4g}" if trainer.get("loss") is not None else ""
        waits = f", {human_seconds(trainer['data_wait_s'])} a step for data" if trainer.get("data_wait_s") else ""
        rows.append(("training", Text(step + loss + waits)))
    if document.get("dashboard"):
        rows.append(("page", Text(str(document["dashboard"]).removesuffix("/status") + "/exitwave")))
    silent = time.time() - float(document.get("updated") or time.time())
    if document.get("running") and silent > _SILENT_S:
        rows.append(("", Text(f"the controller has said nothing for {human_seconds(silent)}", style="yellow")))
    return _grid(rows)


def _grid(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table
