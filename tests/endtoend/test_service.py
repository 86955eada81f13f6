"""`exitwave serve` as a process: submit, watch, stop, resume, report, over HTTP; and everything that it must refuse."""

from __future__ import annotations

import http.client
import json
import os
import resource
import shutil
import socket
import threading
import time

import line
import pytest
import requests

pytest.importorskip("fastapi")
from service import Service

from exitwave.ingest.errors import UsageError

MORE = (("samples_per_structure: 6", "samples_per_structure: 24"), ("steps: 12", "steps: 60"))


def pipeline(*replace):
    text = line.PIPELINE
    for before, after in replace:
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Service(tmp_path_factory.mktemp("service") / "root").start()
    yield made
    made.end()


@pytest.fixture(scope="module")
def finished(service):
    """A pipeline that was submitted, cancelled while it ran, resumed, has ended; and what a watcher saw of it."""
    answer = service.submit("whole", pipeline(*MORE))
    assert answer.status_code == 201, answer.text
    seen = []

    def watch() -> None:
        with service.call("GET", "/api/runs/whole/events", stream=True) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for row in stream.iter_lines():
                if row.startswith(b"data: "):
                    seen.append(json.loads(row[6:]))
                    if seen[-1]["state"] == "finished":
                        return

    watcher = threading.Thread(target=watch)
    watcher.start()
    service.wait("whole", "running")
    line.wait_until(lambda: service.get("/api/runs/whole")["status"].get("shards", {}).get("committed", 0) > 0)
    assert service.command("whole", "cancel").status_code == 202
    stopped = service.wait("whole", "stopped")
    assert service.command("whole", "cancel").status_code == 409
    assert service.command("whole", "resume").status_code == 202
    ended = service.wait("whole", "finished", seconds=200)
    watcher.join(30)
    return stopped, ended, seen


def test_a_pipeline_from_submission_to_report(service, finished):
    stopped, run, _ = finished
    assert stopped["status"]["samples"]["committed"] > 0
    samples = run["status"]["samples"]
    assert samples["committed"] == samples["planned"] == len(set(line.uids_of(service.root / "whole" / "dataset")))
    assert run["metrics"]["model"]["rmse_VA"] > 0
    assert run["training"]["step"] == run["training"]["total_steps"] == 60
    assert len(run["training"]["curve"]) == 60
    report = service.call("GET", "/runs/whole/report")
    assert report.status_code == 200 and "sandbox" in report.headers["content-security-policy"]
    assert b"How accurate is it?" in report.content
    assert service.get("/api/runs/whole/failures") == []
    assert [p["src"][:22] for p in service.get("/api/runs/whole/newest")["pictures"]] == 2 * ["data:image/png;base64,"]
    assert "Done in" in service.call("GET", "/api/runs/whole/log").text
    metrics = service.call("GET", "/metrics").text
    assert 'exitwave_runs{kind="pipeline",state="finished"} 1' in metrics
    assert f'exitwave_samples{{run="whole",state="committed"}} {samples["planned"]}' in metrics
    assert service.submit("whole", line.PIPELINE).status_code == 409


def test_a_run_shows_itself_in_a_notebook(service, finished):
    from exitwave.workflows import open_run

    run = open_run(service.root / "whole")
    assert repr(run).endswith("whole: trained>") and run.training.last[0] == 60 and len(run.dataset) > 0
    page = run._repr_html_()
    assert "the network" in page and "data:image/png;base64," in page and "report.html" in page
    training = open_run(service.root / "whole" / "train")
    assert training.metrics == run.metrics and "samples" not in training._repr_html_()
    with pytest.raises(UsageError, match="open_dataset"):
        open_run(service.root / "whole" / "dataset")
    with pytest.raises(UsageError, match="keeps no data set"):
        _ = training.dataset


def test_events_come_at_once_and_when_something_changes(finished):
    _, ended, seen = finished
    committed = [run["status"].get("samples", {}).get("committed", 0) for run in seen]
    assert committed == sorted(committed) and committed[-1] == ended["status"]["samples"]["planned"]
    states = [run["state"] for run in seen]
    assert {"running", "finished"} <= set(states)
    assert len({json.dumps(run) for run in seen}) == len(seen) > 3


def test_a_run_of_the_command_line_is_shown_too(service, finished):
    made = line.exitwave(
        "simulate", service.root / "whole.yaml", "--out", service.root / "group" / "cli", "--cluster", "inline"
    )
    assert made.returncode == 0, made.stderr
    (row,) = [row for row in service.get("/api/runs")["runs"] if row["id"] == "group~cli"]
    assert (row["state"], row["kind"], row["ours"]) == ("finished", "campaign", False)
    assert service.get("/api/runs?limit=1&offset=0")["total"] >= 2
    assert len(service.get("/api/runs?limit=1")["runs"]) == 1


