"""--idempotency-key and --idempotency-store: a key's work is done once, and what nobody knows is never guessed."""

import os
import random
import re
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    HANG_S,
    PROBE,
    RETRY,
    RETRY_75,
    UNSHARE,
    Fifo,
    ended,
    event,
    needs_namespaces,
    run_cli,
    started,
    until,
)

UNKNOWN, BUSY, NOT_STORED = (event(name) for name in ("outcome_unknown", "in_progress", "output_not_stored"))


@pytest.fixture
def store(here: Path) -> tuple[object, ...]:
    """A command that runs `-- job` by the key k of a store in an empty folder."""
    return (*RETRY_75, "--idempotency-key", "k", "--idempotency-store", "store")


def rows(query: str = "SELECT key, state, exit_code, stdout_bytes FROM runs") -> list[Any]:
    with sqlite3.connect("store") as db:
        return db.execute(query).fetchall()


def test_a_key_that_succeeded_is_not_run_again(store: tuple[object, ...]) -> None:
    job = ("sh", "-c", "echo ran >>ran; echo shown >&2; printf 'out\\377\\0'; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75")
    assert run_cli(*store, "--", *job, code=0).stderr == b"shown\n"
    again = run_cli(*store, "--", *job, code=0)
    assert (again.stdout, again.stderr) == (b"out\xff\0", b"")
    assert Path("ran").read_text() == "ran\n" * 2 and rows() == [("k", "succeeded", 0, 5)]


@pytest.mark.parametrize("size", (0, 1, 1 << 20, 5_000_001, 16 << 20))
def test_all_of_stdout_is_stored(store: tuple[object, ...], size: int) -> None:
    job = ("sh", "-c", f"yes 0123456 | head -c {size}")
    first = run_cli(*store, "--", *job, code=0).stdout
    assert len(first) == size and run_cli(*store, "--", "false", code=0).stdout == first


def test_too_much_of_it_is_not(store: tuple[object, ...]) -> None:
    assert len(run_cli(*store, "--", "head", "-c", str((16 << 20) + 1), "/dev/zero", code=0).stdout) == (16 << 20) + 1
    again = run_cli(*store, "--", "touch", "again", code=125)
    assert (again.stdout, again.stderr, os.path.exists("again")) == (b"", NOT_STORED, False)


AGAIN = (  # the first run's options and job, its exit code, what the key's next run says ("": it runs)
    ((), "exit 65", 65, b""),
    ((), "exit 75", 75, b""),
    ((), "kill -KILL $$", 137, UNKNOWN),
    (("--retry-signal", "KILL"), "kill -KILL $$", 137, b""),
    (("--attempt-timeout-ms", "100"), "exec sleep 60", 124, UNKNOWN),
    (("--max-elapsed-ms", "100"), "exec sleep 60", 124, UNKNOWN),
    ((), "exit 124", 124, b""),
    (("--max-output-bytes", "1"), "echo ab", 125, UNKNOWN),
    ((), "kill -TERM $PPID; sleep 60", 143, UNKNOWN),
    ((), "trap 'exit 65' TERM; kill -TERM $PPID; sleep 60 & wait", 143, UNKNOWN),
    ((), "trap 'exit 0' INT; kill -INT $PPID; sleep 60 & wait", 130, UNKNOWN),
)


@pytest.mark.parametrize(("options", "job", "code", "said"), AGAIN)
def test_what_a_failed_run_leaves(store: tuple[object, ...], options: tuple[str, ...], job: str, code: int, said: bytes) -> None:
    run_cli(*store, *options, "--", "sh", "-c", job, code=code)
    again = run_cli(*store, "--", "echo", "again", code=125 if said else 0)
    assert (again.stdout, again.stderr) == (b"" if said else b"again\n", said)
    if said:
        assert run_cli(*store, "--", "echo", "again", code=125).stderr == said  # and so on
        assert run_cli(*store, "--rerun-unknown", "--", "echo", "again", code=0).stdout == b"again\n"


def test_a_job_that_ends_well_after_term_has_succeeded(store: tuple[object, ...]) -> None:
    run_cli(*store, "--", "sh", "-c", "trap 'echo done; exit 0' TERM; kill -TERM $PPID; sleep 60 & wait", code=0)
    assert run_cli(*store, "--", "false", code=0).stdout == b"done\n"


