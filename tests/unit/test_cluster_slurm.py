"""Slurm as text and as decisions: job scripts against golden files, the reconcile loop's pure part, TLS files."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.cluster_cuda import cuda_options
from exitwave.simulate.cluster_slurm import Decision, Job, decide
from exitwave.simulate.cluster_spec import (
    SlurmSpec,
    allocation_script,
    jobs_for,
    memory_bytes,
    walltime_seconds,
    worker_script,
)
from exitwave.simulate.cluster_tls import certificate_files, security, worker_options
from exitwave.simulate.cluster_versions import differences

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "slurm"
FULL = SlurmSpec(
    partition="cpu",
    account="phys",
    walltime="04:00:00",
    workers_per_job=16,
    memory_per_worker="3GB",
    directives=("--constraint=rome", "--mail-type=FAIL"),
    prologue=("module load python/3.11", "source ~/exitwave/bin/activate"),
    interface="ib0",
)


def scripts() -> dict[str, str]:
    return {
        "worker.sh": worker_script(
            FULL,
            scheduler="tls://10.0.0.1:8786",
            name="exitwave-8786",
            log="/scratch/d/.slurm/%j.out",
            python="/opt/exitwave/bin/python",
            tls=["--tls-ca-file", "/home/me/tls/c.pem"],
        ),
        "worker-default.sh": worker_script(
            SlurmSpec(), scheduler="tcp://h:1", name="n", log="%j.out", python="/usr/bin/python3"
        ),
        "allocation.sh": allocation_script(
            FULL,
            workers=62,
            command=["exitwave", "simulate", "my campaign.yaml", "--out", "d", "--cluster", "slurm-allocation"],
            name="exitwave-seed",
        ),
    }


@pytest.mark.parametrize("name", ["worker.sh", "worker-default.sh", "allocation.sh"])
def test_job_scripts_are_the_golden_ones(name: str) -> None:
    text = scripts()[name]
    assert text == (GOLDEN / name).read_text()
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_site_says_fills_what_the_campaign_leaves_open() -> None:
    site = {"queue": "site", "account": "a", "walltime": "02:00:00", "job-extra-directives": ["--qos=x"], "cores": 4}
    filled = SlurmSpec(account="mine", memory_per_worker="2GB").filled(site)
    assert (filled.partition, filled.account, filled.walltime) == ("site", "mine", "02:00:00")
    assert filled.directives == ("--qos=x",) and filled.memory_per_worker == "2GB"
    assert SlurmSpec().filled({}) == SlurmSpec()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"walltime": "4h"}, "HH:MM:SS"),
        ({"walltime": "00:00:00"}, "longer than nothing"),
        ({"walltime": "01:75:00"}, "HH:MM:SS"),
        ({"memory_per_worker": "much"}, "size such as 4GB"),
        ({"workers_per_job": 0}, "greater than or equal to 1"),
        ({"partition": "a\n#SBATCH --uid=0"}, "one line"),
        ({"prologue": ("",)}, "one line"),
        ({"queue": "x"}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SlurmSpec(**wrong)


def test_units() -> None:
    assert walltime_seconds("2-01:02:03") == 2 * 86400 + 3723
    assert memory_bytes("4GB") == memory_bytes("4GiB") == 4 << 30 and memory_bytes("1.5 G") == 3 << 29
    assert [jobs_for(n, FULL) for n in (1, 16, 17, 64)] == [1, 1, 2, 4]


def job(number: int, *, submitted: float = 0.0, **changes: Any) -> Job:
    return Job(job_id=str(number), submitted=submitted, **changes)


def test_a_job_that_ended_is_asked_for_again() -> None:
    jobs = (job(1, worked=True), job(2, worked=True))
    decision = decide(2, jobs, {"1": "RUNNING"}, {"1": 4}, now=100.0)
    assert (decision.submit, decision.cancel, [j.job_id for j in decision.jobs]) == (1, (), ["1"])
    assert [j.job_id for j in decision.ended] == ["2"] and decision.failures == 0


def test_requeued_and_pending_jobs_are_left_to_slurm() -> None:
    jobs = (job(1, worked=True), job(2), job(3))
    decision = decide(3, jobs, {"1": "PENDING", "2": "REQUEUED", "3": "CONFIGURING"}, {}, now=1e5)
    assert decision.submit == 0 and len(decision.jobs) == 3


def test_a_job_that_squeue_does_not_know_yet_is_not_asked_for_twice() -> None:
    assert decide(1, (job(1, submitted=95.0),), {}, {}, now=100.0).submit == 0
    assert decide(1, (job(1, submitted=80.0),), {}, {}, now=100.0).submit == 1


def test_where_squeue_does_not_answer_nothing_is_done() -> None:
    jobs = (job(1), job(2))
    assert decide(9, jobs, None, {}, now=1e6, failures=2) == Decision(submit=0, cancel=(), jobs=jobs, failures=2)


def test_too_many_jobs_are_cancelled_those_that_wait_first() -> None:
    jobs = (job(1, submitted=1.0), job(2, submitted=2.0), job(3, submitted=3.0))
    seen = {"1": "RUNNING", "2": "PENDING", "3": "PENDING"}
    assert decide(1, jobs, seen, {"1": 1}, now=50.0).cancel == ("3", "2")


def test_jobs_that_fail_at_once_stop_it_and_one_that_works_forgives() -> None:
    failures = 0
    for round_ in range(3):
        began = job(round_, state="RUNNING", began=100.0)
        decision = decide(1, (began,), {}, {}, now=105.0, failures=failures)
        failures = decision.failures
    assert failures == 3 and decision.hopeless and decision.submit == 0
    good = decide(2, (job(8, worked=True), job(9, began=100.0)), {"8": "RUNNING"}, {"8": 1}, now=105.0, failures=2)
    assert good.failures == 0 and not good.hopeless and good.submit == 1
    # After an hour's work, or an hour in the queue, an end is no failure at once.
    assert decide(1, (job(1, began=0.0),), {}, {}, now=3600.0, failures=2).failures == 0


def test_without_slurm_or_dask_cuda_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="sbatch, squeue, scancel not found on PATH"):
        make_cluster("slurm").start("weak-phase")
    with pytest.raises(UsageError, match=r"needs dask-cuda.*pip install dask-cuda"):
        make_cluster("cuda").start("weak-phase")
    assert cuda_options(2)["threads_per_worker"] == 1 and cuda_options(2)["n_workers"] == 2
    assert cuda_options(None)["host"] == "127.0.0.1" and "n_workers" not in cuda_options(None)


def test_certificates_are_made_once_and_kept_from_others(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tls"
    certificate, key = certificate_files(folder)
    before = (certificate.read_bytes(), key.read_bytes())
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, certificate, key)] == [0o700, 0o600, 0o600]
    assert certificate_files(folder) == (certificate, key)
    assert (certificate.read_bytes(), key.read_bytes()) == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tls"]
    assert worker_options(folder)[::2] == ["--tls-ca-file", "--tls-cert", "--tls-key"]
    assert security(folder).require_encryption is True
    key.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others: chmod 600"):
        certificate_files(folder)
    key.chmod(0o600)
    certificate.unlink()
    with pytest.raises(UsageError, match="is missing: remove"):
        certificate_files(folder)


def test_versions_are_compared_by_name() -> None:
    here = {"python": "3.11", "numpy": "2.0"}
    assert differences(here, dict(here)) == []
    assert differences(here, {"python": "3.12"}) == ["Python 3.11 here, 3.12 there", "numpy 2.0 here, none there"]


def test_a_plan_shows_the_job_script(tmp_path: Path) -> None:
    """Of one set of workers, or of the whole campaign in one allocation; a wrong key is told with its line."""
    from exitwave.workflows.campaigns import plan_document, read_campaign
    from exitwave.workflows.tables import plan_table

    path = tmp_path / "c.yaml"
    head = "campaign: { name: my crystals, structures: [{ library: [Si] }], samples_per_structure: 2 }\n"
    slurm = 'slurm: { partition: gpu, walltime: "02:00:00", workers_per_job: 4 }'
    path.write_text(head + f"cluster: {{ kind: slurm, workers: 8, tls: false, {slurm} }}\n")
    planned = read_campaign(path)
    script = plan_document(planned, out=tmp_path / "d", workers=None)["slurm_script"]
    assert "#SBATCH --partition=gpu" in script and "tcp://CONTROLLER:PORT" in script and "--nworkers 4" in script
    assert planned.cluster == "slurm" and planned.workers == 8
    path.write_text(head + f"cluster: {{ kind: slurm-allocation, workers: 8, {slurm} }}\n")
    document = plan_document(read_campaign(path), out=tmp_path / "d", workers=None)
    assert "--ntasks=10" in document["slurm_script"] and "--job-name=exitwave-my-crystals" in document["slurm_script"]
    assert plan_table(document)
    path.write_text(head + "cluster: { kind: slurm, slurm: { walltime: 4h } }\n")
    with pytest.raises(UsageError, match=r"c.yaml:2:\d+: cluster.slurm.walltime: .*HH:MM:SS"):
        read_campaign(path)
