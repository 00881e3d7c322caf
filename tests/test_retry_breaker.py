"""The circuit breaker: a pure state machine, and its file that all runs share, whatever they die of."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CLEAN_ENV,
    HANG_S,
    IMPATIENT,
    PROBE,
    REDIRECTING,
    RETRY_75,
    UNSHARE,
    Fifo,
    ended,
    event,
    failed,
    lock_of_another_run,
    needs_namespaces,
    run_cli,
    started,
    until,
)

from retry_command import CircuitBreaker

OPEN_MS = 1000
MACHINE = (  # steps (at ms, what happens), the state after each; "y" and "n" are what allow() says
    ("0 f", "closed"),
    ("0 f 0 f", "closed"),
    ("0 f 0 f 0 f", "open"),
    ("0 f 0 f 0 s 0 f 0 f", "closed"),
    ("0 f 0 f 0 f 0 n 999 n", "open"),
    ("0 f 0 f 0 f 1000", "half-open"),
    ("0 f 0 f 0 f 1000 y 1000 n 5000 n", "half-open"),
    ("0 f 0 f 0 f 1000 y 1500 s", "closed"),
    ("0 f 0 f 0 f 1000 y 1500 s 1500 y 1500 y 1500 f 1500 f", "closed"),
    ("0 f 0 f 0 f 1000 y 1500 f", "open"),
    ("0 f 0 f 0 f 1000 y 1500 f 2499 n", "open"),
    ("0 f 0 f 0 f 1000 y 1500 f 2500 y 2500 n", "half-open"),
    ("0 f 0 f 0 f 500 f 1000", "half-open"),  # a late failure of a run from before does not keep it open
    ("0 f 0 f 0 f 500 s", "closed"),
)


@pytest.mark.parametrize(("steps", "state"), MACHINE)
def test_the_state_machine(steps: str, state: str) -> None:
    now_ms = 0.0
    breaker = CircuitBreaker(3, OPEN_MS, clock=lambda: now_ms)
    for word in steps.split():
        if word.isdigit():
            now_ms = int(word)
        elif word == "f":
            breaker.record_failure()
        elif word == "s":
            breaker.record_success()
        else:
            assert breaker.allow() == (word == "y"), steps
    assert breaker.state() == state


def test_when_a_probe_may_go() -> None:
    now_ms = 0.0
    breaker = CircuitBreaker(1, OPEN_MS, clock=lambda: now_ms)
    assert breaker.retry_after_ms() == 0
    breaker.record_failure()
    for now_ms, left_ms in ((0, 1000), (0.5, 1000), (1, 999), (999.9, 1), (1000, 0), (9999, 0)):  # noqa: B007
        assert breaker.retry_after_ms() == left_ms


def test_defaults() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        assert breaker.allow()
        breaker.record_failure()
    assert not breaker.allow() and 29_000 < breaker.retry_after_ms() <= 30_000


@pytest.fixture
def breaker(here: Path) -> tuple[object, ...]:
    return (*RETRY_75, "--max-attempts", "1", "--breaker", "breaker", "--breaker-failures", "2", "--breaker-reset-ms", "600000")


def saved() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("breaker").read_text())
    return content


def opened_ago(seconds: float) -> None:
    state = saved()
    now_ms = 1000 * time.clock_gettime(time.CLOCK_BOOTTIME)
    Path("breaker").write_text(json.dumps({**state, "failures": 2, "opened_at_ms": int(now_ms - 1000 * seconds)}))


def is_open(breaker: tuple[object, ...], *more: str) -> bool:
    """A run with a job that would close it, if it were let go."""
    done = run_cli(*breaker, *more, "--", "echo", "ran")
    if done.returncode == 0:
        return False
    line = json.loads(done.stderr)
    assert (done.returncode, done.stdout, line["event"]) == (69, b"", "circuit_open") and line["retry_after_ms"] >= 0
    return True


def fail(breaker: tuple[object, ...], code: int = 75) -> None:
    run_cli(*breaker, "--", "sh", "-c", f"exit {code}", code=code)


def test_listed_failures_in_a_row_open_it(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    assert saved()["opened_at_ms"] is None
    fail(breaker)
    assert is_open(breaker) and is_open(breaker)


def test_a_success_closes_it(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    assert not is_open(breaker)
    fail(breaker)
    assert not is_open(breaker) and saved()["failures"] == 0


def test_an_unlisted_code_does_not_count(breaker: tuple[object, ...]) -> None:
    for _ in range(4):
        fail(breaker, 65)
    fail(breaker)
    fail(breaker, 65)
    assert saved()["failures"] == 1 and not is_open(breaker)


@pytest.mark.parametrize(("option", "job", "code"), (("--retry-signal", "kill -KILL $$", 137), ("--retry-code", "exit 124", 124)))
def test_whatever_is_listed_counts(breaker: tuple[object, ...], option: str, job: str, code: int) -> None:
    listed = {"--retry-signal": "KILL", "--retry-code": "124"}[option]
    for _ in range(2):
        run_cli(*breaker, option, listed, "--", "sh", "-c", job, code=code)
    assert is_open(breaker)


def test_it_opens_in_the_middle_of_a_run(breaker: tuple[object, ...]) -> None:
    done = run_cli(*breaker, "--max-attempts", "9", "--", "sh", "-c", "exit 75", code=75)
    assert done.stderr == failed(75, 1, 0, 9) + failed(75, 2, max_attempts=9)


def test_another_run_opens_it_during_a_wait(breaker: tuple[object, ...]) -> None:
    options = ("--max-attempts", "2", "--initial-delay-ms", "1500")
    process = started(*breaker, *options, "--", "sh", "-c", "echo ran >>ran; exit 75")
    until(lambda: os.path.exists("breaker") and saved()["failures"] == 1)
    fail(breaker)
    assert ended(process, 75).stderr == failed(75, 1, 1500, 2) and Path("ran").read_text() == "ran\n"


def test_one_probe_at_a_time_among_fifty(breaker: tuple[object, ...], fifo: Fifo) -> None:
    fail(breaker)
    opened_ago(601)
    runs = [started(*breaker, "--", *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait") for _ in range(50)]
    until(lambda: sum(run.poll() is not None for run in runs) == 49)
    assert sorted(run.poll() or 0 for run in runs) == [0] + [69] * 49
    os.kill(int(fifo.line()), signal.SIGUSR1)
    assert fifo.until_gone() == ["got SIGUSR1"]
    assert sorted(ended(run).returncode for run in runs) == [0] + [69] * 49
    assert not is_open(breaker)


def test_a_probe_that_fails_opens_it_again(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    opened_ago(601)
    fail(breaker)
    assert is_open(breaker) and saved()["failures"] == 3


@pytest.mark.parametrize("code", (65, 143))
def test_a_probe_that_tells_nothing_lets_the_next_one_go(breaker: tuple[object, ...], code: int) -> None:
    fail(breaker)
    opened_ago(601)
    run_cli(*breaker, "--", "sh", "-c", "exit 65" if code == 65 else "kill -TERM $PPID; exec sleep 60", code=code)
    assert saved()["failures"] == 2 and not is_open(breaker)


@pytest.mark.parametrize("before", ((), REDIRECTING), ids=("", "redirecting"))
def test_a_killed_probes_right_is_free_when_its_job_is_gone(
    breaker: tuple[object, ...], fifo: Fifo, before: tuple[str, ...]
) -> None:
    fail(breaker)
    opened_ago(601)
    process = started(*breaker, "--", *before, *PROBE, fifo.path, "say:{pid}", "wait")
    job = int(fifo.line())
    process.kill()
    process.wait(HANG_S)
    assert is_open(breaker)
    os.kill(job, signal.SIGKILL)
    fifo.until_gone()
    assert not is_open(breaker)


def test_a_daemon_of_a_probe_does_not_keep_the_right(breaker: tuple[object, ...], fifo: Fifo) -> None:
    fail(breaker)
    opened_ago(601)
    run_cli(*breaker, "--", *PROBE, fifo.path, "leave:0", "say:{pid}", "wait", code=0)
    fail(breaker)
    fail(breaker)
    opened_ago(601)
    assert not is_open(breaker)
    os.kill(int(fifo.line()), signal.SIGKILL)


DAMAGED = (
    b"",
    b"\0" * 80,
    b"{",
    b'{"failures":2,"opened',
    b'{"failures":2,"opened' + b"\0" * 40,
    b'{"failures":[]}\n',
    b'{"failures":"x","opened_at_ms":null}',
    b'{"failures":' + b"[" * 100_000,
    b'{"failures":\xff',
)


@pytest.mark.parametrize("content", DAMAGED, ids=len)
def test_a_damaged_file_counts_as_closed(breaker: tuple[object, ...], content: bytes) -> None:
    Path("breaker").write_bytes(content)
    done = run_cli(*breaker, "--", "sh", "-c", "exit 65", code=65)
    assert done.stderr == event("breaker_damaged") + failed(65, max_attempts=1)
    assert saved()["failures"] == 0


@pytest.mark.parametrize(
    "content", (b"notes of mine\n", b"[]", b"null", b'{"name":1}', b"\0\0x", b" {", b"\xff", b"[" * 100_000), ids=len
)
def test_a_file_of_others_is_left_as_it_is(breaker: tuple[object, ...], content: bytes) -> None:
    Path("breaker").write_bytes(content)
    done = run_cli(*breaker, "--", "touch", "started", code=125)
    assert done.stderr == event("wrapper_error", kind="ValueError", file="breaker")
    assert Path("breaker").read_bytes() == content and not os.path.exists("started")


def test_a_reboot_lets_a_probe_go(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    fail(breaker)
    assert is_open(breaker)
    Path("breaker").write_text(json.dumps({**saved(), "boot_id": "another"}))
    assert not is_open(breaker)


@needs_namespaces
def test_without_a_boot_id_it_is_this_boot(breaker: tuple[object, ...]) -> None:
    """In a /proc that has processes alone, as systemd's ProcSubset=pid makes it."""
    bare = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o subset=pid proc /proc && exec "$@"', "sh")
    if run_cli(*bare, "true").returncode:
        pytest.skip("needs Linux 5.8")
    fail(breaker)
    fail(breaker)
    run_cli(*bare, *breaker, "--", "true", code=69)
    opened_ago(601)
    run_cli(*bare, *breaker, "--", "sh", "-c", "exit 75", code=75)
    assert saved()["boot_id"] == "" and is_open(breaker)


