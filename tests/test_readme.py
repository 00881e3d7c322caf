"""What the README shows is what comes, and its tables are those of the scripts and of --help."""

import re
import shlex
import shutil
import socket
import sqlite3
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
from conftest import CLEAN_ENV, DEMO, PYTHON, RETRY, ROOT, SINGLE, run_cli

import retry_command
import single_run

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
(HTTP_GET,) = re.findall(r"```sh\n(#!/bin/sh\n# http_get.*?)```", README, re.DOTALL)
SCRIPTS = ((retry_command, RETRY), (single_run, SINGLE))


@pytest.mark.parametrize("block", BLOCKS)
def test_console_block(block: str, tmp_path: Path) -> None:
    for file in (RETRY, SINGLE, DEMO, ROOT / "README.md"):
        shutil.copy(file, tmp_path)
    commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    assert commands
    session = "".join(f"code=$?; echo {shlex.quote('$ ' + command)}; (exit $code); {command}\n" for command in commands)
    shown = run_cli("bash", "-c", f"exec 2>&1\n{session}", cwd=tmp_path)
    assert shown.stdout.decode() == block


def table(name: str) -> list[tuple[str, ...]]:
    """The rows of the README's table below a comment with this name."""
    rows = re.search(rf"<!-- {name} -->\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", README)
    assert rows
    return [tuple(cell.strip(" `") for cell in row.strip("|").split("|")) for row in rows[1].splitlines()]


@pytest.mark.parametrize(("module", "script"), SCRIPTS)
def test_exit_codes_are_the_same_everywhere(module: ModuleType, script: Path) -> None:
    rows = [(str(code), when) for code, _, when in module.EXIT_CODES]
    assert table(f"exit codes of {script.name}") == rows
    shown = run_cli(script, "--help", code=0).stdout.decode()
    assert "exit codes:\n" + "\n".join(f"  {code:<7} {when}" for code, when in rows) in shown


def test_each_reason_is_explained() -> None:
    reasons = set(re.findall(r'"((?:lock|command|child|unexpected)_[a-z_]+)"', SINGLE.read_text())) - {"lock_held"}
    assert {name for name, _ in table("reasons of single_run.py")} == reasons


@pytest.mark.parametrize("script", (RETRY, SINGLE))
def test_options_are_the_same_everywhere(script: Path) -> None:
    usage = run_cli(script, "--help", code=0).stdout.decode().partition("\noptions:\n")[2].partition("exit codes:")[0]
    section = README.partition(f"\n## {script.name}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`-[^|]*(?:\\\|[^|]*)*) \|", section, re.MULTILINE)
    shown = set(re.findall(r"^  (?:-\w(?: N)?, )?(--[a-z-]+)", usage, re.MULTILINE))
    assert {name for cell in cells for name in re.findall(r"--[a-z-]+", cell)} | {"--help", "--version"} == shown


def test_number_options_are_the_same_everywhere() -> None:
    shown = " ".join(run_cli(RETRY, "--help", code=0).stdout.decode().split())
    for name, lowest, highest, value, about in retry_command.NUMBERS:
        default = "off" if value is None else value
        assert f"| `{name}` | {lowest} to {highest} | {default} | {about} |" in README
        assert f"{name} N {about}: {lowest} to {highest} (default {default})" in shown
    for name, values, about in retry_command.CHOICES:
        assert f"| `{name}` | {', '.join(f'`{value}`' for value in values)} | {values[0]} | {about} |" in README
        assert f"{name} {{{','.join(values)}}} {about} (default {values[0]})" in shown
    for name, metavar, about in retry_command.TEXTS:
        assert re.search(rf"^\| `{name}` \|.*\| {re.escape(about)} \|$", README, re.MULTILINE)
        assert f"{name} {metavar} {about}" in shown
    for name, about in retry_command.FLAGS:
        assert re.search(rf"^\| `{name}` \|( \| off \|)? {re.escape(about)} \|$", README, re.MULTILINE)
        assert f"{name} {about}" in shown


