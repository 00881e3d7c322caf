"""Signals: each reaches the job once, a stop signal ends the run and leaves nobody behind, a failed attempt likewise."""

import os
import select
import shlex
import signal
import time
from pathlib import Path

import pytest
from conftest import (
    HANG_S,
    IN_ITS_OWN_GROUP,
    ISOLATED,
    PROBE,
    RETRY,
    RETRY_75,
    UNSHARE,
    Fifo,
    at_entry,
    children,
    ended,
    event,
    failed,
    needs_namespaces,
    needs_strace,
    run_cli,
    started,
    state,
    until,
    until_backoff,
    until_stopped,
)
from probe import signal_name

WEEK_MS = str(7 * 24 * 3600 * 1000)  # a grace that no test lives to see the end of
STOPS = (
    (signal.SIGTERM, "sigterm"),
    (signal.SIGHUP, "sighup"),
    (signal.SIGINT, "keyboard_interrupt"),
    (signal.SIGQUIT, "sigquit"),
)
STOP_NUMBERS = {number for number, _ in STOPS}
NOT_FORWARDED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}  # the last two: lost to Python


def test_every_other_signal_reaches_the_job_once(fifo: Fifo) -> None:
    process = started(*RETRY_75, "--kill-after-ms", "0", "--", *PROBE, fifo.path, "echo", "say:ready", "wait")
    assert fifo.line() == "ready"
    for number in sorted(signal.valid_signals() - NOT_FORWARDED - STOP_NUMBERS):
        process.send_signal(number)
        assert fifo.line() == f"got {signal_name(number)}"
    process.kill()
    ended(process)


@pytest.mark.parametrize(("number", "kind"), STOPS)
def test_a_stop_signal_ends_the_run(fifo: Fifo, number: signal.Signals, kind: str) -> None:
    """It reaches the job once; the code that the job ends with is listed, but no further attempt is made."""
    job = (*PROBE, fifo.path, f"on:{number.name[3:]}=75", "out:x", "err:y", "say:ready", "wait")
    process = started(*RETRY_75, "--kill-after-ms", WEEK_MS, "--", *job)
    assert fifo.line() == "ready"
    process.send_signal(number)
    done = ended(process, 128 + number)
    assert (done.stdout, done.stderr) == (b"", failed(75) + b"y\n" + event("interrupted", kind=kind))
    assert fifo.until_gone() == [f"got {number.name}"]


@pytest.mark.parametrize(("number", "kind"), STOPS)
def test_a_job_that_dies_of_the_stop_signal(number: signal.Signals, kind: str) -> None:
    job = ("sh", "-c", f"kill -{number.value} $PPID; exec sleep 1000")
    done = run_cli(*RETRY_75, "--kill-after-ms", WEEK_MS, "--", *job, code=128 + number)
    assert (done.stdout, done.stderr) == (b"", failed(-number) + event("interrupted", kind=kind))


@pytest.mark.parametrize(("number", "kind"), STOPS)
def test_a_job_that_succeeds_nevertheless(fifo: Fifo, number: signal.Signals, kind: str) -> None:
    job = (*PROBE, fifo.path, f"on:{number.name[3:]}=0", "out:x", "err:y", "say:ready", "wait")
    process = started(*RETRY_75, "--kill-after-ms", WEEK_MS, "--", *job)
    assert fifo.line() == "ready"
    process.send_signal(number)
    done = ended(process, 130 if number == signal.SIGINT else 0)
    if number == signal.SIGINT:
        assert done.stdout == b"" and done.stderr.endswith(b"y\n" + event("interrupted", kind=kind))
    else:
        assert (done.stdout, done.stderr) == (b"x", b"y")


@pytest.mark.parametrize(("number", "kind"), STOPS)
def test_a_stop_signal_ends_the_wait(fifo: Fifo, number: signal.Signals, kind: str) -> None:
    options = ("--retry-code", "75", "--initial-delay-ms", "60000", "--max-delay-ms", "60000")
    process = started(RETRY, *options, "--", *PROBE, fifo.path, "say:ready", "exit:75")
    assert fifo.until_gone() == ["ready"]
    until_backoff(process.pid)
    process.send_signal(number)
    process.wait(HANG_S / 3)  # not at the end of the delay
    done = ended(process, 128 + number)
    assert (done.stdout, done.stderr) == (b"", failed(75, 1, 60000) + event("interrupted", kind=kind))
    assert fifo.until_gone() == []


