"""The event log and the metrics: what many runs at once write is whole, and never changes what comes of a run."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    IMPATIENT,
    PROBE,
    RETRY_75,
    ROOT,
    UNSHARE,
    Fifo,
    ended,
    event,
    failed,
    lock_of_another_run,
    needs_namespaces,
    run_cli,
    send,
    started,
    until,
    users,
)

import retry_command

LOGGED = (*RETRY_75, "--event-log", "log")
MEASURED = (*RETRY_75, "--metrics-file", "m.prom")
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
pytestmark = pytest.mark.usefixtures("here")


def lines() -> list[dict[str, Any]]:
    content = Path("log").read_text()
    assert content.endswith("\n")
    return [json.loads(line) for line in content.split("\n")[:-1]]


def test_every_event_of_a_run() -> None:
    job = ("sh", "-c", "printf out; printf err >&2; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75", "secret")
    run_cli(*LOGGED, "--idempotency-key", "k", "--", *job, code=0)
    first, second, last = lines()
    for line in (first, second, last):
        assert re.fullmatch(STAMP, line.pop("time")) and len(line.pop("run")) == 32 and line.pop("key") == "k"
    for line in (first, second):
        assert re.fullmatch(STAMP, line.pop("started_at_utc")) and line.pop("duration_ms") >= 0
    sizes = {"max_attempts": 3, "stdout_bytes": 3, "stderr_bytes": 3}
    assert first == {
        "event": "attempt_failed", "attempt": 1, "returncode": 75, "retrying": True, "next_delay_ms": 0, **sizes,
    }  # fmt: skip
    assert second == {"event": "attempt_succeeded", "attempt": 2, "returncode": 0, **sizes}
    assert last.pop("duration_ms") >= 0 and last == {"event": "run_ended", "exit_code": 0, "attempts": 2}
    assert "secret" not in Path("log").read_text() and os.stat("log").st_mode & 0o777 == 0o600


KINDS = (  # options, the job, exit code, the events
    ((), "exit 65", 65, ["attempt_failed"]),
    (("--attempt-timeout-ms", "50"), "exec sleep 60", 124, ["attempt_failed"]),
    (("--max-output-bytes", "1"), "echo ab", 125, ["output_limit"]),
    ((), "kill -TERM $PPID; exec sleep 60", 143, ["attempt_failed", "interrupted"]),
    (("--breaker", "b"), "exit 0", 0, ["attempt_succeeded"]),
)


@pytest.mark.parametrize("more", ((), ("--stream-stderr",)))
@pytest.mark.parametrize(("options", "job", "code", "names"), KINDS)
def test_each_kind(options: tuple[str, ...], job: str, code: int, names: list[str], more: tuple[str, ...]) -> None:
    run_cli(*LOGGED, *options, *more, "--", "sh", "-c", job, code=code)
    assert [line["event"] for line in lines()] == [*names, "run_ended"]
    assert lines()[-1]["exit_code"] == code and len({line["run"] for line in lines()}) == 1


def test_what_was_not_run() -> None:
    store = (*LOGGED, "--idempotency-key", "k", "--idempotency-store", "store")
    run_cli(*store, "--", "./no-such", code=127)
    run_cli(*store, "--", "true", code=0)
    run_cli(*store, "--", "true", code=0)
    names = [line["event"] for line in lines()]
    assert names == ["launch_error", "run_ended", "attempt_succeeded", "run_ended", "returned_from_store", "run_ended"]


def test_fifty_runs_at_once_leave_whole_lines() -> None:
    runs = [started(*LOGGED, *MEASURED[-2:], "--task", f"t{number % 2}", "--", "sh", "-c", "exit 75") for number in range(50)]
    for run in runs:
        assert ended(run, 75).stderr == failed(75, 1, 0) + failed(75, 2, 0) + failed(75, 3)
    assert len(lines()) == 200 and len({line["run"] for line in lines()}) == 50
    assert [samples()[f'retry_command_attempts_total{{task="t{number}"}}'] for number in (0, 1)] == [75, 75]


def test_runs_killed_while_they_write_leave_whole_lines() -> None:
    for number in range(40):
        process = started(*LOGGED, *MEASURED[-2:], "--", "true")
        time.sleep(0.03 + number * 0.001)
        send(process.pid, signal.SIGKILL)
        ended(process)
    run_cli(*LOGGED, *MEASURED[-2:], "--", "true", code=0)
    assert lines()[-1]["event"] == "run_ended" and samples()


def test_a_torn_line_stays_alone() -> None:
    Path("log").write_text('{"torn":')
    run_cli(*LOGGED, "--", "true", code=0)
    torn, *whole = Path("log").read_text().splitlines()
    assert torn == '{"torn":' and [json.loads(line)["event"] for line in whole] == ["attempt_succeeded", "run_ended"]


@needs_namespaces
def test_a_log_that_fills_changes_nothing(here: Path) -> None:
    """But it is said, once, and what is in it is whole."""
    job = "head -c 100000 /dev/zero >fill; echo out; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75"
    script = f'mount -t tmpfs -o size=12k none "{here}"; cd "{here}"; "$@"; code=$?; rm fill; cat log; exit $code'
    options = ("--event-log", "log", "--metrics-file", "m.prom")
    done = run_cli(*UNSHARE, "sh", "-c", script, "sh", *RETRY_75, *options, "--", "sh", "-c", f"{job} 2>/dev/null", code=0)
    out, *logged = done.stdout.decode().splitlines()
    assert out == "out" and all(json.loads(line) for line in logged)
    told = [json.loads(line)["file"] for line in done.stderr.splitlines() if b'"file"' in line]
    assert sorted(told) in (["log", "m.prom"], ["m.prom"])


UNUSABLE = (  # what is in the way, the exception's name
    ("mkdir {}", "IsADirectoryError"),
    ("ln -s elsewhere {}", "OSError"),
    ("mkfifo {}", "PermissionError"),
    ("ln -s /dev/null {}", "OSError"),
    ("touch other; ln other {}", "PermissionError"),
    ("touch {}; chown 12345 {}", "PermissionError"),
)


@pytest.mark.parametrize(("make", "kind"), UNUSABLE)
@pytest.mark.parametrize(("option", "name"), (("--event-log", "log"), ("--metrics-file", "m.prom.lock"), ("--breaker", "b.lock")))
def test_a_file_of_no_use_is_found_first(make: str, kind: str, option: str, name: str) -> None:
    if "chown" in make and os.geteuid():
        pytest.skip("needs root")
    run_cli("sh", "-c", make.replace("{}", name), code=0)
    file = name.removesuffix(".lock")
    done = run_cli(*RETRY_75, option, file, "--", "touch", "started", code=125)
    assert done.stderr == event("wrapper_error", kind=kind, file=file) and not os.path.exists("started")
    assert not os.path.exists("elsewhere")


def test_a_folder_that_is_missing_is_found_first() -> None:
    for option in ("--event-log", "--metrics-file", "--breaker"):
        done = run_cli(*RETRY_75, option, "missing/file", "--", "touch", "started", code=125)
        assert done.stderr == event("wrapper_error", kind="FileNotFoundError", file="missing/file")
    assert os.listdir() == []


@needs_namespaces
@pytest.mark.parametrize("option", ("--event-log", "--metrics-file", "--breaker"))
def test_a_folder_that_cannot_be_written_is_found_first(here: Path, option: str) -> None:
    run_cli(*RETRY_75, option, "file", "--", "true", code=0)
    script = f'mount -o bind,ro "{here}" "{here}"; cd "{here}"; exec "$@"'
    done = run_cli(*UNSHARE, "sh", "-c", script, "sh", *RETRY_75, option, "file", "--", "echo", "started", code=125)
    assert done.stdout == b"" and b'"wrapper_error"' in done.stderr


def samples() -> dict[str, float]:
    pairs = (line.rpartition(" ") for line in Path("m.prom").read_bytes().decode().split("\n")[:-1] if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_counters_go_on_from_run_to_run() -> None:
    before = time.time()
    run_cli(*MEASURED, "--", "sh", "-c", "[ $RETRY_WRAPPER_ATTEMPT = 3 ] || exit 75", code=0)
    run_cli(*MEASURED, "--", "sh", "-c", "exit 65", code=65)
    run_cli(*MEASURED, "--task", "other", "--", "true", code=0)
    shown = samples()
    success = shown.pop('retry_command_last_success_timestamp_seconds{task="sh"}')
    assert before <= success <= shown.pop('retry_command_last_run_timestamp_seconds{task="sh"}') <= time.time()
    assert shown.pop('retry_command_last_run_duration_seconds{task="sh"}') >= 0
    assert {name: value for name, value in shown.items() if 'task="sh"' in name} == {
        'retry_command_runs_total{task="sh",result="success"}': 1,
        'retry_command_runs_total{task="sh",result="failure"}': 1,
        'retry_command_runs_total{task="sh",result="refused"}': 0,
        'retry_command_attempts_total{task="sh"}': 4,
        'retry_command_retries_total{task="sh"}': 2,
        'retry_command_last_exit_code{task="sh"}': 65,
        'retry_command_breaker_open{task="sh"}': 0,
    }
    assert shown['retry_command_runs_total{task="other",result="success"}'] == 1
    assert os.stat("m.prom").st_mode & 0o777 == 0o644 and sorted(os.listdir()) == ["m.prom", "m.prom.lock"]


def test_never_a_success_is_a_success_long_ago() -> None:
    """Or no alert would ever fire."""
    success = 'retry_command_last_success_timestamp_seconds{task="sh"}'
    run_cli(*MEASURED, "--", "sh", "-c", "exit 65", code=65)
    assert samples()[success] == 0
    run_cli(*MEASURED, "--", "sh", "-c", "exit 0", code=0)
    at_s = samples()[success]
    run_cli(*MEASURED, "--", "sh", "-c", "exit 65", code=65)
    assert samples()[success] == at_s > 0


def test_refused_runs_and_an_open_breaker() -> None:
    breaker = (*MEASURED, "--breaker", "b", "--breaker-failures", "1")
    run_cli(*breaker, "--", "sh", "-c", "exit 75", code=75)
    assert samples()['retry_command_breaker_open{task="sh"}'] == 1
    run_cli(*breaker, "--", "sh", "-c", "exit 75", code=69)
    assert samples()['retry_command_runs_total{task="sh",result="refused"}'] == 1
    assert samples()['retry_command_breaker_open{task="sh"}'] == 1


TASKS = (
    ("a b", "a b"),
    ('a"b\\c', r"a\"b\\c"),
    ("a\nb", r"a\nb"),
    ("ü", "ü"),
    (b"\xff", "\ufffd"),
    ("{} 1", "{} 1"),
    ("", ""),
    *((mark, mark) for mark in "\r\v\f\x1c\x85\u2028"),
)


@pytest.mark.parametrize(("task", "label"), TASKS)
def test_labels_are_escaped(task: str, label: str) -> None:
    for _ in range(2):
        run_cli(*MEASURED, "--task", task, "--", "true", code=0)
    assert samples()[f'retry_command_attempts_total{{task="{label}"}}'] == 2


@needs_promtool
def test_promtool_accepts_them() -> None:
    for task, _ in TASKS:
        run_cli(*MEASURED, "--task", task, "--", "true", code=0)
    assert run_cli("promtool", "check", "metrics", input=Path("m.prom").read_bytes(), code=0).stderr == b""


@needs_promtool
def test_promtool_accepts_the_readmes_alerts() -> None:
    (rules,) = re.findall(r"```yaml\n(groups:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    Path("rules.yml").write_text(rules)
    run_cli("promtool", "check", "rules", "rules.yml", code=0)
    names = {name for name, *_ in retry_command.METRICS}
    assert set(re.findall(r"retry_command_\w+", rules)) <= names


def test_the_readme_has_each_metric() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, kind, about in retry_command.METRICS:
        assert f"| `{name}` | {kind} | {about.rstrip('.')} |" in readme


OTHERS = (
    b"my_metric 1\n",
    b"junk\n",
    b"\xff",
    b'retry_command_runs_total{task="x"} many\n',
    b"# a note\n",
    b"# HELP\n",
    b"# HELP my_metric Mine.\n",
    b"# TYPE my_metric counter\n",
    b"# EOF\n",
)


@pytest.mark.parametrize("content", OTHERS)
def test_a_file_of_others_is_left_as_it_is(content: bytes) -> None:
    Path("m.prom").write_bytes(content)
    done = run_cli(*MEASURED, "--", "touch", "started", code=125)
    assert b'"wrapper_error"' in done.stderr and Path("m.prom").read_bytes() == content and not os.path.exists("started")


def test_a_reader_sees_a_whole_file(fifo: Fifo) -> None:
    run_cli(*MEASURED, "--", "true", code=0)
    runs = [started(*MEASURED, "--", *PROBE, fifo.path, "exit:0") for _ in range(10)]
    while any(run.poll() is None for run in runs):
        assert len(re.findall("^# TYPE", Path("m.prom").read_text(), re.MULTILINE)) == len(retry_command.METRICS)
    for run in runs:
        ended(run, 0)


@pytest.mark.parametrize("stream", (1, 2))
def test_a_caller_that_does_not_read_cannot_hold_the_records(stream: int) -> None:
    reader, writer = os.pipe()
    job = ("sh", "-c", f"head -c 5000000 /dev/zero >&{stream}")
    streams = {"stdout": -3, "stderr": -3, ("stdout", "stderr")[stream - 1]: writer}
    process = started(*LOGGED, *MEASURED[-2:], "--kill-after-ms", "60000000", "--", *job, **streams)
    os.close(writer)
    assert os.read(reader, 1) == b"\0"  # it delivers
    process.terminate()
    assert ended(process).returncode == 143
    os.close(reader)
    assert lines()[-1]["exit_code"] == 143 and samples()['retry_command_last_exit_code{task="sh"}'] == 143


@pytest.mark.parametrize("option", ("--event-log", "--metrics-file", "--breaker"))
def test_a_lock_that_another_holds_for_long_does_not_hold_a_stop_signal_up(fifo: Fifo, option: str) -> None:
    file = "log" if option == "--event-log" else "m.prom.lock"
    process = started(*RETRY_75, option, file.removesuffix(".lock"), "--", *PROBE, fifo.path, "on:TERM=65", "say:ready", "wait")
    fifo.line()
    holder = lock_of_another_run(file)
    process.terminate()
    told = ended(process, 143).stderr
    assert event("wrapper_error", kind="TimeoutError", file=file.removesuffix(".lock")) in told and failed(65) in told
    os.close(holder)


@pytest.mark.parametrize(("option", "file"), (("--metrics-file", "m.prom"), ("--breaker", "b")))
def test_a_new_file_in_the_way_that_is_not_ours_alone_is_left_as_it_is(option: str, file: str) -> None:
    Path("other").write_text("mine\n")
    os.link("other", f"{file}.new")
    done = run_cli(*RETRY_75, option, file, "--", "sh", "-c", "exit 75")
    assert b'"wrapper_error"' in done.stderr and Path("other").read_text() == "mine\n"
    os.unlink("other")  # now it is what a killed run left
    run_cli(*RETRY_75, option, file, "--", "sh", "-c", "exit 75", code=75)
    assert os.path.exists(file) and not os.path.exists(f"{file}.new")


def test_a_held_log_takes_nothing_of_the_budget() -> None:
    run_cli(*LOGGED, "--", "true", code=0)
    holder = lock_of_another_run("log")
    options = ("--retry-code", "75", "--initial-delay-ms", "1", "--max-elapsed-ms", "20000", "--event-log", "log")
    process = started(*RETRY_75[:1], *options, "--", "sh", "-c", "echo ran >>ran; exit 75")
    until(lambda: os.path.exists("ran") and Path("ran").read_text() == "ran\n" * 3)
    os.close(holder)
    assert ended(process, 75).stderr == failed(75, 1, 1) + failed(75, 2, 2) + failed(75, 3)
    assert [line["event"] for line in lines()][2:] == ["attempt_failed"] * 3 + ["run_ended"]


@pytest.mark.parametrize("option", ("--metrics-file", "--breaker"))
def test_a_stop_signal_during_the_wait_for_a_lock_starts_nothing(option: str) -> None:
    run_cli(*RETRY_75, option, "file", "--", "true", code=0)
    holder = lock_of_another_run("file.lock")
    process = started(*RETRY_75, option, "file", "--", "touch", "started")
    until(lambda: users(os.path.realpath("file.lock")))
    process.terminate()
    time.sleep(0.1)
    os.close(holder)
    assert ended(process, 143).stderr == event("interrupted", kind="sigterm") and not os.path.exists("started")


def test_a_stop_signal_ends_the_wait_for_a_lock_that_stays() -> None:
    run_cli(*MEASURED, "--", "true", code=0)
    lock_of_another_run("m.prom.lock")
    process = started(*MEASURED, "--", "touch", "started")
    until(lambda: users(os.path.realpath("m.prom.lock")))
    process.terminate()
    assert ended(process, 143).stderr == event("interrupted", kind="sigterm") and not os.path.exists("started")


@pytest.mark.parametrize("stop", (False, True))
def test_a_record_that_fails_after_a_success_changes_nothing_where_nobody_reads(fifo: Fifo, stop: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, b"x" * (1 << 20))
    os.set_blocking(writer, True)
    options = ("--retry-code", "75", "--metrics-file", "m.prom")
    process = started(*IMPATIENT, *options, "--", *PROBE, fifo.path, "on:USR1=0", "out:out", "say:{pid}", "wait", stderr=writer)
    job = int(fifo.line())
    lock_of_another_run("m.prom.lock")
    os.kill(job, signal.SIGUSR1)
    assert process.stdout and process.stdout.read(3) == b"out"
    if stop:
        time.sleep(1)  # the lock was waited for in vain
        process.terminate()
    assert ended(process).returncode == 0
    os.close(reader)
    os.close(writer)
