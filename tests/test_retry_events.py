"""What retry_command.py shows: the successful attempt alone, byte for byte, or the whole history of failures."""

import select
import signal
import time
from pathlib import Path

import pytest
from conftest import PROBE, RETRY, RETRY_75, Fifo, ended, event, failed, run_cli, started, state, until, until_backoff

LITERALS = (  # options, job, exit code, stderr to the byte
    (
        "--initial-delay-ms 10",
        "[ $RETRY_WRAPPER_ATTEMPT = 2 ] && exit 65; exit 75",
        65,
        b'{"source":"retry_wrapper","event":"attempt_failed","attempt":1,"max_attempts":3,"returncode":75,"retrying":true,"next_delay_ms":10}\n'
        b'{"source":"retry_wrapper","event":"attempt_failed","attempt":2,"max_attempts":3,"returncode":65,"retrying":false}\n',
    ),
    (
        "--max-attempts 1",
        "kill -KILL $$",
        137,
        b'{"source":"retry_wrapper","event":"attempt_failed","attempt":1,"max_attempts":1,"returncode":-9,"retrying":false}\n',
    ),
    (
        "--max-attempts 3",
        "kill -INT $PPID; exec sleep 1000",
        130,
        b'{"source":"retry_wrapper","event":"attempt_failed","attempt":1,"max_attempts":3,"returncode":-2,"retrying":false}\n'
        b'{"source":"retry_wrapper","event":"interrupted","kind":"keyboard_interrupt"}\n',
    ),
)


@pytest.mark.parametrize(("options", "job", "code", "stderr"), LITERALS)
def test_the_lines_byte_for_byte(options: str, job: str, code: int, stderr: bytes) -> None:
    done = run_cli(RETRY, "--retry-code", "75", *options.split(), "--", "sh", "-c", job, code=code)
    assert (done.stdout, done.stderr) == (b"", stderr)


def test_the_launch_error_byte_for_byte() -> None:
    line = b'{"source":"retry_wrapper","event":"launch_error","attempt":1,"max_attempts":3,"kind":"not_found","retrying":false}\n'
    assert run_cli(*RETRY_75, "--", "/no/such/job", code=127).stderr == line


def test_the_wrapper_error_byte_for_byte() -> None:
    with open("/dev/full", "wb") as full:
        done = run_cli(*RETRY_75, "--", "echo", stdout=full, code=125)
    assert done.stderr == b'{"source":"retry_wrapper","event":"wrapper_error","kind":"OSError"}\n'


TEXTS = (  # what a job writes, the newline that a history adds to it
    (b"", b""),
    (b"x", b"\n"),
    (b"x\n", b""),
    (b"x\n\n", b""),
    (b"\n", b""),
    (b"x\r", b"\n"),
    (b"x\ny", b"\n"),
    (b"\0", b"\n"),
    (b"\xff\xfe\0", b"\n"),
    (b"\xff\xfe\0\n", b""),
    ('é\u2028{"a":1}'.encode(), b"\n"),
)


@pytest.mark.parametrize(("text", "newline"), TEXTS)
def test_a_failure_shows_stderr_alone(tmp_path: Path, text: bytes, newline: bytes) -> None:
    (tmp_path / "text").write_bytes(text)
    job = ("sh", "-c", "cat text; cat text >&2; exit 75")
    done = run_cli(*RETRY_75, "--max-attempts", "2", "--", *job, cwd=tmp_path, code=75)
    assert done.stdout == b""
    assert done.stderr == failed(75, 1, 0, 2) + text + newline + failed(75, 2, None, 2) + text + newline


@pytest.mark.parametrize("text", [text for text, _ in TEXTS])
def test_a_success_shows_both_unchanged(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "other").write_bytes(text[::-1])
    done = run_cli(*RETRY_75, "--", "sh", "-c", "cat text; cat other >&2", cwd=tmp_path, code=0)
    assert (done.stdout, done.stderr) == (text, text[::-1])


def test_each_attempt_has_its_own_stderr() -> None:
    job = "echo out; echo err $RETRY_WRAPPER_ATTEMPT >&2; [ $RETRY_WRAPPER_ATTEMPT = 3 ] && exit 65; exit 75"
    done = run_cli(*RETRY_75, "--", "sh", "-c", job, code=65)
    assert done.stdout == b""
    assert done.stderr == failed(75, 1, 0) + b"err 1\n" + failed(75, 2, 0) + b"err 2\n" + failed(65, 3) + b"err 3\n"