def test_a_time_in_the_future_is_now(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    opened_ago(-10_000)
    assert json.loads(run_cli(*breaker, "--", "true", code=69).stderr)["retry_after_ms"] <= 600_000


@needs_namespaces
def test_its_clock_is_the_boots(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    fail(breaker)
    later = ("unshare", "--time", "--boottime", "700", "--fork")
    if run_cli(*later, "true").returncode:
        pytest.skip("needs time namespaces")
    assert is_open(breaker)
    run_cli(*later, *breaker, "--", "sh", "-c", "exit 65", code=65)


def test_many_runs_lose_no_failure(breaker: tuple[object, ...]) -> None:
    many = (*breaker, "--breaker-failures", "1000")
    runs = [started(*many, "--", "sh", "-c", "exit 75") for _ in range(50)]
    for run in runs:
        ended(run, 75)
    assert saved()["failures"] == 50
    assert sorted(os.listdir()) == ["breaker", "breaker.lock"]
    assert {os.stat(name).st_mode & 0o777 for name in os.listdir()} == {0o600}


def test_verbose_says_why_and_when(breaker: tuple[object, ...]) -> None:
    fail(breaker)
    fail(breaker)
    shown = run_cli(*breaker, "--verbose", "--", "true", code=69).stderr.decode()
    assert "the circuit breaker is open: a probe may go in 5" in shown


def test_a_file_that_is_of_no_use(breaker: tuple[object, ...], tmp_path: Path) -> None:
    unusable: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: os.symlink(tmp_path / "elsewhere", "breaker"), "OSError"),
        (lambda: os.mkdir("breaker"), "PermissionError"),
        (lambda: os.mkfifo("breaker"), "PermissionError"),
        (lambda: os.symlink(tmp_path / "elsewhere", "breaker.lock"), "OSError"),
        (lambda: os.symlink(tmp_path / "elsewhere", "breaker.new"), "OSError"),
        (lambda: os.mkfifo("breaker.new"), "OSError"),
        (lambda: os.mkdir("breaker.new"), "IsADirectoryError"),
    )
    for make, kind in unusable:
        make()
        done = run_cli(*breaker, "--", "touch", "started", code=125)
        assert done.stderr == event("wrapper_error", kind=kind, file="breaker")
        run_cli("rm", "-rf", "breaker", "breaker.lock", "breaker.new")
    assert os.listdir() == [] and not (tmp_path / "elsewhere").exists()


