"""single_run.py outside, retry_command.py inside: no second run starts while a process of the job lives, whoever is killed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import PROBE, RETRY, SINGLE, Fifo, children, ended, send, single, started, state, until, users

TERM, KILL = signal.SIGTERM, signal.SIGKILL
LONG_WAIT = ("--initial-delay-ms", "60000", "--max-delay-ms", "60000")
STAGES = (  # name, options, the job (bash, $0 is the FIFO), whether it lives then
    ("running", (), 'trap "" TERM; exec 9>"$0"; echo >&9; exec sleep 600', True),
    ("writing", (), 'trap "" TERM; exec 9>"$0"; echo >&9; while :; do echo 0123456789; done', True),
    ("closing slowly", LONG_WAIT, 'trap "" TERM; exec 9>"$0"; (echo >&9; exec sleep 600) & exit 75', True),
    ("backing off", LONG_WAIT, 'echo >"$0"; exit 75', False),
    ("delivering", (), 'echo >"$0"; head -c 3000000 /dev/zero', False),
)
TREES = (((), 143), (("on:TERM=75",), 143), (("on:TERM=0",), 0), (("on:TERM=0", "fork"), 0), (("fork",), 143))


def nested(*job: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    retry = (RETRY, "--retry-code", "75", "--initial-delay-ms", "1", "--kill-after-ms", "150", *options, "--", *job)
    return started(SINGLE, "--lock", "lock", "--", *retry)


def tree(pid: int) -> list[int]:
    return [pid] + [below for child in children(pid) for below in tree(child)]


def second_run_starts(fifo: Fifo) -> bool:
    """Try one. Where it starts, nobody of the first job may live (who does has the FIFO open)."""
    look = f'find /proc/[0-9]*/fd -lname "{fifo.path}" -not -path "/proc/{os.getpid()}/*" 2>/dev/null; exit 0'
    end = single("lock", "sh", "-c", look)
    assert end.returncode in (0, 75), end
    assert end.stdout == b"", "a second run overlaps the first job"
    return end.returncode == 0


def kill_job_until_free(fifo: Fifo) -> None:
    def free() -> bool:
        if second_run_starts(fifo):
            return True
        for pid in users(fifo.path):
            send(pid, KILL)
        return False

    until(free)


def test_the_lock_is_held_through_attempts_and_waits(here: Path, fifo: Fifo) -> None:
    options = ("--initial-delay-ms", "150", "--backoff-factor", "1")
    run = nested(*PROBE, fifo.path, "say:{attempt}", "only:3", "wait", options=options)
    own_end = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    for attempt in ("1", "2", "3"):
        assert fifo.line() == attempt
        for _ in range(2):
            assert not second_run_starts(fifo)
    run.send_signal(TERM)
    ended(run, 143)
    os.close(own_end)
    assert second_run_starts(fifo)


@pytest.mark.parametrize("number", (TERM, KILL))
@pytest.mark.parametrize("targets", ("inner", "outer", "both"))
@pytest.mark.parametrize(("options", "job", "lives"), [pytest.param(*stage[1:], id=stage[0]) for stage in STAGES])
def test_whoever_is_killed(
    here: Path, fifo: Fifo, options: tuple[str, ...], job: str, lives: bool, targets: str, number: signal.Signals
) -> None:
    run = nested("bash", "-c", job, fifo.path, options=options)
    fifo.line()
    if not lives:
        assert fifo.until_gone() == []
    (inner,) = children(run.pid)
    assert not second_run_starts(fifo)
    for pid in {"inner": (inner,), "outer": (run.pid,), "both": (run.pid, inner)}[targets]:
        send(pid, number)
    if number == KILL:
        for _ in range(2):
            second_run_starts(fifo)
        if state(inner) != "Z":
            send(inner, TERM)
        kill_job_until_free(fifo)
        ended(run, 137 if targets == "inner" else -KILL)
    else:
        until(lambda: second_run_starts(fifo))
        end = ended(run, 143)
        assert end.stderr.count(b'"event":"interrupted"') == 1
    assert fifo.until_gone() == []


@pytest.mark.parametrize("number", (TERM, KILL))
@pytest.mark.parametrize("targets", ("outer", "both"))
def test_killed_while_starting(here: Path, fifo: Fifo, targets: str, number: signal.Signals) -> None:
    for moment in range(6):
        run = nested(*PROBE, fifo.path, "wait")
        time.sleep(moment * 0.03)
        for pid in [run.pid, *(children(run.pid) if targets == "both" else ())]:
            send(pid, number)
        if number == TERM:
            assert ended(run).returncode in (143, -TERM)
            assert second_run_starts(fifo)
        else:
            kill_job_until_free(fifo)
            ended(run, -KILL)


@pytest.mark.parametrize("order", (1, -1), ids=("wrappers first", "job first"))
@pytest.mark.parametrize(("words", "code"), TREES)
def test_term_to_the_whole_tree_at_once(here: Path, fifo: Fifo, words: tuple[str, ...], code: int, order: int) -> None:
    """systemd's control-group mode: no survivor, one clean end. Told before its job, a wrapper tries nothing again."""
    run = nested(*PROBE, fifo.path, "out:some", *words, "say:ready", "wait")
    while fifo.line() != "ready":
        pass
    while "fork" in words and fifo.line() != "ready":
        pass
    for pid in tree(run.pid)[::order]:
        send(pid, TERM)
    end = ended(run, code)
    assert set(fifo.until_gone()) - {"ready"} == ({"got SIGTERM"} if words and words != ("fork",) else set())
    interrupted, retried = (end.stderr.count(text) for text in (b'"event":"interrupted"', b'"retrying":true'))
    assert end.stdout == (b"" if code else b"some")
    if order > 0:  # else a wrapper that is slow to be told may have seen its job fail, and ended or begun to wait
        assert (interrupted, retried) == (bool(code), 0)
    assert second_run_starts(fifo)


def test_a_daemon_of_the_job_holds_the_lock(here: Path, fifo: Fifo) -> None:
    run = nested("bash", "-c", '(echo >"$0"; exec sleep 600) 9>"$0" & exit 0', fifo.path)
    ended(run, 0)
    fifo.line()
    assert not second_run_starts(fifo)
    kill_job_until_free(fifo)


@pytest.mark.parametrize("inner", ((), (RETRY, "--retry-code", "75", "--max-attempts", "1", "--")), ids=("alone", "with a retry"))
def test_what_a_script_has_started_ends_with_it_under_a_retry_only(here: Path, fifo: Fifo, inner: tuple[Path | str, ...]) -> None:
    """TERM to single_run.py goes to the command; its children keep the lock, unless retry_command.py ends all of them."""
    script = ("sh", "-c", '"$@" & wait', "sh", *PROBE, fifo.path, "say:{pid}", "wait")
    run = started(SINGLE, "--lock", "lock", "--", *inner, *script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = int(fifo.line())
    run.send_signal(TERM)
    ended(run, 143)
    assert (state(pid) == "Z") == bool(inner)
    single("lock", "true", code=0 if inner else 75)
