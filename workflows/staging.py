"""`exitwave stage` and the stage of a pipeline: what was asked for, as the parameters of the stager."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from exitwave.ingest.errors import UsageError
from exitwave.ingest.files import read_plain
from exitwave.workflows.campaigns import as_document
from exitwave.workflows.datasets import find_dataset
from exitwave.workflows.progress import human_bytes
from exitwave.workflows.session import Session

__all__ = ["Mode", "StageChoices", "parse_share", "stage_dataset"]

Mode = Literal["replicate", "stream", "partition"]


@dataclass(frozen=True, kw_only=True)
class StageChoices:
    """`share`: this node's number and the number of nodes; `peers`: HOST:PORT of every node, `me` among them."""

    mode: Mode = "replicate"
    capacity_bytes: int | None = None
    share: tuple[int, int] | None = None
    exchange: float = 0.0
    epoch: int = 0
    peers: Sequence[str] = ()
    me: str | None = None
    secret_file: Path | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UsageError(f"mode: expected {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.mode == "stream" and self.capacity_bytes is None:
            raise UsageError("mode stream: a capacity is needed (without one the whole data set fits: replicate).")
        if (self.mode == "partition") != (self.share is not None):
            raise UsageError("mode partition: it goes with the share of this node, K/N, and only it does.")
        if bool(self.peers) != (self.me is not None) or bool(self.peers) != (self.secret_file is not None):
            raise UsageError(
                "peers: the addresses of all nodes, this node's own and a file with the secret go together."
            )
        if self.mode == "stream" and self.peers:
            raise UsageError("mode stream: each node streams from the data set itself; peers go with the other modes.")


def parse_share(text: str) -> tuple[int, int]:
    """`2/4`: the second of four nodes, as (1, 4). UsageError."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--share: expected K/N with 1 <= K <= N, such as 2/4, got {text!r}.")
    return int(match[1]) - 1, int(match[2])


def stage_dataset(
    session: Session,
    dataset: Path | str,
    cache: Path,
    choices: StageChoices,
    *,
    feed: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Stage into `cache`; returns the report with a sentence."""
    from exitwave.ingest.staging import stage
    from exitwave.ingest.staging_run import Limits
    from exitwave.ingest.storage import is_url

    source = dataset if is_url(dataset) else find_dataset(Path(dataset))
    limits = Limits() if choices.in_flight is None else Limits(in_flight=choices.in_flight)
    peers = _peers(choices)

    def run(to: Callable[[Mapping[str, Any]], None]) -> Any:
        def emit(kind: str, **fields: Any) -> None:
            if kind == "stage_waiting":
                session.note(f"{cache}: waiting for the process that stages there ({fields['holder']})")
            to({"kind": kind, **fields})

        with session.finishing("the shards in hand"):
            return stage(
                source,
                cache,
                capacity_bytes=choices.capacity_bytes,
                emit=emit,
                stop=session.stop,
                share=None if choices.share is None else _share(choices),
                partial=choices.mode == "stream",
                limits=limits,
                peers=peers,
            )

    if feed is not None:
        report = run(feed)
    else:
        with session.progress() as own:
            report = run(own)
    document = {"mode": choices.mode, **as_document(report)}
    rate = (
        f", {human_bytes(report.bytes_copied / report.seconds)}/s" if report.bytes_copied and report.seconds > 0 else ""
    )
    peer_part = f" ({human_bytes(report.bytes_from_peers)} from peers)" if report.bytes_from_peers else ""
    document["message"] = (
        f"{report.shards} shards ready in {cache}: {human_bytes(report.bytes_copied)} copied{peer_part}{rate}, "
        f"{human_bytes(report.bytes_reused)} were there."
    )
    if is_url(source):
        document["message"] += f"\nThe data set for `--data`: {report.home}, together with `--cache {cache}`"
    return document


def _share(choices: StageChoices) -> Any:
    from exitwave.ingest.staging import Share

    assert choices.share is not None
    node, nodes = choices.share
    return Share(node=node, nodes=nodes, epoch=choices.epoch, exchange=choices.exchange)


def _peers(choices: StageChoices) -> Any:
    from exitwave.ingest.peers_staging import PeerOptions

    if choices.me is None or choices.secret_file is None:
        return None
    try:
        secret = read_plain(choices.secret_file).strip()
        mode = choices.secret_file.stat().st_mode
    except OSError as error:
        raise UsageError(f"{choices.secret_file}: the secret cannot be read: {error.strerror}.") from None
    if mode & 0o077:
        raise UsageError(f"{choices.secret_file}: others may read this secret; `chmod 600 {choices.secret_file}`.")
    return PeerOptions(me=choices.me, nodes=tuple(choices.peers), secret=secret)
