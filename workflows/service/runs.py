"""The service's verbs without HTTP: list, submit, look, command. Thread-safe; all state is on disk."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from exitwave.ingest.errors import ExitwaveError, UsageError
from exitwave.ingest.files import FileLock
from exitwave.simulate.commands import write_command
from exitwave.simulate.lease import lease_holder
from exitwave.workflows.service.catalogue import NAME, Kind, Place, find_place, read_inside, scan
from exitwave.workflows.service.facts import Facts, how_far
from exitwave.workflows.service.jobs import Job, Jobs, Verdict
from exitwave.workflows.service.live import Live
from exitwave.workflows.service.newest import newest_pictures
from exitwave.workflows.service.shared import Shared
from exitwave.workflows.service.submit import Verb, arguments_for, checked, verb_of, write_new
from exitwave.workflows.session import compact_json

__all__ = ["Conflict", "Runs"]

_KINDS: dict[str, Kind] = {"run": "pipeline", "tune": "study"}
_VERBS: dict[Kind, Verb] = {"pipeline": "run", "study": "tune", "campaign": "simulate"}
_BUSY = ("starting", "running", "stopping", "waiting")


class Conflict(Exception):
    """It cannot be done in the state that things are in."""


class Runs:
    """Everything below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = Jobs(root, lambda id: how_far(find_place(root, id)))
        self.live = Live(self.text)
        self._facts = Facts()
        self._texts = Shared(lambda id: compact_json(self.whole(id)))
        self._rows = Shared(lambda _: self._all_rows())
        self._changing = threading.Lock()

    def place(self, id: str) -> Place | None:
        """Where the run is; one that was submitted and has written nothing yet has a place already."""
        found = find_place(self.root, id)
        if found is None and "~" not in id and (job := self._job(id)) is not None:
            return Place(id=id, path=self.root / id, kind=_KINDS.get(job.arguments[0], "campaign"))
        return found

    def _job(self, id: str) -> Job | None:
        return self.jobs.get(id) if all(NAME.fullmatch(part) for part in id.split("~")) else None

    def _need(self, id: str) -> Place:
        place = self.place(id)
        if place is None:
            raise LookupError(id)
        return place

    def listed(self, offset: int, limit: int) -> dict[str, Any]:
        """Rows of the newest first, and how many there are; at most half a second old."""
        rows = self._rows.get("")
        return {"runs": rows[offset : offset + limit], "total": len(rows)}

    def _all_rows(self) -> list[dict[str, Any]]:
        jobs = self.jobs.all()
        places = {place.id: place for place in scan(self.root)}
        for id in jobs.keys() - places.keys():
            if (place := self.place(id)) is not None:
                places[id] = place
        rows = [self._short(place) for place in places.values()]
        rows.sort(key=lambda row: (-row["updated"], row["id"]))
        return rows

    def _short(self, place: Place) -> dict[str, Any]:
        return self._facts.short(place, *self._judged(place.id))

    def _judged(self, id: str) -> tuple[Job | None, Verdict | None]:
        job = self._job(id)
        if job is None:
            return None, None
        verdict = self.jobs.verdict(job)
        if verdict.state not in _BUSY and FileLock(self.root.joinpath(*id.split("~")) / ".lock").is_held():
            verdict = Verdict(state="running", why="started from a command line")  # since our process ended
        return job, verdict

    def whole(self, id: str) -> dict[str, Any]:
        """All facts of one run. Raises LookupError where there is none."""
        place = self._need(id)
        facts = self._facts.whole(place, *self._judged(id))
        if facts["state"] == "failed":
            last = [line for line in self.jobs.log(id, 4096).splitlines() if line.strip()][-1:]
            facts["why"] = last[0][:1000] if last else facts["why"]
        return facts

    def text(self, id: str) -> str:
        """`whole` as JSON, at most half a second old: made once, however many ask. Raises LookupError."""
        return self._texts.get(id)

    def fresh_text(self, id: str) -> str | None:
        """`text` where it has been made already."""
        return self._texts.fresh(id)

    def submit(self, name: str, text: str, *, online: bool | None = None, ranks: int | None = None) -> dict[str, Any]:
        """Write the configuration and let it run; `online`, `ranks` as options of the command line, None for none.

        Raises UsageError for a bad one, Conflict for a name in use.
        """
        document = checked(text, name=name, root=self.root)
        verb = verb_of(document, online=online, ranks=ranks)
        with self._changing:
            if self.place(name) is not None:
                raise Conflict(f"there is a run {name!r} already; choose another name, or resume that one")
            try:
                path = write_new(document, name=name, root=self.root, began=False)
            except UsageError as error:
                raise Conflict(str(error)) from None
            self.jobs.want(name, arguments_for(path, self.root / name, verb=verb, ranks=ranks))
        self.jobs.reconcile()
        self._texts.forget(name)
        self._rows.forget("")
        return self.whole(name)

    def failures(self, id: str) -> Any:
        """The contract's list."""
        from exitwave.workflows.status import failures_of

        place = self._need(id)
        try:
            return failures_of(place.path if place.kind != "study" else place.path / "dataset")
        except (ExitwaveError, OSError):
            return []

    def log(self, id: str) -> str:
        self._need(id)
        return self.jobs.log(id)

    def newest(self, id: str) -> dict[str, Any]:
        """See `newest_pictures`."""
        dataset = self._need(id).dataset
        return newest_pictures(dataset) if dataset is not None else {}

    def report(self, id: str) -> bytes | None:
        """The run's report, where it has been written."""
        return read_inside(self.root, self._need(id).path / "report.html")

    def command(self, id: str, command: Literal["drain", "cancel", "resume", "retry"]) -> dict[str, Any]:
        """Ask for it. Raises Conflict where it makes no sense now."""
        place = self._need(id)
        with self._changing:
            state = self.whole(id)["state"]
            if command in ("drain", "cancel"):
                if state not in _BUSY:
                    raise Conflict(f"{id} is {state}: there is nothing to {command}")
                self._stop(place, command)
            else:
                if place.kind == "training":
                    raise Conflict(f"{id} is a training of its own; `exitwave train` goes on with it")
                if command == "retry":
                    self._retry(place)
                if state not in _BUSY or state in ("waiting", "stopping"):  # one that is ending starts again then
                    self.jobs.want(id, self._arguments(place))
        self.jobs.reconcile()
        self._texts.forget(id)
        self._rows.forget("")
        return self.whole(id)

    def _arguments(self, place: Place) -> list[str]:
        """As it was started; for one from a command line, from the configuration that it keeps."""
        job = self.jobs.get(place.id)
        if job is not None:
            return list(job.arguments)
        name = {"pipeline": "pipeline.yaml", "study": "tune.yaml"}.get(place.kind, "campaign.yaml")
        if not (place.path / name).is_file():
            raise Conflict(f"{place.id} was not made by a campaign: there is nothing to go on with")
        verb = "online" if place.is_online else _VERBS[place.kind]
        return arguments_for(place.path / name, place.path, verb=verb)

    def _stop(self, place: Place, how: Literal["drain", "cancel"]) -> None:
        """Ours by its process; one of a command line through its campaign's controller, which reads commands."""
        job = self._job(place.id)
        if job is not None and self.jobs.verdict(job).state in _BUSY:
            self.jobs.stop(place.id, how)
        elif place.dataset is None or (holder := lease_holder(place.dataset)) is None:
            raise Conflict(f"{place.id} was started from a command line and is past its campaign: stop it there")
        else:
            write_command(place.dataset, how, epoch=int(holder.get("epoch", 0)))

    def _retry(self, place: Place) -> None:
        """Failed tasks get a new chance, from the controller that runs now or the one that is started."""
        if place.dataset is not None and place.dataset.is_dir():
            write_command(place.dataset, "retry")

    def metrics(self) -> str:
        """Prometheus' text: runs by state, samples, rate."""
        rows = self.listed(0, 100_000)["runs"]
        states = Counter((row["kind"], row["state"]) for row in rows)
        lines = ["# TYPE exitwave_runs gauge"]
        lines += [f'exitwave_runs{{kind="{kind}",state="{state}"}} {n}' for (kind, state), n in sorted(states.items())]
        lines.append("# TYPE exitwave_samples gauge")
        for row in rows:
            for state, n in row.get("status", {}).get("samples", {}).items():
                lines.append(f'exitwave_samples{{run="{row["id"]}",state="{state}"}} {n}')
        lines.append("# TYPE exitwave_watchers gauge")
        lines.append(f"exitwave_watchers {self.live.watchers}")
        return "\n".join(lines) + "\n"
