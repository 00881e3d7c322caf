"""--stream-stderr: what happens is shown as it happens; stdout still comes from a success alone."""

import os
import pty
import signal
import socket
import time
import tty
from typing import Any

import pytest
from conftest import HANG_S, PROBE, RETRY, RETRY_75, UNSHARE, Fifo, ended, event, failed, needs_namespaces, run_cli, started

STREAMED = (*RETRY_75, "--stream-stderr")
LAST = '[ "$RETRY_WRAPPER_ATTEMPT" = 3 ] || exit 75'


def read_until(fd: int, text: bytes) -> bytes:
    data = b""
    while text not in data:
        part = os.read(fd, 65536)
        assert part, data
        data += part
    return data


def test_it_appears_as_it_is_written(fifo: Fifo) -> None:
    words = ("err:begun ", "on:USR1=75", "say:ready", "wait")
    process = started(*STREAMED, "--max-attempts", "1", "--", *PROBE, fifo.path, *words)
    assert process.stderr
    assert fifo.line() == "ready" and os.read(process.stderr.fileno(), 100) == b"begun "
    process.send_signal(signal.SIGUSR1)
    assert ended(process, 75).stderr == b"\n" + failed(75, max_attempts=1)


def test_events_come_between_the_attempts(fifo: Fifo) -> None:
    process = started(*STREAMED, "--initial-delay-ms", "20000", "--", *PROBE, fifo.path, "err:a", "out:x", "exit:75")
    assert process.stderr
    assert read_until(process.stderr.fileno(), b"}\n") == b"a\n" + failed(75, 1, 20000)
    process.terminate()
    done = ended(process, 143)
    assert (done.stdout, done.stderr) == (b"", event("interrupted", kind="sigterm"))


@pytest.mark.parametrize(
    ("text", "newline"), ((b"", b""), (b"a\n", b""), (b"a", b"\n"), (b"a\n\n", b""), (b"a\nb", b"\n"), (b"\xff\0", b"\n"))
)
@pytest.mark.parametrize("code", (0, 65, 75))
def test_each_event_has_its_own_line(text: bytes, newline: bytes, code: int) -> None:
    job = ("sh", "-c", f"echo out; cat >&2; {LAST}; exit {code}")
    done = run_cli(*STREAMED, "--stdin", "replay", "--", *job, input=text, code=code)
    first = text + newline + failed(75, 1, 0) + text + newline + failed(75, 2, 0)
    last = b"" if code == 0 else newline + failed(code, 3)
    assert done.stderr == first + text + last
    assert done.stdout == (b"" if code else b"out\n")


def test_reopening_stderr_loses_nothing(tmp_path: Any) -> None:
    with open(tmp_path / "log", "wb") as log:
        run_cli(*STREAMED, "--", "sh", "-c", "echo a >&2; echo b >/dev/stderr; echo c >&2; exit 65", stderr=log, code=65)
    assert (tmp_path / "log").read_bytes() == b"a\nb\nc\n" + failed(65)


def test_launch_errors_and_interrupts() -> None:
    assert b'"launch_error"' in run_cli(*STREAMED, "--", "/no/such", code=127).stderr
    done = run_cli(*STREAMED, "--", "sh", "-c", "echo a >&2; kill -INT $PPID; exec sleep 60", code=130)
    assert done.stderr == b"a\n" + failed(-2) + event("interrupted", kind="keyboard_interrupt")


UNHEARD = (  # stderr, the job, exit code
    ("2>/dev/full", "echo a >&2; exit 65", 65),
    ("2>/dev/full", "echo a >&2; exit 75", 75),
    ("2>/dev/full", "exit 75", 75),
    ("2>/dev/full", "echo a >&2", 125),
    ("2>/dev/full", "echo out", 0),
    ("2>&-", "echo a >&2; exit 65", 65),
    ("2>&-", "echo a >&2", 125),
    ("2>&-", "exit 0", 0),
    ("2>/dev/full", f"{LAST}; echo out", 0),  # what nobody heard was no output of the success
    ("2>/dev/full", f"{LAST}; echo a >&2", 125),
)


