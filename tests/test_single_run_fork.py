"""single_run.py --no-fork, --unlock-on-exit, --stdin: who remains, what holds the lock, and what the command reads."""

import os
import signal
import time
from pathlib import Path

import pytest
from conftest import HANG_S, PROBE, SINGLE, Fifo, at_entry, ended, json_line, run_cli, send, single, started, until

NO_FORK = (SINGLE, "--lock", "lock", "--no-fork", "--")
DAEMON = ("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")


def test_no_fork_is_the_command(here: Path) -> None:
    run = started(*NO_FORK, "sh", "-c", "echo $$; cat lock")
    pid, record = ended(run, 0).stdout.split(b"\n")[:2]
    assert int(pid) == run.pid and record.startswith(b'{"format_version":1,"owner_pid":%d,' % run.pid)


def test_no_fork_holds_the_lock(here: Path, fifo: Fifo) -> None:
    run = started(*NO_FORK, *PROBE, fifo.path, "say:{pid}", "wait")
    assert int(fifo.line()) == run.pid
    single("lock", "true", code=75)
    run.terminate()
    ended(run, -signal.SIGTERM)
    single("lock", "true", code=0)


@pytest.mark.parametrize("ignored", ({signal.SIGHUP, signal.SIGCHLD}, {signal.SIGINT, signal.SIGUSR1}))
@pytest.mark.parametrize("blocked", ({signal.SIGTERM}, {signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM}))
def test_no_fork_leaves_signals_as_given(here: Path, ignored: set[int], blocked: set[int]) -> None:
    grep = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    bare = run_cli(*grep, preexec_fn=at_entry(ignored, blocked), code=0).stdout
    assert run_cli(*NO_FORK, *grep, preexec_fn=at_entry(ignored, blocked), code=0).stdout == bare


def test_no_fork_leaves_descriptors_as_given(here: Path) -> None:
    reader, writer = os.pipe()
    shown = run_cli(*NO_FORK, "bash", "-c", f"echo through >&{writer}; ls /proc/$$/fd; :", pass_fds=[writer], code=0).stdout
    os.close(writer)
    assert os.read(reader, 99) == b"through\n"
    os.close(reader)
    assert set(shown.split()) == {b"0", b"1", b"2", b"10", b"%d" % writer}  # 10: the lock's


@pytest.mark.parametrize(
    ("command", "reason"), (("./missing", "found"), ("missing", "found"), ("/", "executable"), ("", "executable"))
)
def test_no_fork_says_why_it_cannot_start(here: Path, command: str, reason: str) -> None:
    end = run_cli(*NO_FORK, command, code=3)
    assert end.stderr == json_line(status="error", reason=f"command_not_{reason}", command=command)
    reader, writer = os.pipe()
    os.close(reader)
    run_cli(*NO_FORK, command, code=3, stderr=writer)  # nobody to tell
    os.close(writer)
    Path("full").write_bytes(b"x" * 4096)
    with open("full", "ab") as full:
        run_cli("bash", "-c", f'ulimit -f 1; exec {SINGLE} --lock lock --no-fork -- "$0"', command, code=3, stderr=full)
    single("lock", "true", code=0)


@pytest.mark.parametrize("options", ((), ("--unlock-on-exit",)))
def test_a_daemon_and_the_lock(here: Path, options: tuple[str, ...]) -> None:
    daemon = int(run_cli(SINGLE, "--lock", "lock", *options, "--", *DAEMON, code=0).stdout)
    single("lock", "true", code=0 if options else 75)
    send(daemon, signal.SIGKILL)
    until(lambda: run_cli(SINGLE, "--lock", "lock", "--", "true").returncode == 0)


def test_unlock_on_exit_is_not_done_by_a_killed_wrapper(here: Path, fifo: Fifo) -> None:
    run = started(SINGLE, "--lock", "lock", "--unlock-on-exit", "--", *PROBE, fifo.path, "say:{pid}", "wait")
    job = int(fifo.line())
    run.kill()
    run.wait(HANG_S)
    single("lock", "true", code=75)
    send(job, signal.SIGKILL)
    assert fifo.until_gone() == []
    single("lock", "true", code=0)


def test_nobody_is_left_to_unlock(here: Path) -> None:
    end = run_cli(SINGLE, "--lock", "lock", "--no-fork", "--unlock-on-exit", "--", "true", code=2)
    assert b'"reason":"invalid_arguments"' in end.stderr and not os.listdir()


@pytest.mark.parametrize("no_fork", ((), ("-F",)))
@pytest.mark.parametrize(("options", "seen"), (((), b""), (("--stdin", "null"), b""), (("--stdin", "inherit"), b"given\n")))
def test_what_the_command_reads(here: Path, no_fork: tuple[str, ...], options: tuple[str, ...], seen: bytes) -> None:
    assert run_cli(SINGLE, "--lock", "lock", *no_fork, *options, "--", "cat", input=b"given\n", code=0).stdout == seen


@pytest.mark.parametrize("options", ((), ("--wait-ms", "600000")), ids=("at once", "after a wait"))
def test_an_inherited_alarm_still_rings(here: Path, fifo: Fifo, options: tuple[str, ...]) -> None:
    """alarm(2) outlives exec: perl -e 'alarm 1; exec @ARGV' is a common time limit. It is the job's, not the wait's."""

    def alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    began = time.monotonic()
    if options:
        held = started(SINGLE, "--lock", "lock", "--", *PROBE, fifo.path, "say:{pid}", "wait")
        job = int(fifo.line())
    run = started(SINGLE, "--lock", "lock", *options, "--", "sleep", "600", preexec_fn=alarm)
    if options:
        time.sleep(0.1)
        send(job, signal.SIGKILL)
        ended(held, 137)
    ended(run, 128 + signal.SIGALRM)
    assert time.monotonic() - began >= 0.3
