"""single_run.py --wait-ms: woken by the release, ended by a stop signal or by time, and never fooled by the path."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PROBE, SINGLE, Fifo, at_entry, ended, run_cli, send, single, started, state, until

WEEK_MS = str(7 * 24 * 3600 * 1000)
BUSY = b'{"status":"busy","reason":"lock_held","lock":"lock"}\n'
LOOPS = int(os.environ.get("LOOPS", "25"))  # 250 make the 2000 runs of a long test
STOPS = ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131))


def holder(fifo: Fifo, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    """A run that holds the lock until its job, whose pid is the second, gets SIGUSR1."""
    run = started(SINGLE, "--lock", "lock", *options, "--", *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait")
    return run, int(fifo.line())


def is_blocked(pid: int) -> bool:
    """Whether /proc/locks shows the process to wait for a flock."""
    return bool(re.search(rf"-> FLOCK +ADVISORY +\w+ +{pid} ", Path("/proc/locks").read_text()))


def waiter(
    *command: object, options: tuple[str, ...] = (), preexec_fn: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """A run that waits for the lock in the kernel."""
    run = started(SINGLE, "--lock", "lock", "--wait-ms", WEEK_MS, *options, "--", *command, preexec_fn=preexec_fn)
    until(lambda: is_blocked(run.pid))
    return run


@pytest.mark.parametrize("number", (signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM))
@pytest.mark.parametrize("way", ("ignored", "blocked"))
def test_the_release_starts_the_waiter(here: Path, fifo: Fifo, number: int, way: str) -> None:
    held, job = holder(fifo)
    waiting = waiter("echo", "ran", preexec_fn=at_entry(**{way: {number}}))
    assert held.poll() is None
    send(job, signal.SIGUSR1)
    assert ended(waiting, 0).stdout == b"ran\n"
    ended(held, 0)


@pytest.mark.parametrize(
    ("options", "code"), ((("--wait-ms", "0"), 75), (("--wait-ms", "150"), 75), (("-E", "0", "--wait-ms", "1"), 0))
)
def test_in_vain(here: Path, fifo: Fifo, options: tuple[str, ...], code: int) -> None:
    held, job = holder(fifo)
    began = time.monotonic()
    end = run_cli(SINGLE, "--lock", "lock", *options, "--", "echo", "ran", code=code)
    assert (end.stdout, end.stderr) == (b"", BUSY)
    assert time.monotonic() - began >= int(options[-1]) / 1000
    send(job, signal.SIGUSR1)
    ended(held, 0)


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_stop_signal_ends_the_wait_and_nothing_starts(here: Path, fifo: Fifo, number: int, code: int) -> None:
    held, job = holder(fifo)
    waiting = waiter("touch", "started")
    waiting.send_signal(number)
    end = ended(waiting, code)
    assert (end.stdout, end.stderr) == (b"", b"") and not Path("started").exists() and held.poll() is None
    send(job, signal.SIGUSR1)
    ended(held, 0)


def test_a_stop_signal_right_after_the_notice(here: Path, fifo: Fifo) -> None:
    """When the notice is out, the wait has not quite begun."""
    held, job = holder(fifo)
    for _ in range(20):
        run = started(SINGLE, "--lock", "lock", "--wait-ms", WEEK_MS, "--show-holders", "--", "touch", "started")
        assert run.stderr
        notice = json.loads(run.stderr.readline())
        run.send_signal(signal.SIGTERM)
        assert ended(run, 143).stderr == b""
        assert (notice["status"], notice["lock"]) == ("waiting", "lock")
        assert job in [one["pid"] for one in notice["holders"]]
    assert not Path("started").exists()
    send(job, signal.SIGUSR1)
    ended(held, 0)


def test_an_ignored_stop_signal_does_not_end_the_wait(here: Path, fifo: Fifo) -> None:
    held, job = holder(fifo)
    waiting = waiter("echo", "ran", preexec_fn=at_entry(ignored={signal.SIGHUP}))
    waiting.send_signal(signal.SIGHUP)
    send(job, signal.SIGUSR1)
    assert ended(waiting, 0).stdout == b"ran\n"
    ended(held, 0)


def test_other_signals_of_the_wait_reach_the_job(here: Path, fifo: Fifo, fifo_of_next: Fifo) -> None:
    """And the timer of the wait does not."""
    held, job = holder(fifo)
    waiting = waiter(*PROBE, fifo_of_next.path, "echo", "say:{pid}", "wait", preexec_fn=at_entry(blocked={signal.SIGUSR2}))
    waiting.send_signal(signal.SIGUSR2)
    send(job, signal.SIGUSR1)
    ended(held, 0)
    second = int(fifo_of_next.line())
    until(lambda: re.search(r"ShdPnd:\t0*800$", Path(f"/proc/{second}/status").read_text(), re.MULTILINE))
    time.sleep(0.3)  # three ticks, if the timer still ran
    assert fifo_of_next.silent()
    send(second, signal.SIGKILL)
    ended(waiting, 137)


@pytest.mark.parametrize("way", ("rm", "mv", "replaced"))
def test_a_waiter_goes_back_to_the_path(here: Path, fifo: Fifo, fifo_of_next: Fifo, way: str) -> None:
    """It has won the lock of a file that nobody else will look at; a third run must find the one that counts held."""
    held, job = holder(fifo)
    old = os.stat("lock").st_ino
    waiting = waiter(*PROBE, fifo_of_next.path, "on:USR1=0", "say:{pid}", "wait")
    if way == "mv":
        os.rename("lock", "aside")
    else:
        os.link("lock", "aside")  # or its inode number might be given to the next file
        os.unlink("lock")
    if way == "replaced":
        Path("lock").touch(0o600)
    send(job, signal.SIGUSR1)
    second = int(fifo_of_next.line())
    assert os.stat("lock").st_ino != old
    assert single("lock", "true", code=75).stderr == BUSY
    send(second, signal.SIGUSR1)
    ended(waiting, 0)
    ended(held, 0)


def test_many_waiters_each_get_their_turn(here: Path, fifo: Fifo) -> None:
    held, job = holder(fifo)
    script = "mkdir alone && echo $0 >>order && rmdir alone"
    waiters = [waiter("sh", "-c", script, str(number)) for number in range(20)]
    send(job, signal.SIGUSR1)
    for waiting in waiters:
        assert ended(waiting, 0).stderr == b""
    assert sorted(map(int, Path("order").read_text().split())) == list(range(20))
    ended(held, 0)


def test_runs_one_after_another_by_eight_loops(here: Path) -> None:
    """Two at once would find the folder there."""
    run = f"{SINGLE} --lock lock --wait-ms {WEEK_MS} -- sh -c 'mkdir alone && rmdir alone'"
    script = f"for i in $(seq {LOOPS}); do {run} || exit; done"
    loops = [started("sh", "-c", script) for _ in range(8)]
    for loop in loops:
        assert ended(loop, 0).stderr == b""


def test_a_waiter_sleeps(here: Path, fifo: Fifo) -> None:
    """It looks up some ten times a second for signals, and never polls the lock: the kernel wakes it."""
    held, job = holder(fifo)
    waiting = waiter("true")
    assert state(waiting.pid) == "S"
    time.sleep(0.5)
    switches = re.search(r"voluntary_ctxt_switches:\t(\d+)", Path(f"/proc/{waiting.pid}/status").read_text())
    assert switches and int(switches[1]) < 200
    send(job, signal.SIGUSR1)
    ended(waiting, 0)
    ended(held, 0)