LOCKED = (*IMPATIENT, "--retry-code", "75", "--initial-delay-ms", "0", "--breaker", "breaker", "--breaker-reset-ms", "600000")


def test_a_lock_that_another_holds_changes_nothing(here: Path, fifo: Fifo) -> None:
    writer = os.open(fifo.path, os.O_RDWR)  # no end of file between two attempts
    process = started(*LOCKED, "--breaker-failures", "9", "--", *PROBE, fifo.path, "on:USR1=75", "say:{pid}", "wait")
    job = int(fifo.line())
    holder = lock_of_another_run("breaker.lock")
    for attempt in (1, 2, 3):
        os.kill(job, signal.SIGUSR1)
        assert fifo.line() == "got SIGUSR1"
        job = int(fifo.line()) if attempt < 3 else 0
    told = event("wrapper_error", kind="TimeoutError", file="breaker")
    assert ended(process, 75).stderr == told + failed(75, 1, 0) + failed(75, 2, 0) + failed(75, 3)
    os.close(holder)
    os.close(writer)


def test_a_probe_whose_result_cannot_be_recorded_gives_its_right_back(breaker: tuple[object, ...], fifo: Fifo) -> None:
    fail(breaker)
    opened_ago(601)
    daemon = 'echo $$ >"$0"; exec sleep 600'
    job = (
        f"setsid -f sh -c '{daemon}' daemon >/dev/null 2>&1; until [ -s daemon ]; do sleep 0.01; done; echo >{fifo.path}; sleep 1"
    )
    process = started(*LOCKED, "--", "sh", "-c", job)
    fifo.line()
    holder = lock_of_another_run("breaker.lock")
    assert b"TimeoutError" in ended(process, 0).stderr
    os.close(holder)
    assert not is_open(breaker)
    os.kill(int(Path("daemon").read_text()), signal.SIGKILL)


