"""The service's own OpenAPI, fuzzed: what fits the schema and what does not is answered without an error of ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
import line
from service import Service


def fuzz(service: Service, examples: int) -> subprocess.CompletedProcess[str]:
    pipeline = line.write_pipeline(service.root.parent)
    made = line.exitwave("simulate", pipeline, "--out", service.root / "my-run", "--cluster", "inline")
    assert made.returncode == 0, made.stderr
    return subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{service.address}/openapi.json"),
            *("--header", f"Authorization: Bearer {service.token}"),
            *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
            *("--exclude-path-regex", "/events$", "--max-examples", str(examples), "--workers", "1"),
            *("--request-timeout", "20", "--no-color"),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"HYPOTHESIS_STORAGE_DIRECTORY": str(service.root.parent / "hypothesis")},
    )


def test_no_request_makes_the_service_fail(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        done = fuzz(service, examples=15)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert service.get("/api/runs")["total"] >= 0
    finally:
        service.end()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_request_of_very_many_makes_the_service_fail(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        done = fuzz(service, examples=400)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    finally:
        service.end()
