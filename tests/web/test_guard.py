"""One test for each attack on the page."""

import http.client
import json
import re
import socket
from importlib import resources

import pytest

from rearview.web.guard import POLICY
from rearview.web.live import MOST_LISTENERS
from rearview.web.replays import BackfillRequest, command_of

pytestmark = pytest.mark.slow  # the pages show recorded runs


def ask(served, path, *, method="GET", token=None, body=None, **headers):
    """Send one request exactly as written; return status, headers and text."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    given = served.page.token if token is None else token
    sent = {
        "Authorization": f"Bearer {given}",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    try:
        connection.request(method, path, body=body, headers=sent)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


def test_the_page_answers_who_has_the_token(reading):
    status, headers, text = ask(reading, "/api/state")
    assert status == 200
    assert json.loads(text)["runs"] == 3
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("token", ["", "wrong", "é"])
def test_no_data_without_the_token(reading, token):
    assert ask(reading, "/api/state", token=token)[0] == 401


def test_a_token_in_the_address_is_not_taken(reading):
    path = f"/api/state?token={reading.page.token}"
    assert ask(reading, path, token="")[0] == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_rebound_to_this_machine_is_refused(reading, host):
    assert ask(reading, "/api/state", Host=host)[0] == 403
    assert ask(reading, "/", Host=host)[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1"])
def test_another_origin_is_refused_even_with_the_token(reading, origin):
    assert ask(reading, "/api/state", Origin=origin)[0] == 403


def test_another_site_is_refused_by_the_headers_of_the_browser(reading):
    assert ask(reading, "/api/state", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(reading, "/api/state", Sec_Fetch_Site="same-site")[0] == 403


def test_nothing_can_be_changed_unless_it_was_allowed(reading):
    for path in ("/api/backfill", "/api/tag", "/api/note", "/api/move", "/api/stop"):
        status, _, text = ask(
            reading, path, method="POST", body="{}", Content_Type="application/json"
        )
        assert status == 403, path
        assert "--allow-replay" in text


def test_a_get_request_changes_nothing(served):
    for path in ("/api/backfill", "/api/tag", "/api/note", "/api/move", "/api/stop"):
        assert ask(served, path)[0] == 405


def test_a_form_of_another_page_cannot_post(served):
    status, _, _ = ask(served, "/api/tag", method="POST", body="{}", Content_Type="text/plain")
    assert status == 415


def test_a_post_without_the_token_changes_nothing(served):
    run = served.page.index.runs()[0].id
    body = json.dumps({"runs": [run], "text": "owned"})
    status, _, _ = ask(
        served, "/api/tag", method="POST", body=body, token="", Content_Type="application/json"
    )
    assert status == 401
    assert served.page.history.run(run).tags == ()


def test_runs_that_are_not_there_are_refused(served):
    for run in ("../../etc", "latest", "-1", ""):
        body = json.dumps({"runs": [run], "text": "x"})
        status, _, _ = ask(
            served, "/api/tag", method="POST", body=body, Content_Type="application/json"
        )
        assert status == 400
        assert ask(served, f"/api/run/{run.replace('/', '%2f')}")[0] in {400, 404}


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py"),
        *("/static//etc/passwd", "/static/../../../../../../etc/passwd", "/static/vendor/../../guard.py"),
        *("/.rearview/format", "/static/\x00"),
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(reading, path):
    with socket.create_connection(("127.0.0.1", reading.port), timeout=20) as raw:
        text = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        raw.sendall(text.encode("latin1"))
        answer = b""
        while more := raw.recv(65536):
            answer += more
    assert answer.split(b" ")[1] in {b"400", b"404"}
    assert b"import" not in answer
    assert b"root:" not in answer


def test_only_logged_images_can_be_fetched(served):
    other = next(iter(served.page.media._objects.all()), "0" * 64)
    for oid in (other, "0" * 64, "..%2f..%2fidentity.json", "A" * 64):
        status, headers, _ = ask(served, f"/api/image/{oid}")
        assert status in {400, 404}
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "where",
    [
        "(SELECT count(*) FROM read_csv('/etc/passwd')) > 0",
        "1=1) OR (SELECT 1 FROM read_text('/etc/passwd')",
        "1; DROP TABLE page.runs",
        "true); COPY page.runs TO '/tmp/out.csv'; SELECT (1",
        "getenv('HOME') = ''",
    ],
)
def test_a_filter_reads_no_file_and_writes_nothing(reading, where):
    from urllib.parse import quote

    path = f"/api/table?q={quote(json.dumps({'where': where}))}"
    status, _, text = ask(reading, path)
    assert status == 400
    assert "root:" not in text
    assert json.loads(ask(reading, "/api/state")[2])["runs"] == 3


def test_a_filter_that_never_ends_is_stopped(reading, monkeypatch):
    monkeypatch.setattr("rearview.web.run_index.PATIENCE", 0.2)
    where = "(SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b) > 0"
    from urllib.parse import quote

    status, _, text = ask(reading, f"/api/table?q={quote(json.dumps({'where': where}))}")
    assert status == 400
    assert "stopped" in text


def test_a_request_that_is_too_large_is_refused(served):
    body = "x" * 200_000
    status, _, _ = ask(
        served, "/api/tag", method="POST", body=body, Content_Type="application/json"
    )
    assert status == 413


def test_pages_that_listen_are_bounded(reading):
    open_ones = []
    try:
        for _ in range(MOST_LISTENERS):
            connection = http.client.HTTPConnection("127.0.0.1", reading.port, timeout=20)
            headers = {"Authorization": f"Bearer {reading.page.token}"}
            connection.request("GET", "/api/events", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200
            assert b"hello" in answer.read1(200)
            open_ones.append(connection)
        assert ask(reading, "/api/events")[0] == 503
    finally:
        for connection in open_ones:
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def test_every_answer_carries_the_policy(reading):
    for path in ("/", "/static/app.js", "/api/state", "/nothing"):
        _, headers, _ = ask(reading, path)
        assert headers["content-security-policy"] == POLICY
        assert headers["x-frame-options"] == "DENY"
    assert "unsafe" not in POLICY


def test_the_markup_of_the_page_has_no_inline_script_or_style():
    static = resources.files("rearview.web") / "static"
    text = (static / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)", text)
    assert not re.findall(r"<style|\sstyle=|\son\w+=", text)
    assert "http:" not in text
    assert "https:" not in text
    for file in static.iterdir():
        if file.name.endswith(".js"):
            assert "innerHTML" not in file.read_text(), file.name


def test_a_column_whose_name_begins_with_a_dash_is_no_option():
    words = command_of(BackfillRequest(names=["--on", "x"], runs=["r"]))
    assert words[-3:] == ["--", "--on", "x"]