@pytest.mark.parametrize(("redirection", "job", "code"), UNHEARD)
def test_a_stderr_that_takes_nothing(fifo: Fifo, redirection: str, job: str, code: int) -> None:
    script = f'"$@" {redirection}'
    run_cli("sh", "-c", script, "sh", *STREAMED, "--", "sh", "-c", job, code=code)


@pytest.mark.parametrize(("job", "code"), (("exit 65", 65), ("exit 75", 75), ("exit 0", 141)))
def test_a_reader_that_has_left(job: str, code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run_cli(*STREAMED, "--", "sh", "-c", f"echo a >&2; {job}", stderr=writer, code=code)
    os.close(writer)


def test_all_attempts_run_though_nobody_hears(tmp_path: Any) -> None:
    job = "head -c 3000000 /dev/zero >&2; echo x >>ran; exit 75"
    run_cli("sh", "-c", '"$@" 2>/dev/full', "sh", *STREAMED, "--", "sh", "-c", job, cwd=tmp_path, code=75)
    assert (tmp_path / "ran").read_text() == "x\n" * 3


def stuck_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    return writer, reader


def stuck_terminal() -> tuple[int, int]:
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return writer, reader


def stuck_socket() -> tuple[int, int]:
    writer, reader = socket.socketpair()
    return writer.detach(), reader.detach()


each_stuck = pytest.mark.parametrize("stuck", (stuck_pipe, stuck_terminal, stuck_socket))


@each_stuck
@pytest.mark.parametrize("verbose", ((), ("--verbose",)))
def test_a_reader_that_is_stuck_does_not_keep_term_from_the_job(fifo: Fifo, stuck: Any, verbose: tuple[str, ...]) -> None:
    writer, reader = stuck()
    words = ("err:" + "x" * 100_000,) * 5 + ("on:TERM=65", "say:ready", "wait")
    process = started(*STREAMED, *verbose, "--kill-after-ms", "0", "--", *PROBE, fifo.path, *words, stderr=writer)
    os.close(writer)
    assert fifo.line() == "ready"
    process.terminate()
    assert ended(process).returncode == 143
    fifo.until_gone()
    os.close(reader)


@each_stuck
def test_a_reader_that_is_stuck_does_not_stop_the_clock(fifo: Fifo, stuck: Any) -> None:
    writer, reader = stuck()
    between = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    words = ("err:" + "x" * 100_000,) * 5 + ("say:{attempt}", "wait")
    options = ("--retry-code", "124", "--attempt-timeout-ms", "3000", "--max-attempts", "2", "--kill-after-ms", "0")
    process = started(*STREAMED, *options, "--", *PROBE, fifo.path, *words, stderr=writer)
    os.close(writer)
    assert [fifo.line() for _ in range(2)] == ["1", "2"]
    process.terminate()
    process.wait(HANG_S)
    os.close(between)
    os.close(reader)


@needs_namespaces
def test_what_was_shown_does_not_fill_the_disk(tmp_path: Any) -> None:
    """50 MB through a folder of 4 MB, for a reader that keeps up."""
    script = 'mount -t tmpfs -o size=4M none "$0"; export TMPDIR="$0"; "$@" 2>&1 | wc -c'
    job = "for i in $(seq 500); do head -c 100000 /dev/zero >&2; sleep 0.002; done"
    assert run_cli(*UNSHARE, "sh", "-c", script, tmp_path, *STREAMED, "--", "sh", "-c", job, code=0).stdout == b"50000000\n"


def test_no_wait_is_a_busy_one(fifo: Fifo) -> None:
    """With a reader that does not read, and bytes for it, the wrapper sleeps."""
    writer, reader = stuck_pipe()
    words = (*("err:" + "x" * 100_000,) * 2, "say:ready", "wait")
    process = started(*STREAMED, "--kill-after-ms", "0", "--", *PROBE, fifo.path, *words, stderr=writer)
    os.close(writer)
    fifo.line()

    def ticks() -> int:
        with open(f"/proc/{process.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(1)
    assert ticks() - before <= 10
    process.terminate()
    ended(process)
    os.close(reader)


def test_it_is_off_by_default(fifo: Fifo) -> None:
    process = started(RETRY, "--retry-code", "75", "--", *PROBE, fifo.path, "err:a", "on:USR1=0", "say:ready", "wait")
    assert process.stderr and fifo.line() == "ready"
    os.set_blocking(process.stderr.fileno(), False)
    assert process.stderr.read() is None
    process.send_signal(signal.SIGUSR1)
    os.set_blocking(process.stderr.fileno(), True)
    assert ended(process, 0).stderr == b"a"


def test_one_pipe_for_both_that_is_not_read() -> None:
    """Neither the output nor a line of ours may block."""
    for more in ((), ("--verbose",), ("--stream-stderr", "--verbose")):
        reader, writer = os.pipe()
        process = started(*RETRY_75, *more, "--", "seq", "1000000", stdout=writer, stderr=writer)
        os.close(writer)
        assert os.read(reader, 1)
        time.sleep(0.3)
        process.terminate()
        assert process.wait(HANG_S) == 143
        os.close(reader)


@pytest.mark.parametrize("more", (("--verbose",), ("--stream-stderr",), ("--stream-stderr", "--verbose")))
def test_one_file_for_both_gets_one_after_the_other(more: tuple[str, ...]) -> None:
    job = "yes EEEEEEEE | head -20000 >&2; yes oooooooo | head -20000"
    script = '"$@" 2>&1 | { sleep 0.5; cat; }'
    shown = run_cli("sh", "-c", script, "sh", *RETRY_75, *more, "--", "sh", "-c", job, code=0).stdout.splitlines()
    lines = [line for line in shown if not line.startswith(b"retry_command.py: ")]
    streams = [b"EEEEEEEE"] * 20000, [b"oooooooo"] * 20000
    assert lines == (streams[0] + streams[1] if "--stream-stderr" in more else streams[1] + streams[0])


def test_stdout_is_the_master_of_a_terminal() -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    run_cli(*STREAMED, "--", "sh", "-c", "echo out; echo err >&2", stdout=master, stderr=master, code=0)
    shown = b""
    while len(shown) < 8:
        shown += os.read(slave, 100)
    assert sorted(shown.split()) == [b"err", b"out"]
    os.close(master)
    os.close(slave)


def test_the_last_word_begins_a_line() -> None:
    reader, writer = os.pipe()
    process = started(*STREAMED, "--", "sh", "-c", "printf abc >&2; seq 1000000", stdout=writer)
    os.close(writer)
    assert os.read(reader, 1)
    process.terminate()
    assert ended(process, 143).stderr == b"abc\n" + event("interrupted", kind="sigterm")
    os.close(reader)


@needs_namespaces
@pytest.mark.parametrize("reader", ("head -c 200000000", "{ head -c 1000000 | { sleep 1; cat; }; head -c 100000000; }"))
def test_a_flood_does_not_fill_the_disk(tmp_path: Any, reader: str) -> None:
    mount = 'mount -t tmpfs -o size=24M none "$0"; export TMPDIR="$0"'
    script = f'{mount}; "$@" 2>&1 >/dev/null | {reader} | wc -c; echo "${{PIPESTATUS[0]}}"'
    done = run_cli(*UNSHARE, "bash", "-c", script, tmp_path, *STREAMED, "--", "sh", "-c", "yes | head -c 250000000 >&2", code=0)
    size, code = done.stdout.split()
    assert int(size) > 100_000_000 and code == b"141"