@pytest.mark.parametrize("kill_after_ms", ("0", "100"))
def test_a_job_that_ignores_it_is_killed_after_the_grace(fifo: Fifo, kill_after_ms: str) -> None:
    job = (*PROBE, fifo.path, "ignore:TERM", "fork", "say:ready", "wait")
    process = started(*RETRY_75, "--kill-after-ms", kill_after_ms, "--", *job)
    assert sorted(fifo.line()[:5] for _ in range(3)) == ["child", "ready", "ready"]
    begin_s = time.monotonic()
    process.terminate()
    assert ended(process, 143).stderr == failed(-9) + event("interrupted", kind="sigterm")
    assert time.monotonic() - begin_s >= int(kill_after_ms) / 1000
    assert fifo.until_gone() == []


@pytest.mark.parametrize(("number", "code"), ((signal.SIGTERM, 143), (signal.SIGINT, 130)))
def test_the_grace_ends_with_a_later_stop_signal(fifo: Fifo, number: signal.Signals, code: int) -> None:
    """One within a moment is the same stop, told twice: by a supervisor that signals every process of a tree."""
    process = started(*RETRY_75, "--kill-after-ms", WEEK_MS, "--", *PROBE, fifo.path, "echo", "say:ready", "wait")
    assert fifo.line() == "ready"
    begin_s = time.monotonic()
    for sent in (number, number, signal.SIGUSR1):
        process.send_signal(sent)
        assert fifo.line() == f"got {sent.name}"
    time.sleep(max(0, begin_s + 1.1 - time.monotonic()))
    process.send_signal(signal.SIGTERM)
    assert failed(-9) in ended(process, code).stderr
    assert fifo.until_gone() in ([], ["got SIGTERM"])


@pytest.mark.parametrize("parent", ((), IN_ITS_OWN_GROUP), ids=("orphaned", "own group"))
@pytest.mark.parametrize(
    ("number", "code", "stderr"),
    ((signal.SIGTERM, 143, failed(-15) + event("interrupted", kind="sigterm")), (signal.SIGCONT, 7, failed(7))),
)
def test_a_stopped_job_where_no_terminal_is(
    fifo: Fifo, parent: tuple[str, ...], number: signal.Signals, code: int, stderr: bytes
) -> None:
    """Nobody would continue us, so we must not stop with it: SIGTERM to us ends it, after a SIGCONT to it alone we go on."""
    job = (*PROBE, fifo.path, "say:{pid}", "stop", "exit:7")
    process = started(*parent, *RETRY_75, "--kill-after-ms", WEEK_MS, "--", *job, start_new_session=True)
    pid = int(fifo.line())
    until_stopped(pid)
    (wrapper,) = children(process.pid) if parent else (process.pid,)
    os.kill(wrapper if number == signal.SIGTERM else pid, number)
    assert ended(process, code).stderr == stderr
    assert fifo.until_gone() == []


def test_a_job_that_joins_our_group(fifo: Fifo) -> None:
    """It is told and, after the grace, killed all the same."""
    job = (*PROBE, fifo.path, "join", "echo", "say:{pgid}", "wait")
    process = started(*RETRY_75, "--kill-after-ms", "100", "--", *job, preexec_fn=os.setpgrp)
    assert int(fifo.line()) == process.pid
    process.terminate()
    assert ended(process, 143).stderr == failed(-9) + event("interrupted", kind="sigterm")
    assert fifo.until_gone() == ["got SIGTERM"]


@needs_strace
def test_ctrl_c_between_a_success_and_its_delivery(tmp_path: Path) -> None:
    """While the terminal would be taken back."""
    delay = ("-P", "/dev/tty", "-e", "inject=openat:delay_enter=300000:when=2")
    process = started("strace", "-qq", "-o", tmp_path / "trace", *delay, *ISOLATED, *RETRY_75, "--", "echo", "x")
    until(lambda: (tmp_path / "trace").exists() and (tmp_path / "trace").read_text().count("openat(") == 2)
    (wrapper,) = children(process.pid)
    os.kill(wrapper, signal.SIGINT)
    done = ended(process, 130)
    assert (done.stdout, done.stderr) == (b"", event("interrupted", kind="keyboard_interrupt"))


@pytest.mark.parametrize("number", (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1))
def test_a_signal_ignored_at_entry_stays_so_for_both(fifo: Fifo, number: signal.Signals) -> None:
    job = (*PROBE, fifo.path, "on:TERM=75", "say:{pid}", "wait")
    process = started(*RETRY_75, "--", *job, preexec_fn=at_entry({number}))
    os.kill(int(fifo.line()), number)
    process.send_signal(number)
    process.terminate()
    assert ended(process, 143).stderr == failed(75) + event("interrupted", kind="sigterm")
    assert fifo.until_gone() == ["got SIGTERM"]


