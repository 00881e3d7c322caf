"""How long: an attempt's time-out ends its whole tree, the budget bounds attempts and waits, a hint raises a wait."""

import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_S, PROBE, RETRY, Fifo, ended, event, failed, run_cli, send, started, state

TIMED_OUT = {"returncode": 124, "timed_out": True}
LIMITED = (RETRY, "--retry-code", "124", "--attempt-timeout-ms", "1200", "--initial-delay-ms", "0", "--max-attempts", "2")


def timed_out(attempt: int, next_delay_ms: int | None = None, max_attempts: int = 2) -> bytes:
    again = {"retrying": False} if next_delay_ms is None else {"retrying": True, "next_delay_ms": next_delay_ms}
    return event("attempt_failed", attempt=attempt, max_attempts=max_attempts, **TIMED_OUT, **again)


HANGING = (  # the job, as the probe's words
    "say:{pid} wait",
    "ignore:TERM say:{pid} wait",
    "ignore:TERM fork say:{pid} wait",
    "say:{pid} stop wait",
    "ignore:TERM fork say:{pid} stop wait",
    "say:{pid} on:TERM=0 wait",  # a success now comes too late
    "say:{pid} on:TERM=65 wait",
)


@pytest.mark.parametrize("words", HANGING)
def test_the_whole_tree_is_gone_before_the_next_attempt(fifo: Fifo, words: str) -> None:
    first = shlex.join((*PROBE, fifo.path, *words.split()))
    second = shlex.join((*PROBE, fifo.path, "on:USR1=0", "say:second", "wait"))
    job = ("sh", "-c", f"[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exec {first}; exec {second}")
    between = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    process = started(*LIMITED, "--attempt-timeout-ms", "2500", "--kill-after-ms", "100", "--", *job)
    said = []
    while "second" not in said:
        said.append(fifo.line())
    pids = [int(line.removeprefix("child ")) for line in said if line[-1].isdigit()]
    assert pids and [pid for pid in pids if state(pid) != "Z"] == []
    process.send_signal(signal.SIGUSR1)
    assert ended(process, 0).stderr == b""
    os.close(between)
    assert "got SIGUSR1" in fifo.until_gone()


@pytest.mark.parametrize("stop", ("STOP", "TSTP", "TTIN", "TTOU"))
def test_a_stopped_job_ends_at_its_time_out(stop: str) -> None:
    done = run_cli(*LIMITED, "--", "sh", "-c", f"kill -{stop} $$; sleep {HANG_S}", code=124, start_new_session=stop != "STOP")
    assert done.stderr == timed_out(1, 0) + timed_out(2)


def test_a_job_that_forks_as_it_dies(tmp_path: Path) -> None:
    job = f"trap 'sleep {HANG_S} & echo $! >>pids; exit 1' TERM; sleep {HANG_S} & echo $! >>pids; wait"
    run_cli(*LIMITED, "--kill-after-ms", "100", "--", "sh", "-c", job, cwd=tmp_path, code=124)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4 and not [pid for pid in pids if state(pid) != "Z"]


@pytest.mark.parametrize("grace_ms", ("0", "300"))
def test_the_grace_is_the_jobs(fifo: Fifo, grace_ms: str) -> None:
    words = ("echo", "say:ready", "wait")
    begin = time.monotonic()
    done = run_cli(*LIMITED, "--max-attempts", "1", "--kill-after-ms", grace_ms, "--", *PROBE, fifo.path, *words, code=124)
    assert time.monotonic() - begin >= 1.2 + int(grace_ms) / 1000
    assert done.stderr == timed_out(1, max_attempts=1)
    assert grace_ms == "0" or sorted(fifo.until_gone()) == ["got SIGCONT", "got SIGTERM", "ready"]  # one handler in the other


@pytest.mark.parametrize(("more", "order"), (((), "event first"), (("--stream-stderr",), "as it came")))
def test_what_it_printed_before_is_told(more: tuple[str, ...], order: str) -> None:
    done = run_cli(*LIMITED, *more, "--", "sh", "-c", f"echo lost; echo kept >&2; exec sleep {HANG_S}", code=124)
    texts = [b"kept\n", b"kept\n"]
    events = [timed_out(1, 0), timed_out(2)]
    pairs = zip(events, texts, strict=True) if order == "event first" else zip(texts, events, strict=True)
    assert done.stdout == b"" and done.stderr == b"".join(b"".join(pair) for pair in pairs)


