"""What a submission says beside its configuration: training while the campaign runs, and with how many ranks."""

from __future__ import annotations

from pathlib import Path

import line
import pytest

from exitwave.ingest.errors import UsageError
from exitwave.workflows.config import parse_document
from exitwave.workflows.service.catalogue import find_place
from exitwave.workflows.service.runs import Runs
from exitwave.workflows.service.submit import arguments_for, verb_of

CAMPAIGN = "name: a\nstructures: [{library: [Si]}]\n"


@pytest.mark.parametrize(
    ("section", "online", "ranks", "words"),
    [
        ("", True, None, ["run", "C", "--online", "--out", "O"]),
        ("", None, 2, ["run", "C", "--out", "O", "--ranks", "2"]),
        ("online: {}\n", None, 3, ["run", "C", "--online", "--out", "O", "--ranks", "3"]),
        ("online: {}\n", False, None, ["run", "C", "--out", "O"]),
    ],
)
def test_what_is_said_beside_it_becomes_an_option(section, online, ranks, words):
    document = parse_document(section + line.PIPELINE, source="a.yaml", folder=Path())
    verb = verb_of(document, online=online, ranks=ranks)
    assert arguments_for(Path("C"), Path("O"), verb=verb, ranks=ranks) == words


@pytest.mark.parametrize(
    ("text", "online", "ranks", "said"),
    [
        (CAMPAIGN, True, None, "online: a campaign alone trains nothing"),
        (CAMPAIGN, None, 2, "ranks: a campaign alone trains nothing"),
        ("tune: {}\n" + line.PIPELINE, True, None, "online: a search"),
        (line.PIPELINE, True, 5, "at most as many ranks"),
        ("launch: {nodes: 2}\n" + line.PIPELINE, True, None, "leave --nodes and launch.nodes out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(tmp_path, text, online, ranks, said):
    document = parse_document(text, source="a.yaml", folder=Path())
    with pytest.raises(UsageError, match=said):
        verb_of(document, online=online, ranks=ranks)


def test_nothing_is_written_for_what_is_refused(tmp_path):
    runs = Runs(tmp_path)
    with pytest.raises(UsageError, match="at most as many ranks"):
        runs.submit("a", line.PIPELINE, online=True, ranks=100)
    assert not (tmp_path / "a.yaml").exists() and runs.jobs.get("a") is None


def test_an_online_run_of_a_command_line_goes_on_online(tmp_path):
    run = tmp_path / "a"
    (run / "train").mkdir(parents=True)
    (run / "pipeline.yaml").write_text("name: a\n")
    place = find_place(tmp_path, "a")
    assert place is not None and "--online" not in Runs(tmp_path)._arguments(place)
    (run / "train" / "online.json").write_text("{}")  # written before its ranks are started
    assert "--online" in Runs(tmp_path)._arguments(place)
