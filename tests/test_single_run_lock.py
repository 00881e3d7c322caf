"""single_run.py: the lock is the kernel's, lives as long as anything of the job, and its file is never harmed."""

import json
import os
import re
import shutil
import signal
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from conftest import (
    CLEAN_ENV,
    HANG_S,
    PROBE,
    REDIRECTING,
    SINGLE,
    UNPRIVILEGED,
    Fifo,
    ended,
    json_line,
    run_cli,
    single,
    started,
    state,
    until,
)

RECORD = re.compile(rb'\{"format_version":1,"owner_pid":([1-9][0-9]*),"acquired_at_utc":"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"\}\n')
EXAMPLE = b'{"format_version":1,"owner_pid":4711,"acquired_at_utc":"2026-10-19T00:00:00Z"}\n'
LONGEST = EXAMPLE.replace(b"4711", b"4194304")
FOREIGN = (  # contents that are not one of our records nor the beginning of one
    b"#!/bin/sh\necho precious\n",
    b'{"format":"json","a":1}\n',
    b'{\n  "format_version": 1\n}\n',
    b"4711\n",
    b"\n",
    b"\0",
    b" ",
    b"\xff\xfe",
    b'"',
    b"{}",
    b"{{{",
    b"big\n" * 300_000,
    EXAMPLE[:1] + b"\0" * 100_000,
    EXAMPLE + b"more\n",
    EXAMPLE + EXAMPLE,
    EXAMPLE + b"\0",
    EXAMPLE[:-1] + b" \n",
    b'{"format_version":1,"theirs":2}\n',
    b'{"format_version":1,"owner_pid":' + b"7" * 5000 + b" precious\n",
)
BUSY = json_line(status="busy", reason="lock_held", lock="lock")
needs_flock = pytest.mark.skipif(not shutil.which("flock"), reason="needs util-linux flock")


def looks(path: str) -> tuple[bytes, tuple[int, ...]]:
    """All there is to see of a file, except when it was last read."""
    look = os.stat(path)
    return Path(path).read_bytes(), (look.st_ino, look.st_mode, look.st_nlink, look.st_size, look.st_mtime_ns, look.st_ctime_ns)


