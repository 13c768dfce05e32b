"""The live view of runs: over HTTP, and in a real browser if there is one."""

import contextlib
import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import drivetrain
from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_console._views.server import RunsServer
from tests.browser import Browser
from tests.serving import get, serving
from tests.support import DEADLINE_S, local_storage, open_pipe, wait_for_release


@contextlib.contextmanager
def events(server: RunsServer, path: str) -> Iterator[Iterator[Any]]:
    """Yield the documents of an event stream."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=DEADLINE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    lines = iter(answer.readline, b"")
    try:
        yield (json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: "))
    finally:
        answer.close()
        connection.close()


def test_list_and_pages_are_served_and_nothing_else(runs: Path) -> None:
    with serving(runs) as server:
        status, headers, page = get(server, "/")
        assert (status, headers["x-frame-options"], headers["cache-control"]) == (200, "DENY", "no-store")
        assert "/run/story" in page
        assert json.loads(get(server, "/run/story/data")[2])["status"] == "finished"
        assert "<title>story</title>" in get(server, "/run/story")[2]
        for path in (
            "/run/nothing",
            "/run/..%2Fruns",
            "/run/story/run.json",
            "/run.json",
            "/run/..",
            "/run/story/../x",
        ):
            assert get(server, path)[0] == 404, path


def test_request_with_the_host_name_of_another_site_is_refused(runs: Path) -> None:
    with serving(runs) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "token" not in server.url
        assert get(server, "/", Host="evil.example:80")[0] == 403
        assert get(server, "/", Host="localhost")[0] == 200
        assert get(server, "/", Host="[::1]")[0] == 200
        assert get(server, "/", Host="[::1].evil.example")[0] == 403


def test_ipv6_address_is_served(runs: Path) -> None:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        for host in ("::1", "[::1]"):
            with serving(runs, host=host) as server:
                assert server.url.startswith("http://[::1]:")
                assert "token" not in server.url
                assert get(server, "/run/story", host="::1")[0] == 200
                assert get(server, "/", host="::1", Host="evil.example")[0] == 403
        with serving(runs, host="::") as server:
            assert get(server, "/", host="::1")[0] == 403, "any other address requires the token"
        return
    pytest.skip("this machine has no IPv6")


def test_requests_from_other_machines_require_the_token_and_keep_it_in_a_cookie(runs: Path) -> None:
    for host in ("0.0.0.0", ""):
        _check_token(runs, host)


def _check_token(runs: Path, host: str) -> None:
    with serving(runs, host=host) as server:
        query = urlsplit(server.url).query
        assert len(query) > 30

        assert get(server, "/")[0] == get(server, "/?token=guess")[0] == get(server, "/run/story/events")[0] == 403
        status, headers, _ = get(server, f"/?{query}")
        assert status == 200
        assert {"HttpOnly", "SameSite=Strict"} <= set(headers["set-cookie"].split("; "))
        assert get(server, "/run/story", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
        assert get(server, "/run/story", Cookie="drivetrain_token=guess")[0] == 403


def test_port_in_use_is_a_clear_error(runs: Path) -> None:
    with serving(runs) as server:
        port = urlsplit(server.url).port
        with pytest.raises(ConfigurationError, match=f"this machine, got 127.0.0.1:{port}"):
            RunsServer(local_storage(runs), port=port)


def test_changes_are_sent_without_known_data(own_runs: Path) -> None:
    with serving(own_runs) as server:
        server.pages.poll_s = 0.05
        document = json.loads(get(server, "/")[2].partition('id="data">')[2].partition("</script>")[0])
        with events(server, document["events"]) as changes:
            shutil.copytree(own_runs / "plain", own_runs / "another")
            assert {run["name"] for run in next(changes)["runs"]} >= {"story", "plain"}
        with events(server, "/run/plain/events") as changes:
            assert next(changes)["reports"] == {"0": 5, "1": 5}, "a page without state gets everything"
            with (own_runs / "plain" / "result.json").open("a") as file:
                file.write('{"step": 6, "_training_iteration": 6}\n')
            assert next(changes)["reports"] == {"0": 6, "1": 5}


def test_browser_follows_a_run_to_its_end(browser: Browser, own_runs: Path, tmp_path: Path) -> None:
    with open_pipe(tmp_path / "pipe") as pipe, serving(own_runs) as server:
        server.pages.poll_s = 0.1

        def train(config: dict[str, str]) -> None:
            for step in range(1, 4):
                drivetrain.report({"step": step, "loss": 1 / step})
                wait_for_release(config["pipe"])

        browser.set_window()
        browser.open(server.url)
        run = DataParallelTrainer(
            train,
            train_loop_config={"pipe": pipe.path},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="followed", storage_path=str(own_runs), verbose=0),
        ).start()
        try:
            link = "document.querySelector('a[href=\"/run/followed\"]')"
            browser.wait_for(f"{link} && document.querySelector('.pill.running')")
            browser.ask(f"{link}.click()")
            browser.wait_for("document.title === 'followed: running'")
            reports = "[...document.querySelectorAll('.fact')].find(one => one.innerText.includes('reports')).innerText"
            browser.wait_for(f"{reports}.startsWith('2\\n')")
            pipe.release(2)
            browser.wait_for(f"{reports}.startsWith('4\\n')")
            pipe.release(4)
            run.result(DEADLINE_S)
            browser.wait_for("document.title === 'followed: finished'")
            assert browser.messages == []
        finally:
            pipe.release(6)
            run.result(DEADLINE_S)


def status(server: RunsServer) -> int:
    """Return the status of a response; 503 also for a refusal that arrives before the request is sent."""
    try:
        return get(server, "/run/plain/data")[0]
    except ConnectionError:
        return 503


def test_stream_ends_when_its_client_has_left(own_runs: Path) -> None:
    with serving(own_runs) as server:
        server._server.max_clients = 1
        with events(server, "/run/plain/events") as changes:
            next(changes)
            assert status(server) == 503, "the only place is in use"
        ends_at = time.monotonic() + 10  # before the next keep-alive message
        while status(server) != 200:
            assert time.monotonic() < ends_at