def test_a_job_that_was_not_started_may_be(store: tuple[object, ...]) -> None:
    run_cli(*store, "--", "./no-such", code=127)
    assert run_cli(*store, "--", "echo", "x", code=0).stdout == b"x\n"


def test_a_live_run(store: tuple[object, ...], fifo: Fifo) -> None:
    process = started(*store, "--", *PROBE, fifo.path, "on:USR1=0", "say:ready", "wait")
    fifo.line()
    assert run_cli(*store, "--", "touch", "second", code=75).stderr == BUSY
    assert run_cli(*store, "--rerun-unknown", "--", "touch", "second", code=75).stderr == BUSY
    other = ("--idempotency-key", "other")
    assert run_cli(*store, *other, "--", "echo", "x", code=0).stdout == b"x\n"
    process.send_signal(signal.SIGUSR1)
    ended(process, 0)
    assert run_cli(*store, "--", "false", code=0).stdout == b"" and not os.path.exists("second")


def test_a_killed_wrapper_whose_job_lives_is_live(store: tuple[object, ...], fifo: Fifo) -> None:
    process = started(*store, "--", *PROBE, fifo.path, "say:{pid}", "wait")
    job = int(fifo.line())
    process.kill()
    process.wait(HANG_S)
    assert run_cli(*store, "--", "touch", "second", code=75).stderr == BUSY
    os.kill(job, signal.SIGKILL)
    fifo.until_gone()
    assert run_cli(*store, "--", "touch", "second", code=125).stderr == UNKNOWN
    assert not os.path.exists("second")


def test_twenty_starters_of_one_key_run_it_once(store: tuple[object, ...]) -> None:
    gate = "until [ -e gate ]; do sleep 0.02; done; echo ran >>ran; echo out"
    processes = [started(*store, "--", "sh", "-c", gate) for _ in range(20)]
    until(lambda: sum(process.poll() is not None for process in processes) == 19)
    Path("gate").touch()
    codes = sorted(ended(process).returncode for process in processes)
    assert codes == [0] + [75] * 19 and Path("ran").read_text() == "ran\n"
    again = [started(*store, "--", "false") for _ in range(20)]
    assert {ended(process, 0).stdout for process in again} == {b"out\n"}


def test_killed_at_any_moment(store: tuple[object, ...]) -> None:
    """200 times: the job of a key begins again only if it certainly has not begun, or its run was known to have failed."""
    rng = random.Random(7)
    job = ("sh", "-c", "echo $RETRY_WRAPPER_IDEMPOTENCY_KEY >>began; sleep 0.02; echo done")
    for batch in range(25):
        keys = [f"{batch}.{number}" for number in range(8)]
        runs = [started(*store[:-4], "--idempotency-key", key, "--idempotency-store", "store", "--", *job) for key in keys]
        for process in runs:
            time.sleep(rng.random() * 0.06)
            process.kill()
        for process in runs:
            ended(process)
        for key in keys:
            next_run = (*store[:-4], "--idempotency-key", key, "--idempotency-store", "store", "--", *job)
            while (done := run_cli(*next_run)).returncode == 75:
                time.sleep(0.01)
            began = Path("began").read_text().splitlines().count(key) if os.path.exists("began") else 0
            assert (done.returncode, done.stdout, began) in ((0, b"done\n", 1), (125, b"", 1), (125, b"", 0)), done.stderr


def test_the_key_is_the_same_in_all_attempts() -> None:
    job = ("sh", "-c", "echo ${RETRY_WRAPPER_IDEMPOTENCY_KEY-none} >&2; exit 75")

    def shown(*options: str) -> list[str]:
        return [line for line in run_cli(*RETRY_75, *options, "--", *job, code=75).stderr.decode().splitlines() if line[0] != "{"]

    assert shown() == ["none"] * 3 and shown("--idempotency-key", "a b") == ["a b"] * 3
    first, second = shown("--idempotency-key", "auto"), shown("--idempotency-key", "auto")
    assert len({*first, *second}) == 2 and re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first[0])


def nothing_starts(options: tuple[object, ...], kind: str) -> None:
    done = run_cli(*options, "--", "touch", "started", code=125)
    assert (done.stdout, done.stderr) == (b"", event("wrapper_error", kind=kind, file="store")) and not os.path.exists("started")