@pytest.mark.parametrize("umask", (0o000, 0o022, 0o077, 0o277, 0o777))
def test_the_record(here: Path, umask: int) -> None:
    start_s = int(time.time())
    run = started(SINGLE, "--lock", "lock", "--", "cat", "lock", env={**CLEAN_ENV, "TZ": "Asia/Tokyo"}, umask=umask)
    record = ended(run, 0).stdout
    found = RECORD.fullmatch(record)
    assert found and int(found[1]) == run.pid
    acquired = datetime.strptime(found[2].decode(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert start_s <= acquired.timestamp() <= time.time()
    assert Path("lock").read_bytes() == record and Path("lock").stat().st_mode & 0o7777 == 0o600
    shown = run_cli(*UNPRIVILEGED, SINGLE, "--lock", "lock", "--", "sh", "-c", "umask", umask=umask, code=0).stdout
    assert int(shown, 8) == umask


def test_the_file_stays_and_the_next_run_takes_it_over(here: Path) -> None:
    inodes = set()
    for command, code in (("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("true", 0)):
        run = started(SINGLE, "--lock", "lock", "--", "sh", "-c", command)
        ended(run, code)
        inodes.add(os.stat("lock").st_ino)
        assert json.loads(Path("lock").read_bytes())["owner_pid"] == run.pid
    assert len(inodes) == 1


@pytest.mark.parametrize("content", FOREIGN)
def test_foreign_content_is_never_touched(here: Path, content: bytes) -> None:
    Path("lock").write_bytes(content)
    Path("lock").chmod(0o640)
    before = looks("lock")
    end = single("lock", "echo", "started", code=3)
    assert (end.stdout, end.stderr) == (b"", json_line(status="error", reason="lock_file_has_foreign_content", lock="lock"))
    assert looks("lock") == before


def test_a_torn_record_is_ours(here: Path) -> None:
    """Every beginning of a record, as a crash can leave it; the longest one is longer than what replaces it."""
    contents = [LONGEST, *(EXAMPLE[:length] for length in range(len(EXAMPLE) + 1))]
    for i, content in enumerate(contents):
        Path(f"lock{i}").write_bytes(content)
    for i, run in enumerate([started(SINGLE, "--lock", f"lock{i}", "--", "true") for i in range(len(contents))]):
        assert ended(run, 0).stderr == b""
        found = RECORD.fullmatch(Path(f"lock{i}").read_bytes())
        assert found and int(found[1]) == run.pid


def test_a_record_goes_only_into_a_file_with_one_name(here: Path) -> None:
    """Field case 43: a hard link of another, empty file of ours is locked but not written through."""
    Path("other").touch()
    os.link("other", "lock")
    end = single("lock", SINGLE, "--lock", "other", "--", "echo", "started", code=75)
    assert (end.stdout, end.stderr) == (b"", json_line(status="busy", reason="lock_held", lock="other"))
    assert Path("other").read_bytes() == b""


def test_busy_leaves_file_and_holder_alone(here: Path, fifo: Fifo) -> None:
    holder = started(SINGLE, "--lock", "lock", "--", *PROBE, fifo.path, "echo", "say:{pid}", "wait")
    job = int(fifo.line())
    before = looks("lock")
    for _ in range(3):
        end = single("lock", "echo", "started", code=75)
        assert (end.stdout, end.stderr) == (b"", BUSY)
    assert looks("lock") == before and fifo.silent() and holder.poll() is None
    os.kill(job, signal.SIGKILL)
    ended(holder, 137)
    assert single("lock", "echo", "started", code=0).stdout == b"started\n"


@pytest.mark.parametrize("before", (("bash", "-c", '"$@"', "bash"), REDIRECTING), ids=("", "redirecting"))
def test_the_lock_survives_the_wrapper(here: Path, fifo: Fifo, before: tuple[str, ...]) -> None:
    words = ("say:{pid}", "wait")
    holder = started(SINGLE, "--lock", "lock", "--", *before, *PROBE, fifo.path, *words, stdout=None, stderr=None)
    job = int(fifo.line())
    holder.kill()
    holder.wait(HANG_S)
    assert single("lock", "echo", "started", code=75).stderr == BUSY and fifo.silent()
    os.kill(job, signal.SIGKILL)
    until(lambda: state(job) == "Z")
    until(lambda: single("lock", "true").returncode == 0)


def test_a_daemon_that_is_left_behind_holds_it(here: Path, fifo: Fifo) -> None:
    single("lock", "bash", "-c", '"$@" >/dev/null 2>&1 & exit 7', "_", *PROBE, fifo.path, "say:{pid}", "wait", code=7)
    daemon = int(fifo.line())
    assert single("lock", "echo", "started", code=75).stderr == BUSY and fifo.silent()
    os.kill(daemon, signal.SIGKILL)
    until(lambda: single("lock", "true").returncode == 0)


@pytest.mark.parametrize("inherited", (0, 20))
def test_the_locks_descriptor_is_10_or_higher(here: Path, inherited: int) -> None:
    """So no `exec 3>log` of a shell job closes it. What the caller had open stays open."""
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(inherited)]
    script = 'cd /proc/$$/fd; for fd in *; do [ $fd -ef "$OLDPWD/lock" ] && echo "lock $fd"; done; [ ! -e $0 ] || echo there'
    end = single("lock", "bash", "-c", script, str(max(others, default=999)), pass_fds=others, code=0)
    shown = end.stdout.decode().splitlines()
    for fd in others:
        os.close(fd)
    locks = [int(line.split()[1]) for line in shown if line.startswith("lock ")]
    assert len(locks) == 1 and locks[0] >= 10 and locks[0] not in others and ("there" in shown) == bool(others)


@needs_flock
def test_util_linux_flock_waits_for_us(here: Path) -> None:
    assert single("lock", "flock", "-n", "-E", "9", "lock", "echo", "started", code=9).stdout == b""


@needs_flock
@pytest.mark.parametrize("content", (b"", EXAMPLE, b"foreign\n"))
def test_we_yield_to_util_linux_flock(here: Path, content: bytes) -> None:
    """Busy is what the kernel says, whatever the file holds."""
    Path("lock").write_bytes(content)
    before = looks("lock")
    end = run_cli("flock", "-n", "lock", SINGLE, "--lock", "lock", "--", "echo", "started", code=75)
    assert (end.stdout, end.stderr) == (b"", BUSY)
    assert looks("lock") == before


def test_content_decides_nothing(here: Path) -> None:
    """A record of a live process is no lock."""
    Path("lock").write_bytes(EXAMPLE.replace(b"4711", b"%d" % os.getpid()))
    assert single("lock", "echo", "started", code=0).stdout == b"started\n"


def test_of_200_starters_one_runs(here: Path, fifo: Fifo) -> None:
    """The winner's job outlives them all; the 199 are busy and nothing else."""
    starters = [started(SINGLE, "--lock", "lock", "--", *PROBE, fifo.path, "say:{pid}", "wait") for _ in range(200)]
    job = int(fifo.line())
    owner = json.loads(Path("lock").read_bytes())["owner_pid"]
    for run in starters:
        if run.pid != owner:
            end = ended(run, 75)
            assert (end.stdout, end.stderr) == (b"", BUSY)
    os.kill(job, signal.SIGTERM)
    winner = ended(next(run for run in starters if run.pid == owner), 143)
    assert (winner.stdout, winner.stderr, fifo.until_gone()) == (b"", b"", [])
    assert single("lock", "true").returncode == 0
