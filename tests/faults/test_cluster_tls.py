"""tls:// against a scheduler and a worker that run with this user's certificates; who holds others stays outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from dask_processes import DaskProcesses
from sim_samples import plan

from exitwave.ingest.errors import UsageError
from exitwave.ingest.verify import verify_dataset
from exitwave.simulate.campaign import run_campaign
from exitwave.simulate.cluster import make_cluster
from exitwave.simulate.cluster_tls import worker_options


def test_a_campaign_on_a_live_scheduler_with_our_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    others = DaskProcesses(tmp_path / "dask", protocol="tls", tls=worker_options())
    try:
        others.start_scheduler()
        others.start_worker()
        others.wait_for_workers(1)
        result = run_campaign(plan(simulator="weak-phase"), tmp_path / "d", make_cluster(others.address))
        assert result.failed == 0 and result.samples == 12 and verify_dataset(tmp_path / "d").ok
        monkeypatch.setattr("exitwave.simulate.cluster_address._FIRST_TRY_S", 2.0)
        monkeypatch.setenv("HOME", str(tmp_path / "stranger"))  # gets a key and a certificate of its own
        for address in (others.address, others.address.replace("tls:", "tcp:")):
            with pytest.raises(UsageError, match="no scheduler answers"):
                make_cluster(address).start("weak-phase")
        assert (tmp_path / "stranger" / ".config" / "exitwave" / "tls" / "key.pem").exists()
    finally:
        others.close()