def test_only_a_listed_124_is_retried() -> None:
    done = run_cli(RETRY, "--retry-code", "75", "--attempt-timeout-ms", "50", "--", "sleep", str(HANG_S), code=124)
    assert done.stderr == timed_out(1, max_attempts=3)


def test_a_jobs_own_124_has_not_timed_out() -> None:
    done = run_cli(*LIMITED, "--", "sh", "-c", "exit 124", code=124)
    assert done.stderr == failed(124, 1, 0, 2) + failed(124, 2, max_attempts=2)


def test_a_job_in_time_is_a_success() -> None:
    job = "[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exec sleep 60; echo done"
    done = run_cli(*LIMITED, "--attempt-timeout-ms", "2000", "--", "sh", "-c", job, code=0)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


def test_a_success_leaves_its_background_alone_also_with_a_time_out(fifo: Fifo) -> None:
    run_cli(*LIMITED, "--attempt-timeout-ms", "5000", "--", *PROBE, fifo.path, "leave:0", "say:{pid}", "wait", code=0)
    os.kill(int(fifo.line()), signal.SIGKILL)


def test_a_stop_signal_in_the_grace_of_a_time_out(fifo: Fifo) -> None:
    words = ("echo", "say:ready", "wait")
    process = started(*LIMITED, "--kill-after-ms", "600000", "--", *PROBE, fifo.path, *words)
    assert sorted(fifo.line() for _ in range(3)) == ["got SIGCONT", "got SIGTERM", "ready"]
    process.send_signal(signal.SIGHUP)
    assert fifo.line() == "got SIGHUP"
    time.sleep(1.1)  # a further one, not the same
    process.send_signal(signal.SIGHUP)
    assert ended(process, 129).stderr == timed_out(1) + event("interrupted", kind="sighup")


def test_a_time_out_in_the_grace_of_a_stop_signal(fifo: Fifo) -> None:
    """The job was told already; its clean-up is not cut, and an end with 0 is a success."""
    words = ("on:USR1=0", "echo", "on:USR1=0", "say:ready", "wait")
    process = started(*LIMITED, "--", *PROBE, fifo.path, *words)
    fifo.line()
    process.send_signal(signal.SIGTERM)
    assert fifo.line() == "got SIGTERM"
    time.sleep(1.3)
    process.send_signal(signal.SIGUSR1)
    assert ended(process, 0).stderr == b"" and fifo.until_gone() == ["got SIGUSR1"]


def events_of(stderr: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith(b"{")]


def test_no_wait_ends_past_the_budget() -> None:
    options = ("--max-attempts", "10", "--initial-delay-ms", "2000", "--max-elapsed-ms", "5000")
    done = run_cli(RETRY, "--retry-code", "75", *options, "--", "sh", "-c", "exit 75", code=75)
    assert [line.get("next_delay_ms") for line in events_of(done.stderr)] == [2000, None]  # 2000 + 4000 is too much


def test_the_running_attempt_is_cut_at_the_budget() -> None:
    options = ("--retry-code", "75,124", "--initial-delay-ms", "100", "--max-elapsed-ms", "3000")
    job = f"[ $RETRY_WRAPPER_ATTEMPT = 2 ] && exec sleep {HANG_S}; exit 75"
    begin = time.monotonic()
    done = run_cli(RETRY, *options, "--", "sh", "-c", job, code=124)
    assert time.monotonic() - begin >= 3
    assert done.stderr == failed(75, 1, 100) + timed_out(2, max_attempts=3)


def test_the_earlier_of_both_limits_counts() -> None:
    options = ("--retry-code", "124", "--attempt-timeout-ms", "100", "--max-elapsed-ms", "60000", "--initial-delay-ms", "0")
    done = run_cli(RETRY, *options, "--", "sleep", str(HANG_S), code=124)
    assert done.stderr == timed_out(1, 0, 3) + timed_out(2, 0, 3) + timed_out(3, max_attempts=3)


def test_the_job_is_told_what_remains() -> None:
    options = ("--retry-code", "75", "--initial-delay-ms", "50", "--max-elapsed-ms", "60000")
    job = ("sh", "-c", "echo $RETRY_WRAPPER_REMAINING_MS >&2; exit 75")
    remaining = [int(line) for line in run_cli(RETRY, *options, "--", *job, code=75).stderr.splitlines() if line.isdigit()]
    assert (
        len(remaining) == 3
        and remaining[0] <= 60_000
        and remaining[0] - 50 >= remaining[1]
        and remaining[1] - 100 >= remaining[2] > 0
    )
    assert run_cli(RETRY, "--retry-code", "75", "--", "sh", "-c", "env | grep -c REMAINING", code=1).stdout == b""