def test_the_version_is_one(tmp_path: Path) -> None:
    assert retry_command.VERSION == single_run.VERSION
    for module, script in SCRIPTS:
        assert run_cli(script, "--version", code=0).stdout.decode() == f"{script.name} {module.VERSION}\n"


def test_the_http_recipe(tmp_path: Path) -> None:
    """Which answers of a real server are tried again, and how often it is asked."""
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    job = tmp_path / "http_get"
    job.write_text(HTTP_GET)
    job.chmod(0o755)
    answers: list[tuple[int, str]] = []
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, hint = answers.pop(0)
            asked.append(status)
            self.send_response(status)
            if hint:
                self.send_header("Retry-After", hint)
            self.end_headers()
            self.wfile.write(b"body")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for statuses, hint, code, times, delay_ms in (
            ((200,), "", 0, 1, None),
            ((503, 200), "0", 0, 2, None),
            ((500, 502, 504), "", 75, 3, 1),
            ((429, 429, 200), "Wed, 21 Oct 2026 07:28:00 GMT", 0, 3, None),
            ((429, 429, 429), "0.02", 75, 3, 20),
            ((400,), "", 65, 1, None),
            ((404,), "", 65, 1, None),
            ((401,), "", 77, 1, None),
            ((403,), "", 77, 1, None),
        ):
            answers[:] = [(status, hint) for status in statuses]
            asked.clear()
            done = run_cli(RETRY, "--retry-code", "TEMPFAIL", "--initial-delay-ms", "1", "--", job, url, code=code)
            assert len(asked) == times and done.stdout == (b"" if code else b"body")
            if delay_ms:
                assert f'"next_delay_ms":{delay_ms}}}'.encode() in done.stderr
        server.shutdown()
    assert run_cli(RETRY, "--retry-code", "75", "--initial-delay-ms", "1", "--", job, url, code=75).stdout == b""


def test_the_http_recipe_cleans_up_when_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        env = {**CLEAN_ENV, "TMPDIR": str(tmp_path / "files")}
        limit = ("--attempt-timeout-ms", "1000", "--max-attempts", "1")
        end = run_cli(RETRY, "--retry-code", "75", *limit, "--", "sh", "-c", HTTP_GET, "sh", url, env=env, code=124)
    assert b'"timed_out":true' in end.stderr
    assert not list((tmp_path / "files").iterdir())


def test_the_decorator() -> None:
    """The README's function with a body: what is raised is tried again."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    body = "\n    tried.append(1)\n    raise ConnectionError"
    program = f"tried = []\n{block.replace(': ...', f':{body}').replace('max_attempts=5', 'max_attempts=5, initial_delay_ms=1')}"
    end = run_cli(PYTHON, "-c", f"{program}try:\n    fetch()\nexcept ConnectionError:\n    print(len(tried))", cwd=ROOT, code=0)
    assert end.stdout == b"5\n"


def test_the_stores_queries(tmp_path: Path) -> None:
    assert "\n".join(retry_command.SCHEMA[1:]) in README
    look, clean = re.findall(r'^sqlite3 demo.store "([^"]*)"$', README, re.MULTILINE)
    for key in ("old", "new"):
        options = ("--idempotency-key", key, "--idempotency-store", "demo.store")
        run_cli(RETRY, "--retry-code", "75", *options, "--", "echo", key, cwd=tmp_path, code=0)
    with sqlite3.connect(tmp_path / "demo.store") as db:
        db.execute("UPDATE runs SET changed_at_utc = '2025-12-31' WHERE key = 'old'")
        assert [row[:2] for row in db.execute(look)] == [("old", "succeeded"), ("new", "succeeded")]
        db.commit()
        db.executescript(clean)
        assert db.execute("SELECT key, (SELECT count(*) FROM chunks) FROM runs").fetchall() == [("new", 1)]