@pytest.mark.parametrize("attempt", (1, 2, 3))
def test_a_success_hides_earlier_failures(attempt: int) -> None:
    job = f"n=$RETRY_WRAPPER_ATTEMPT; echo out $n; echo err $n >&2; [ $n = {attempt} ] || exit 75"
    done = run_cli(*RETRY_75, "--", "sh", "-c", job, code=0)
    assert (done.stdout, done.stderr) == (b"out %d\n" % attempt, b"err %d\n" % attempt)


REOPENED = "echo a >&2; echo b >/dev/stderr; echo c >&2; echo d >/proc/self/fd/2; echo e >>/dev/stderr"


def test_reopening_stderr_loses_nothing() -> None:
    assert run_cli(*RETRY_75, "--", "sh", "-c", f"{REOPENED}; exit 65", code=65).stderr == failed(65) + b"a\nb\nc\nd\ne\n"
    assert run_cli(*RETRY_75, "--", "sh", "-c", REOPENED, code=0).stderr == b"a\nb\nc\nd\ne\n"


def test_reopening_stdout_loses_nothing() -> None:
    assert run_cli(*RETRY_75, "--", "sh", "-c", "echo a; echo b >/dev/stdout; echo c", code=0).stdout == b"a\nb\nc\n"


def test_the_streams_are_kept_apart() -> None:
    job = "for i in 1 2 3 4 5 6 7 8 9; do printf o$i; printf e$i >&2; done"
    done = run_cli(*RETRY_75, "--", "sh", "-c", job, code=0)
    assert (done.stdout, done.stderr) == (b"o1o2o3o4o5o6o7o8o9", b"e1e2e3e4e5e6e7e8e9")


def test_nothing_is_shown_while_it_runs(fifo: Fifo) -> None:
    process = started(*RETRY_75, "--", *PROBE, fifo.path, "out:x", "err:y", "say:written", "on:USR1=0", "say:ready", "wait")
    assert (fifo.line(), fifo.line()) == ("written", "ready")
    assert process.stdout and process.stderr
    until(lambda: state(process.pid) == "S")
    assert select.select([process.stdout, process.stderr], [], [], 0) == ([], [], [])
    process.send_signal(signal.SIGUSR1)
    done = ended(process, 0)
    assert (done.stdout, done.stderr) == (b"x", b"y")


DELAYS = (  # initial, factor, maximum, the waits
    (0, 2, 30000, (0, 0, 0)),
    (0, 10, 0, (0, 0)),
    (1, 1, 60000, (1, 1, 1)),
    (1, 2, 30000, (1, 2, 4, 8, 16, 32)),
    (1, 2, 5, (1, 2, 4, 5, 5)),
    (1, 3, 9, (1, 3, 9, 9)),
    (1, 10, 50, (1, 10, 50, 50)),
    (7, 10, 7, (7, 7, 7, 7, 7, 7, 7, 7, 7)),
    (150, 2, 30000, (150, 300)),
)


@pytest.mark.parametrize(("initial_ms", "factor", "maximum_ms", "waits_ms"), DELAYS)
def test_delays_are_said_and_kept(initial_ms: int, factor: int, maximum_ms: int, waits_ms: tuple[int, ...]) -> None:
    attempts = len(waits_ms) + 1
    numbers = {"max-attempts": attempts, "initial-delay-ms": initial_ms, "backoff-factor": factor, "max-delay-ms": maximum_ms}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    begin_s = time.monotonic()
    done = run_cli(RETRY, "--retry-code", "75", *options, "--", "sh", "-c", "exit 75", code=75)
    assert time.monotonic() - begin_s >= sum(waits_ms) / 1000
    waited = [failed(75, number, wait_ms, attempts) for number, wait_ms in enumerate(waits_ms, 1)]
    assert done.stderr == b"".join(waited) + failed(75, attempts, None, attempts)


FIRST_DELAYS = (
    ("", 1000),
    ("--initial-delay-ms 30000 --backoff-factor 10", 30000),
    ("--initial-delay-ms 60000 --max-delay-ms 60000", 60000),
)


@pytest.mark.parametrize(("options", "wait_ms"), FIRST_DELAYS)
def test_the_first_delay(fifo: Fifo, options: str, wait_ms: int) -> None:
    process = started(RETRY, "--retry-code", "75", *options.split(), "--", *PROBE, fifo.path, "say:ready", "exit:75")
    assert fifo.until_gone() == ["ready"]
    until_backoff(process.pid)
    process.terminate()
    assert ended(process, 143).stderr == failed(75, 1, wait_ms) + event("interrupted", kind="sigterm")
