"""--plan shows the schedule and runs nothing; --verbose tells people what happens, and changes nothing else."""

import os
import re
import signal
from pathlib import Path

import pytest
from conftest import PROBE, RETRY, RETRY_75, Fifo, ended, failed, run_cli, started

PLAN = (RETRY, "--retry-code", "75", "--plan")
PLANS = (  # options, the rows, the longest total
    (("--max-attempts", "1"), ["1 0 0 0"], "no limit"),
    ((), ["1 0 0 0", "2 1000 1000 no limit", "3 2000 3000 no limit"], "no limit"),
    (
        ("--jitter", "full", "--attempt-timeout-ms", "1000", "--kill-after-ms", "0"),
        ["1 0 0 0", "2 0 to 1000 0 to 1000 2000", "3 0 to 2000 0 to 3000 5000"],
        "6000, with Retry-After hints 63000",
    ),
    (
        ("--jitter", "equal", "--max-attempts", "2", "--initial-delay-ms", "7"),
        ["1 0 0 0", "2 4 to 7 4 to 7 no limit"],
        "no limit",
    ),
    (("--max-elapsed-ms", "1000"), ["1 0 0 0", "2 never: no time is left"], "6000, with Retry-After hints 6000"),
)


@pytest.mark.parametrize("command", ((), ("--", "touch", "started")))
@pytest.mark.parametrize(("options", "rows", "total"), PLANS)
def test_the_plan(tmp_path: Path, options: tuple[str, ...], rows: list[str], total: str, command: tuple[str, ...]) -> None:
    done = run_cli(*PLAN, *options, *command, cwd=tmp_path, code=0)
    _, *shown, last = done.stdout.decode().splitlines()
    assert [" ".join(row.split()) for row in shown] == rows
    assert last.startswith(f"longest total, ms: {total}") and done.stderr == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("redirection", (">/dev/full", ">&-"))
def test_a_plan_that_nobody_gets(redirection: str) -> None:
    run_cli("sh", "-c", f'"$@" {redirection}', "sh", *PLAN, code=125)


def test_a_plan_whose_reader_has_left() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run_cli(*PLAN, stdout=writer, code=141).stderr == b""
    os.close(writer)


def test_the_plan_is_checked_too() -> None:
    assert b"--initial-delay-ms" in run_cli(*PLAN, "--initial-delay-ms", "50000", code=2).stderr


def notes(stderr: bytes) -> list[str]:
    return re.findall(r"^retry_command\.py: (.*)$", stderr.decode(), re.MULTILINE)


def test_each_thing_as_it_happens(fifo: Fifo) -> None:
    words = ("only:2", "on:USR1=0", "say:ready", "wait")
    between = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    process = started(*RETRY_75, "--verbose", "--", *PROBE, fifo.path, *words)
    assert process.stderr and fifo.line() == "ready"
    lines = [process.stderr.readline() for _ in range(3)]
    assert notes(b"".join(lines)) == [
        "attempt 1 of 3: begins",
        "attempt 1 of 3: exit code 75; the next one in 0 ms",
        "attempt 2 of 3: begins",
    ]
    process.send_signal(signal.SIGUSR1)
    assert notes(ended(process, 0).stderr) == ["attempt 2 of 3: succeeded"]
    os.close(between)


TOLD = (  # options, the job, exit code, the last notes
    ((), "exit 65", 65, ["attempt 1 of 3: exit code 65; no other attempt"]),
    ((), "kill -KILL $$", 137, ["attempt 1 of 3: exit code 137; no other attempt"]),
    (
        ("--attempt-timeout-ms", "1000", "--kill-after-ms", "50"),
        "trap '' TERM; sleep 60",
        124,
        [
            "SIGTERM to what runs of the attempt",
            "the grace is over: SIGKILL",
            "attempt 1 of 3: out of time; no other attempt",
        ],
    ),
    (("--max-output-bytes", "1"), "echo abc", 125, ["attempt 1 of 3: too much output; no other attempt"]),
    ((), "kill -HUP $PPID; exec sleep 60", 129, ["told to stop by SIGHUP: no further attempt"]),
)


@pytest.mark.parametrize("stream", ((), ("--stream-stderr",)))
@pytest.mark.parametrize(("options", "job", "code", "last"), TOLD)
def test_what_is_told(options: tuple[str, ...], job: str, code: int, last: list[str], stream: tuple[str, ...]) -> None:
    plain = run_cli(*RETRY_75, *options, *stream, "--", "sh", "-c", job, code=code)
    done = run_cli(*RETRY_75, *options, *stream, "--verbose", "--", "sh", "-c", job, code=code)
    assert set(last) <= set(notes(done.stderr)) and done.stdout == plain.stdout
    assert re.sub(rb"(?m)^retry_command\.py: .*\n", b"", done.stderr) == plain.stderr


def test_it_shows_no_argument() -> None:
    assert b"secret" not in run_cli(*RETRY_75, "--verbose", "--", "sh", "-c", "exit 75", "secret", code=75).stderr


def test_a_note_begins_a_line(fifo: Fifo) -> None:
    job = ("sh", "-c", "printf a >&2; exit 75")
    done = run_cli(*RETRY_75, "--verbose", "--stream-stderr", "--max-attempts", "1", "--", *job, code=75)
    assert done.stderr.split(b"\n")[1:3] == [b"a", failed(75, max_attempts=1).strip()]


@pytest.mark.parametrize(("job", "code"), (("exit 0", 0), ("echo a", 0), ("exit 75", 75), ("echo a >&2", 125)))
def test_notes_that_nobody_gets_change_nothing(job: str, code: int) -> None:
    run_cli("sh", "-c", '"$@" 2>/dev/full', "sh", *RETRY_75, "--verbose", "--", "sh", "-c", job, code=code)