JUNK = (b"junk" * 1000, b"x", b"SQLite format 3\0" + b"\xff" * 4000)


@pytest.mark.parametrize("junk", JUNK, ids=len)
def test_junk_is_left_as_it_is(store: tuple[object, ...], junk: bytes) -> None:
    Path("store").write_bytes(junk)
    done = run_cli(*store, "--", "touch", "started", code=125)
    assert done.stdout == b"" and b'"wrapper_error"' in done.stderr and not os.path.exists("started")
    assert Path("store").read_bytes() == junk


def test_another_applications_database_is_left_as_it_is(store: tuple[object, ...]) -> None:
    with sqlite3.connect("store") as db:
        db.execute("CREATE TABLE runs (id)")
    before = Path("store").read_bytes()
    done = run_cli(*store, "--", "touch", "started", code=125)
    assert done.stderr == event("wrapper_error", kind="ValueError") and Path("store").read_bytes() == before


def test_files_that_are_not_ours_alone(store: tuple[object, ...], tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", "store")
    nothing_starts(store, "OSError")
    os.unlink("store")
    os.mkfifo("store")
    nothing_starts(store, "PermissionError")
    os.unlink("store")
    os.mkdir("store")
    nothing_starts(store, "IsADirectoryError")
    os.rmdir("store")
    Path("other").touch()
    os.link("other", "store")
    nothing_starts(store, "PermissionError")
    os.unlink("store")
    os.chmod(".", 0o777)
    nothing_starts(store, "PermissionError")
    assert not (tmp_path / "elsewhere").exists() and not os.path.exists("store")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_of_another_user(store: tuple[object, ...]) -> None:
    Path("store").touch()
    os.chown("store", 12345, -1)
    nothing_starts(store, "PermissionError")


@needs_namespaces
@pytest.mark.parametrize(
    "mount", ("mount -o bind,ro . .; cd .", "mount -t tmpfs -o size=4k none .; cd .; head -c 9000 /dev/zero >fill")
)
def test_a_store_that_cannot_be_written(store: tuple[object, ...], here: Path, mount: str) -> None:
    script = f'cd "$1" && {{ {mount}; }} 2>/dev/null; cd "$1"; shift; exec "$@"'
    done = run_cli(*UNSHARE, "sh", "-c", script, "sh", here, *store, "--", "echo", "started", code=125)
    assert done.stdout == b"" and b'"wrapper_error"' in done.stderr


def test_a_store_that_is_locked_for_long(store: tuple[object, ...]) -> None:
    run_cli(*store, "--", "true", code=0)
    db = sqlite3.connect("store", isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    waiting = started(*store, "--idempotency-key", "other", "--", "touch", "started")
    time.sleep(0.5)
    assert waiting.poll() is None
    waiting.terminate()
    assert ended(waiting, 143).stderr.endswith(event("interrupted", kind="sigterm"))
    patient = started(*store, "--idempotency-key", "other", "--", "echo", "x")
    time.sleep(0.5)
    db.execute("COMMIT")
    assert ended(patient, 0).stdout == b"x\n" and not os.path.exists("started")


def test_a_success_that_cannot_be_recorded_is_unknown(store: tuple[object, ...]) -> None:
    done = run_cli(*store, "--", "sh", "-c", "echo out; rm store; echo junk >store", code=125)
    assert done.stdout == b"" and b'"wrapper_error"' in done.stderr


def test_only_we_can_read_it(store: tuple[object, ...]) -> None:
    run_cli("sh", "-c", 'umask 0; "$@"', "sh", *store, "--", "true", code=0)
    assert {os.stat(name).st_mode & 0o777 for name in os.listdir()} == {0o600}
    assert sorted(os.listdir()) == ["store", "store.lock"]


REFUSED = (
    ("--idempotency-store", "store"),
    ("--idempotency-store", "store", "--idempotency-key", "auto"),
    ("--idempotency-key", ""),
    ("--idempotency-key", "a\nb"),
    ("--idempotency-key", b"\xff"),
    ("--rerun-unknown",),
    ("--rerun-unknown", "--idempotency-key", "k"),
)


@pytest.mark.parametrize("options", REFUSED)
def test_refused(here: Path, options: tuple[object, ...]) -> None:
    run_cli(RETRY, "--retry-code", "75", *options, "--", "touch", "started", code=2)
    assert os.listdir() == []