def test_a_signal_ignored_at_entry_ends_no_wait(fifo: Fifo) -> None:
    options = ("--retry-code", "75", "--initial-delay-ms", "300")
    job = (*PROBE, fifo.path, "say:{attempt}", "only:2")
    process = started(RETRY, *options, "--", *job, preexec_fn=at_entry({signal.SIGHUP, signal.SIGINT}))
    assert fifo.line() == "1"
    for number in (signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
    ended(process, 0)
    assert fifo.line() == "2"


def test_term_blocked_at_entry(fifo: Fifo) -> None:
    """The job keeps the mask that it would have had, and so does not notice; we do."""
    job = (*PROBE, fifo.path, "on:TERM=75", "say:ready", "wait")
    process = started(*RETRY_75, "--kill-after-ms", "100", "--", *job, preexec_fn=at_entry(blocked={signal.SIGTERM}))
    assert fifo.line() == "ready"
    process.terminate()
    assert ended(process, 143).stderr == failed(-9) + event("interrupted", kind="sigterm")
    assert fifo.until_gone() == []


# What an attempt leaves behind

# What the child does, the grace in ms, what it says at its end. A stopped one gets HUP and CONT from the kernel, too, as its
# group is orphaned when the job ends (POSIX, _exit).
LEFT: tuple[tuple[str, str, list[str]], ...] = (
    ("wait", WEEK_MS, []),
    ("on:TERM=0 wait", WEEK_MS, ["got SIGTERM"]),
    ("ignore:TERM wait", "100", []),
    ("ignore:TERM ignore:HUP ignore:INT wait", "0", []),
    ("stop wait", WEEK_MS, []),
    ("on:TERM=0 ignore:HUP stop wait", WEEK_MS, ["got SIGTERM"]),
    ("ignore:TERM ignore:HUP stop wait", "100", []),
    ("fork fork wait", WEEK_MS, []),
)


@pytest.mark.parametrize(("words", "grace_ms", "last_words"), LEFT)
def test_the_next_attempt_starts_alone(fifo: Fifo, words: str, grace_ms: str, last_words: list[str]) -> None:
    first = shlex.join((*PROBE, fifo.path, "leave:75", "say:{pid}", *words.split()))
    second = shlex.join((*PROBE, fifo.path, "on:USR1=0", "say:second", "wait"))
    job = ("sh", "-c", f"[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exec {first}; exec {second}")
    between = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    process = started(*RETRY_75, "--kill-after-ms", grace_ms, "--", *job)
    said = []
    while "second" not in said:
        said.append(fifo.line())
    left = [int(line.removeprefix("child ")) for line in said if line[-1].isdigit()]
    assert [pid for pid in left if state(pid) != "Z"] == []
    assert [line for line in said[:-1] if not line[-1].isdigit()] == last_words
    process.send_signal(signal.SIGUSR1)
    ended(process, 0)
    os.close(between)
    assert fifo.until_gone() == ["got SIGUSR1"]


@pytest.mark.parametrize(("words", "grace_ms", "last_words"), LEFT)
def test_a_failed_run_leaves_nobody(fifo: Fifo, words: str, grace_ms: str, last_words: list[str]) -> None:
    job = (*PROBE, fifo.path, "leave:65", "say:{pid}", *words.split())
    run_cli(*RETRY_75, "--kill-after-ms", grace_ms, "--", *job, code=65)
    left, *said = fifo.until_gone()
    assert state(int(left)) == "Z"
    assert [line for line in said if line.startswith("got")] == last_words


def test_a_stopped_run_leaves_nobody(fifo: Fifo) -> None:
    """The job goes at once, its child not without force."""
    child = shlex.join((*PROBE, fifo.path, "ignore:TERM", "say:ready", "wait"))
    process = started(*RETRY_75, "--kill-after-ms", "100", "--", "sh", "-c", f"trap 'exit 75' TERM; {child} & wait")
    assert fifo.line() == "ready"
    process.terminate()
    assert ended(process, 143).stderr == failed(75) + event("interrupted", kind="sigterm")
    assert fifo.until_gone() == []


def test_a_success_leaves_its_background_alone(fifo: Fifo) -> None:
    run_cli(*RETRY_75, "--kill-after-ms", "0", "--", *PROBE, fifo.path, "leave:0", "echo", "say:{pid}", "wait", code=0)
    pid = int(fifo.line())
    assert fifo.silent()  # no signal, no end
    os.kill(pid, signal.SIGUSR1)
    assert fifo.line() == "got SIGUSR1"


def test_an_early_stop_leaves_no_survivor() -> None:
    """At whatever moment of its first 100 ms: nobody has the pipe that we and the job inherit."""
    for round_number in range(30):
        reader, writer = os.pipe()
        process = started(*RETRY_75, "--", "sleep", "1000", pass_fds=(writer,))
        os.close(writer)
        time.sleep(round_number * 0.1 / 30)
        process.send_signal((signal.SIGTERM, signal.SIGINT)[round_number % 2])
        ended(process)
        assert process.returncode in (-15, 143, 1, -2, 130)  # Python itself is interrupted with 1 or -2
        readable, _, _ = select.select([reader], [], [], HANG_S)
        assert readable and os.read(reader, 1) == b""
        os.close(reader)


@pytest.mark.parametrize(
    ("stream", "job", "codes"),
    (
        ("stdout", "head -c 5000000 /dev/zero", {143}),
        ("stderr", "head -c 5000000 /dev/zero >&2", {143}),
        ("stderr", "head -c 5000000 /dev/zero >&2; exit 65", {65, 143}),
    ),
)
@pytest.mark.parametrize("blocking", (True, False))
def test_a_caller_that_does_not_read_cannot_hold_us(stream: str, job: str, codes: set[int], blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    streams = {"stdout": -3, "stderr": -3, stream: writer}
    process = started(*RETRY_75, "--kill-after-ms", "0", "--", "sh", "-c", job, **streams)
    os.close(writer)
    assert len(os.read(reader, 1)) == 1  # it delivers
    process.terminate()
    assert process.wait(HANG_S) in codes
    os.close(reader)


LAST_PID = "/proc/sys/kernel/ns_last_pid"


@needs_namespaces
@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="needs a choice of process ids")
def test_the_proc_of_another_namespace_is_not_believed() -> None:
    """A living group there has the number of the first attempt's."""
    other = started("sleep", "1000", preexec_fn=os.setpgrp)
    namespace = [word for word in UNSHARE if word != "--mount-proc"]
    choice = ("sh", "-c", f'echo {other.pid - 1} >{LAST_PID} && exec "$@"', "sh")
    job = f"[ $RETRY_WRAPPER_ATTEMPT != 1 ] || [ $$ = {other.pid} ] || exit 99; exit 75"
    try:
        done = run_cli(*namespace, *choice, *RETRY_75, "--", "sh", "-c", job, code=75)
    finally:
        other.kill()
        ended(other)
    assert done.stderr == failed(75, 1, 0) + failed(75, 2, 0) + failed(75, 3)


# As PID 1


@needs_namespaces
@pytest.mark.parametrize(
    ("job", "code", "stderr"),
    (
        ("exit 0", 0, b""),
        ("exit 65", 65, failed(65)),
        ("exit 75", 75, failed(75, 1, 0) + failed(75, 2, 0) + failed(75, 3)),
        ("kill -TERM $$", 143, failed(-15)),
        ("kill -TERM 1; exec sleep 1000", 143, failed(-15) + event("interrupted", kind="sigterm")),
        ("kill -INT 1; exec sleep 1000", 130, failed(-2) + event("interrupted", kind="keyboard_interrupt")),
        ("(true & echo $! >$0); while [ -d /proc/$(cat $0) ]; do sleep 0.01; done", 0, b""),  # an orphan ends and goes
    ),
)
def test_as_pid_1(tmp_path: Path, job: str, code: int, stderr: bytes) -> None:
    assert run_cli(*UNSHARE, *RETRY_75, "--", "sh", "-c", job, tmp_path / "pid", code=code).stderr == stderr


@needs_namespaces
def test_pid_1_reaps_orphans_while_it_waits(fifo: Fifo, tmp_path: Path) -> None:
    for name in ("orphaned", "gate"):
        os.mkfifo(tmp_path / name)
    options = ("--retry-code", "75", "--initial-delay-ms", "60000", "--max-delay-ms", "60000")
    job = "setsid sh -c ': >orphaned; exec cat gate' >/dev/null 2>&1 & : <orphaned; exit 75"
    process = started(*UNSHARE, RETRY, *options, "--", "sh", "-c", job, cwd=tmp_path)
    with open(tmp_path / "gate", "wb"):
        (wrapper,) = children(process.pid)
    until_backoff(wrapper)
    os.kill(wrapper, signal.SIGTERM)
    assert ended(process, 143).stderr == failed(75, 1, 60000) + event("interrupted", kind="sigterm")