@needs_namespaces
def test_a_full_disk_stops_no_job(breaker: tuple[object, ...], here: Path) -> None:
    fail(breaker)
    Path("breaker").write_text(json.dumps({**saved(), "boot_id": "another"}))
    script = 'mount -t tmpfs -o size=16k none "$1"; cp breaker "$1"; cd "$1"; cat /dev/zero >fill 2>&-; shift; "$@"'
    os.mkdir("full")
    done = run_cli(
        *UNSHARE, "sh", "-c", script, "sh", "full", *breaker, "--", "echo", "x", code=0, env={**CLEAN_ENV, "TMPDIR": here}
    )
    assert done.stdout == b"x\n" and done.stderr in (b"", event("wrapper_error", kind="OSError", file="breaker"))


def test_a_file_that_goes_away_in_the_middle_changes_nothing(here: Path) -> None:
    os.mkdir("gone")
    options = ("--breaker", "gone/breaker", "--metrics-file", "gone/m.prom")
    job = "rm -rf gone; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75; echo done"
    done = run_cli(*RETRY_75, *options, "--", "sh", "-c", job, code=0)
    assert done.stdout == b"done\n"
    told = [event("wrapper_error", kind="FileNotFoundError", file=file) for file in ("gone/breaker", "gone/m.prom")]
    assert done.stderr.splitlines(keepends=True) == told