def test_a_configuration_that_is_wrong_is_told_with_its_place(service):
    answer = service.submit("wrong", line.PIPELINE.replace("energy_keV: 200", "energy_keV: 200000"))
    assert answer.status_code == 422
    assert "wrong.yaml:17" in answer.json()["detail"] and "energy_keV" in answer.json()["detail"]
    assert not (service.root / "wrong.yaml").exists()
    as_json = service.submit("wrong", {"name": "x", "campaign": 3, "train": {}})  # type: ignore[arg-type]
    assert as_json.status_code == 422


def test_what_a_job_says_last_is_why_it_failed(service):
    none = pipeline(("- library: [Au, Si]", "- cif: nowhere/*.cif"))
    assert service.submit("failing", none).status_code == 201
    run = service.wait("failing", "failed")
    assert "nowhere/*.cif" in run["why"]


# ---------------------------------------------------------------------------------------------------------- refused

CALLS = [
    ("GET", "/api/runs"),
    ("POST", "/api/runs"),
    ("GET", "/api/runs/whole"),
    ("GET", "/api/runs/whole/events"),
    ("GET", "/api/runs/whole/failures"),
    ("GET", "/api/runs/whole/log"),
    ("POST", "/api/runs/whole/commands"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/runs/whole"),
    ("GET", "/runs/whole/report"),
    ("GET", "/templates/quickstart"),
    ("POST", "/logout"),
    ("DELETE", "/api/runs/whole"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_nothing_is_answered_without_the_token(service, method, path):
    for headers in ({}, {"authorization": "Bearer " + "x" * 43}, {"cookie": "exitwave_session=9999999999.a.b"}):
        answer = requests.request(method, service.address + path, headers=headers, timeout=10, json={})
        assert answer.status_code == 401, (headers, answer.text)
        assert "www-authenticate" in answer.headers
    assert requests.get(service.address + "/healthz", timeout=10).json() == {"ok": True}


def test_a_browser_logs_in_and_forged_requests_of_other_sites_do_nothing(service):
    browser = requests.Session()
    page = browser.get(service.address + "/", headers={"accept": "text/html"}, timeout=10)
    assert page.url.endswith("/login?next=/") and "Token" in page.text
    wrong = browser.post(service.address + "/login", data={"token": "x" * 43}, timeout=10)
    assert wrong.status_code == 401 and not browser.cookies
    answer = browser.post(
        service.address + "/login",
        data={"token": service.token, "next": "//evil.example/"},
        timeout=10,
        allow_redirects=False,
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and service.token.lower() not in cookie
    assert browser.get(service.address + "/api/runs", timeout=10).status_code == 200
    body = {"name": "forged", "configuration": line.PIPELINE}
    assert browser.post(service.address + "/api/runs", json=body, timeout=10).status_code == 401
    assert browser.post(service.address + "/logout", timeout=10).status_code == 401
    page = browser.get(service.address + "/", headers={"accept": "text/html"}, timeout=10).text
    csrf = page.split('name="csrf" content="')[1].split('"')[0]
    out = browser.post(service.address + "/logout", headers={"x-csrf-token": csrf}, timeout=10)
    assert out.status_code == 204 and not browser.cookies
    assert not (service.root / "forged.yaml").exists()


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2f..%2fetc%2fpasswd",
        "/api/runs/..",
        "/api/runs/%2e%2e",
        "/api/runs/.exitwave",
        "/api/runs/..~..~etc",
        "/api/runs/%00",
        "/assets/..%2fapi.py",
        "/assets/%2e%2e/server.py",
        "/templates/..%2f..%2fcli.py",
        "/runs/..%2f.exitwave%2ftoken/report",
        "/api/runs/" + "a" * 400,
    ],
)
def test_paths_that_lead_out_lead_nowhere(service, path):
    client = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    client.request("GET", path, headers={"authorization": f"Bearer {service.token}"})
    answer = client.getresponse()
    assert answer.status in (404, 422), answer.read()
    assert service.token.encode() not in answer.read()


def raw(service, request: bytes, timeout=15.0) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=timeout) as connection:
        connection.sendall(request)
        got = b""
        try:
            while piece := connection.recv(65536):
                got += piece
        except (TimeoutError, ConnectionResetError):
            pass
        return got


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET /healthz HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"421"),
        ("GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n", b"4"),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"4"),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + "a" * 100_000 + "\r\n\r\n", b"4"),
        ("POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"4"),
        ("POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"4"),
        ("POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (
            "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 5\r\n"
            "Connection: close\r\n\r\ntoken",
            b"4",
        ),
        (
            "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            "0\r\n\r\n",
            b"400",
        ),
        ("POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", b""),
        ("POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", b"4"),
        (
            "GET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 1\r\nX-Forwarded-Host: evil\r\n"
            "Connection: close\r\n\r\n",
            b"401",
        ),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-User: root\r\nConnection: close\r\n\r\n", b"401"),
        ("GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"421"),
        ("GET /x\ry HTTP/1.1\r\nHost: localhost\r\n\r\n", b"4"),
        ("GARBAGE\r\n\r\n", b"4"),
        ("\x16\x03\x01\x02\x00", b""),
    ],
)
def test_tricks_with_headers_are_refused(service, request_text, status):
    answer = raw(service, request_text.encode("latin-1"))
    first = answer.split(b"\r\n")[0]
    assert first.startswith(b"HTTP/1.1 " + status) if status else not answer or b" 4" in first, answer
    assert service.get("/api/runs")["total"] >= 0


def test_every_answer_is_taken_for_what_it_says_it_is(service, finished):
    """Also refusals: nothing is sniffed, framed, or run from elsewhere; and no answer holds the token."""
    asked = [("GET", path) for path in ("/", "/submit", "/runs/whole", "/runs/whole/report", "/login", "/healthz")]
    asked += [("GET", f"/api/runs/whole{part}") for part in ("", "/log", "/failures", "/newest")]
    asked += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/assets/service.js")]
    asked += [("DELETE", "/"), ("POST", "/api/runs"), ("GET", "/templates/quickstart")]
    for method, path in asked:
        answer = service.call(method, path)
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["x-frame-options"] == "DENY", path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe-inline" not in policy.replace("style-src 'unsafe-inline'", "")
        assert "text/html" not in answer.headers["content-type"] or not path.startswith("/api"), path
        assert service.token not in answer.text and service.token not in str(answer.headers), path
    stranger = raw(service, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert b"nosniff" in stranger.lower()


def test_the_token_is_taken_from_no_address_and_stands_in_no_log(service):
    for path in (
        f"/api/runs?token={service.token}",
        f"/?access_token={service.token}",
        f"/login?token={service.token}",
    ):
        answer = requests.get(service.address + path, timeout=10, allow_redirects=False)
        assert answer.status_code == (200 if path.startswith("/login") else 401) and "set-cookie" not in answer.headers
    assert service.token not in service.log.read_text()
    evil = "x\r\nset-cookie: a=b"
    for next in (
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "/\tevil",
        f"/{evil}",
        "javascript:alert(1)",
    ):
        answer = requests.post(
            service.address + "/login", data={"token": service.token, "next": next}, timeout=10, allow_redirects=False
        )
        assert (answer.status_code, answer.headers["location"]) == (303, "/"), next
        assert "a=b" not in str(answer.headers)
    page = requests.get(service.address + "/login", params={"next": '"><script>alert(1)</script>'}, timeout=10)
    assert "<script>alert" not in page.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "deep", "configuration": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"name": "deep", "configuration": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"name": "deep", "configuration": ' + b'{"a":' * 90_000 + b"1" + b"}" * 90_000 + b"}",
        b'{"name": "a\\nb", "configuration": "x: 1"}',
        b'{"name": "\\u202egpj", "configuration": "x: 1"}',
        b'{"name": "..", "configuration": "x: 1"}',
        b'{"name": "a", "configuration": "x: 1", "command": "true"}',
        b'{"name": "a", "configuration": {"x": NaN, "campaign": {}}}',
        b'{"name": "a", "configuration": "' + b"a: 1\\n" * 20_000 + b'"}',
        b'{"name": "a", "configuration": "!!python/object/apply:os.system [true]"}',
        b"\xff\xfe\x00",
        b"",
    ],
)
def test_bodies_that_are_no_submission(service, body):
    answer = service.call("POST", "/api/runs", data=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    assert not (service.root / "a.yaml").exists() and not (service.root / "deep.yaml").exists()


def test_links_that_lead_out_lead_nowhere(service, finished, tmp_path):
    """Whole runs, parts of them, marks and reports that are links: not there, or not shown."""
    secret = tmp_path / "secret.html"
    secret.write_text("the secret of another")
    for name, part in (("linked", ""), ("linked-part", "dataset"), ("linked-mark", "pipeline.yaml")):
        run = service.root / name
        if not part:
            run.symlink_to(tmp_path)
        else:
            run.mkdir()
            (run / part).symlink_to(service.root / "whole" / part)
            if part == "dataset":
                (run / "pipeline.yaml").write_text("{}")
        assert service.call("GET", f"/api/runs/{name}").status_code == 404
    (service.root / "fake").mkdir()
    (service.root / "fake" / "pipeline.yaml").write_text("{}")
    (service.root / "fake" / "report.html").symlink_to(secret)
    assert service.call("GET", "/runs/fake/report").status_code == 404
    (service.root / "fake" / "report.html").unlink()
    os.mkfifo(service.root / "fake" / "report.html")  # whoever opens it would wait for ever
    assert service.call("GET", "/runs/fake/report").status_code == 404
    shutil.rmtree(service.root / "fake")
    assert {row["id"] for row in service.get("/api/runs")["runs"]}.isdisjoint({"linked", "linked-part", "linked-mark"})


@pytest.mark.long
def test_requests_that_come_drop_by_drop_are_cut_off(service):
    """The first of a connection, a second one behind a good one, and a body: none keeps its connection."""
    good = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    slow = {
        "first": b"GET /healthz HTTP/1.1\r\nX: ",
        "second": good + b"GET /healthz HTTP/1.1\r\nX: ",
        "body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    }
    open_now = {name: socket.create_connection(("127.0.0.1", service.port), timeout=5) for name in slow}
    for name, connection in open_now.items():
        connection.sendall(slow[name])
    until = time.monotonic() + 20
    while open_now and time.monotonic() < until:
        for name, connection in list(open_now.items()):
            try:
                connection.sendall(b"a")
                connection.settimeout(0.2)
                while connection.recv(65536):
                    pass
                del open_now[name]
            except TimeoutError:
                continue
            except OSError:
                del open_now[name]
        time.sleep(0.3)
    assert not open_now
    assert service.get("/api/runs")["total"] >= 0


def test_a_body_of_100_MB_is_not_read(service):
    piece = b"x" * (1 << 16)
    sent = 0
    headers = f"POST /api/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.token}\r\n"
    for length in ("Content-Length: 104857600", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=10) as connection:
            connection.sendall(f"{headers}Content-Type: application/json\r\n{length}\r\n\r\n".encode())
            try:
                while sent < 100 << 20:
                    connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    sent += len(piece)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass
            try:
                answer = connection.recv(65536)
            except (ConnectionResetError, TimeoutError):
                answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 413"), answer
        assert sent < 20 << 20
    assert service.get("/api/runs")["total"] >= 0


def test_connections_that_say_nothing_do_not_keep_others_out(service):
    quiet = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        for _ in range(10_000):
            try:
                quiet.append(socket.create_connection(("127.0.0.1", service.port), timeout=2))
            except OSError:
                break
        assert len(quiet) > min(9_000, before[1] - 500)

        def answered() -> bool:
            try:
                return requests.get(service.address + "/healthz", timeout=5).ok
            except requests.RequestException:
                return False

        line.wait_until(answered, timeout=30)  # those that never asked are closed in time
    finally:
        for connection in quiet:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert service.get("/api/runs")["total"] >= 0


def test_many_watchers_and_a_second_service(service, finished):
    streams, counts = [], []

    def watch() -> None:
        with service.call("GET", "/api/runs/whole/events", stream=True) as stream:
            streams.append(stream)
            counts.append(next(stream.iter_lines()))

    threads = [threading.Thread(target=watch) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == 50 * [b"event: run"]
    second = line.exitwave("serve", "--root", service.root, "--port", 0)
    assert second.returncode == 2 and "another service has this root" in second.stderr
    taken = line.exitwave("serve", "--root", service.root.parent, "--port", service.port)
    assert taken.returncode == 2 and f"port {service.port}" in taken.stderr


@pytest.mark.long
def test_a_killed_service_finds_what_it_started(tmp_path):
    service = Service(tmp_path / "root").start()
    try:
        campaign = pipeline().partition("campaign:\n")[2].partition("train:\n")[0]
        campaign = "\n".join(row.removeprefix("  ") for row in campaign.splitlines())
        assert service.submit("kept", campaign.replace("_structure: 6", "_structure: 40")).status_code == 201
        line.wait_until(lambda: service.get("/api/runs/kept")["status"].get("shards", {}).get("committed", 0) > 0)
        controllers = line.processes_naming(service.root / ".exitwave" / "jobs" / "kept")
        service.kill()
        time.sleep(0.5)
        assert set(controllers) & set(line.processes_naming(service.root / ".exitwave" / "jobs" / "kept"))
        service.start()
        assert service.get("/api/runs/kept")["state"] in ("running", "finished")
        service.wait("kept", "finished", seconds=200)
        uids = line.uids_of(service.root / "kept")
        assert sorted(uids) == sorted(line.planned_uids(service.root / "kept.yaml"))
    finally:
        service.end()
