"""single_run.py --shared: readers together, a writer alone, mixed with util-linux flock(1) on the same file."""

import signal
from pathlib import Path

import pytest
from conftest import PROBE, SINGLE, Fifo, ended, run_cli, send, single, started

OURS = {"reader": (SINGLE, "--lock", "lock", "--shared", "--"), "writer": (SINGLE, "--lock", "lock", "--")}
PEERS = {"reader": ("flock", "-s", "-n", "-E", "75", "lock"), "writer": ("flock", "-x", "-n", "-E", "75", "lock")}


@pytest.mark.parametrize("first", ("reader", "writer"))
@pytest.mark.parametrize("second", ("reader", "writer"))
@pytest.mark.parametrize(("one", "other"), ((OURS, OURS), (OURS, PEERS), (PEERS, OURS)), ids=("both", "first", "second"))
def test_who_may_be_there_together(
    here: Path, fifo: Fifo, first: str, second: str, one: dict[str, tuple[object, ...]], other: dict[str, tuple[object, ...]]
) -> None:
    run = started(*one[first], *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait")
    job = int(fifo.line())
    end = run_cli(*other[second], "echo", "ran", code=0 if first == second == "reader" else 75)
    assert end.stdout == (b"ran\n" if end.returncode == 0 else b"")
    send(job, signal.SIGUSR1)
    ended(run, 0)


def test_readers_write_no_record(here: Path) -> None:
    single("lock", "true", code=0)
    record = Path("lock").read_bytes()
    assert run_cli(*OURS["reader"], "cat", "lock", code=0).stdout == record != b""
    Path("new").touch()
    run_cli(SINGLE, "--lock", "new", "-s", "--", "true", code=0)
    assert Path("new").read_bytes() == b""


def test_a_writer_waits_for_the_last_reader(here: Path, fifo: Fifo) -> None:
    runs = [started(*OURS["reader"], *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait") for _ in range(2)]
    jobs = [int(fifo.line()) for _ in runs]
    writer = started(SINGLE, "--lock", "lock", "--wait-ms", "600000", "--show-holders", "--", "echo", "wrote")
    assert writer.stderr and b'"waiting"' in writer.stderr.readline()
    send(jobs[0], signal.SIGUSR1)
    assert fifo.line() == "got SIGUSR1" and writer.poll() is None
    send(jobs[1], signal.SIGUSR1)
    assert ended(writer, 0).stdout == b"wrote\n"
    for run in runs:
        ended(run, 0)