def test_a_run_that_was_stopped_past_its_budget_ends_as_its_last_attempt_did(fifo: Fifo) -> None:
    options = ("--stream-stderr", "--retry-code", "75", "--initial-delay-ms", "2000", "--max-elapsed-ms", "6000")
    process = started(RETRY, *options, "--", *PROBE, fifo.path, "say:{attempt}", "exit:75")
    assert process.stderr and process.stderr.readline() == failed(75, 1, 2000)  # the wait has begun
    send(process.pid, signal.SIGSTOP)
    time.sleep(6)
    send(process.pid, signal.SIGCONT)
    assert ended(process, 75).stderr == b"" and fifo.until_gone() == ["1"]


HINTS = (  # what the job does with the file, options, the next delay
    ('echo 0.2 >"$F"', (), 200),
    ('printf " 0.05 " >"$F"', (), 50),
    ('echo 7 >"$F"', ("--max-delay-ms", "60"), 60),
    ('echo 0.001 >"$F"', ("--initial-delay-ms", "20"), 20),
    ('echo soon >"$F"', (), 10),
    ('echo "Wed, 21 Oct 2026 07:28:00 GMT" >"$F"', (), 10),
    (': >"$F"', (), 10),
    ('head -c 100000 /dev/zero >"$F"', (), 10),
    ('echo 5 >"$F"; : >"$F"', (), 10),
    ('rm -f "$F"', (), 10),
)


@pytest.mark.parametrize(("job", "more", "delay_ms"), HINTS)
def test_a_hint_raises_the_next_wait_alone(job: str, more: tuple[str, ...], delay_ms: int) -> None:
    script = f"F=$RETRY_WRAPPER_RETRY_AFTER_FILE; [ $RETRY_WRAPPER_ATTEMPT = 1 ] && {{ {job}; }} 2>/dev/null; exit 75"
    begin = time.monotonic()
    done = run_cli(RETRY, "--retry-code", "75", "--initial-delay-ms", "10", *more, "--", "sh", "-c", script, code=75)
    delays = [line.get("next_delay_ms") for line in events_of(done.stderr)]
    base_ms = int(dict(zip(more[::2], more[1::2], strict=True)).get("--initial-delay-ms", 10))
    assert delays == [delay_ms, 2 * base_ms, None]
    assert time.monotonic() - begin >= (delay_ms + 2 * base_ms) / 1000


def test_a_hint_beyond_the_budget_ends_the_run() -> None:
    options = ("--retry-code", "75", "--initial-delay-ms", "0", "--max-elapsed-ms", "5000")
    job = ("sh", "-c", "echo 20 >$RETRY_WRAPPER_RETRY_AFTER_FILE; exit 75")
    assert run_cli(RETRY, *options, "--", *job, code=75).stderr == failed(75)


@pytest.mark.parametrize("jitter", ("none", "full", "equal"))
def test_what_the_event_says_is_slept(jitter: str) -> None:
    options = ("--initial-delay-ms", "30", "--max-attempts", "5", "--max-delay-ms", "100", "--jitter", jitter)
    begin = time.monotonic()
    done = run_cli(RETRY, "--retry-code", "75", *options, "--", "sh", "-c", "exit 75", code=75)
    delays = [line["next_delay_ms"] for line in events_of(done.stderr)[:-1]]
    assert time.monotonic() - begin >= sum(delays) / 1000
    lowest = {"none": 1, "full": 0, "equal": 0.5}[jitter]
    assert all(lowest * base <= delay <= base for delay, base in zip(delays, (30, 60, 100, 100), strict=True))


BOUNDS = (
    ("--max-elapsed-ms", "0"),
    ("--attempt-timeout-ms", "0"),
    ("--attempt-timeout-ms", "604800001"),
    ("--max-elapsed-ms", "1.5"),
)


@pytest.mark.parametrize(("option", "value"), (*BOUNDS, ("--jitter", "Full"), ("--jitter", ""), ("--jitter", "decorrelated")))
def test_refused(option: str, value: str) -> None:
    assert option.encode() in run_cli(RETRY, "--retry-code", "75", option, value, "--", "true", code=2).stderr
