"""--idempotency-key and --idempotency-store: a key's work is done once, and what nobody knows is never guessed."""

import contextlib
import os
import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from conftest import (
    HANG_S,
    PROBE,
    REDIRECTING,
    RETRY,
    RETRY_75,
    UNPRIVILEGED,
    UNSHARE,
    Fifo,
    ended,
    event,
    lock_of_another_run,
    needs_namespaces,
    run_cli,
    started,
    state,
    until,
    users,
    without,
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


@pytest.mark.parametrize("before", ((), REDIRECTING), ids=("", "redirecting"))
def test_a_killed_wrapper_whose_job_lives_is_live(store: tuple[object, ...], fifo: Fifo, before: tuple[str, ...]) -> None:
    process = started(*store, "--", *before, *PROBE, fifo.path, "say:{pid}", "wait")
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


@pytest.mark.parametrize("content", ("CREATE TABLE runs (id)", "PRAGMA application_id = 1234", "PRAGMA user_version = 1"))
def test_another_applications_database_is_left_as_it_is(store: tuple[object, ...], content: str) -> None:
    with sqlite3.connect("store") as db:
        db.execute(content)
    before = Path("store").read_bytes()
    done = run_cli(*store, "--", "touch", "started", code=125)
    assert done.stderr == event("wrapper_error", kind="ValueError", file="store") and Path("store").read_bytes() == before


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


@pytest.mark.parametrize("name", ("store-journal", "store-wal"))
@pytest.mark.parametrize(("make", "kind"), (("mkfifo", "PermissionError"), ("mkdir", "PermissionError"), ("ln -s x", "OSError")))
def test_a_journal_that_is_none(store: tuple[object, ...], name: str, make: str, kind: str) -> None:
    for _ in range(2):
        run_cli("sh", "-c", f"{make} {name}", code=0)
        nothing_starts(store, kind)
        assert os.path.lexists(name)
        run_cli("rm", "-rf", name)
        run_cli(*store, "--", "true", code=0)  # now there is a store


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
    run_cli(*store, "--", "true", umask=0, code=0)
    assert {os.stat(name).st_mode & 0o777 for name in os.listdir()} == {0o600}
    assert sorted(os.listdir()) == ["store", "store.lock"]


@pytest.mark.parametrize("umask", (0o022, 0o277, 0o777))
def test_records_whatever_the_umask(store: tuple[object, ...], umask: int) -> None:
    """The next run can open them, and its job has the caller's umask."""
    others = ("--breaker", "b", "--event-log", "e", "--metrics-file", "m")
    for key in ("one", "two"):
        shown = run_cli(
            *UNPRIVILEGED, *store, "--idempotency-key", key, *others, "--", "sh", "-c", "umask", umask=umask, code=0
        ).stdout
        assert int(shown, 8) == umask
    assert {os.stat(name).st_mode & 0o777 for name in os.listdir() if name != "m"} == {0o600}


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


def until_reading(process: Popen[bytes], store: str = "store.lock") -> None:
    """Come back when the run has its key and waits for its input."""
    until(lambda: process.pid in users(os.path.realpath(store)) and state(process.pid) == "S" and rows("SELECT id FROM runs"))
    time.sleep(0.1)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Another run's transaction, which never ends."""
    db = sqlite3.connect("store", isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    yield
    db.close()


def nothing_is_started(store: tuple[object, ...], how: str) -> None:
    """A run that ends before its job begins."""
    if how == "no program":
        run_cli(*store, "--", "./no-such", code=127)
    elif how == "breaker":
        opening = ("--breaker", "b", "--breaker-failures", "1", "--max-attempts", "1")
        run_cli(*RETRY_75, *opening, "--", "sh", "-c", "exit 75", code=69 if os.path.exists("b") else 75)
        run_cli(*store, "--breaker", "b", "--", "touch", "started", code=69)
    elif how == "no input":
        run_cli(*store, "--stdin", "replay", "--", "touch", "started", code=125, preexec_fn=without(0))
    elif how in ("stopped", "killed", "stopped at the store"):
        process = started(*store, "--stdin", "replay", "--", "touch", "started", stdin=-1)
        until_reading(process)
        if how == "killed":
            process.kill()
            ended(process, -9)
        elif how == "stopped":
            process.terminate()
            ended(process, 143)
        else:
            with locked():
                assert process.stdin
                process.stdin.close()
                process.stdin = None
                time.sleep(0.3)
                process.terminate()
                ended(process, 143)
    assert not os.path.exists("started")


NOTHING = ("no program", "breaker", "no input", "stopped", "killed", "stopped at the store")


@pytest.mark.parametrize("how", NOTHING)
def test_a_run_that_starts_nothing_changes_nothing(store: tuple[object, ...], how: str) -> None:
    nothing_is_started(store, how)
    assert rows("SELECT state FROM runs") == [("new",)]
    run_cli(*store, "--", "sh", "-c", "kill -KILL $$", code=137)
    run_cli(*store, "--", "false", code=125)
    nothing_is_started((*store, "--rerun-unknown"), how)
    assert run_cli(*store, "--", "touch", "started", code=125).stderr == UNKNOWN
    assert run_cli(*store, "--rerun-unknown", "--", "echo", "x", code=0).stdout == b"x\n"


def test_too_few_descriptors_leave_no_doubt(store: tuple[object, ...]) -> None:
    """However far a run gets: what it could not start may be started later."""
    codes = set()
    for most in range(5, 32):
        options = (*store, "--idempotency-key", f"k{most}")
        codes.add(run_cli("prlimit", f"--nofile={most}", *options, "--", "touch", "started").returncode)
        done = os.path.exists("started")
        Path("started").unlink(missing_ok=True)
        run_cli(*options, "--", "touch", "started", code=0)
        assert os.path.exists("started") != done
        Path("started").unlink(missing_ok=True)
    assert {0, 125} <= codes


def test_one_store_has_one_path(store: tuple[object, ...], fifo: Fifo) -> None:
    """SQLite takes `link/..` for the current folder; the kernel does not."""
    os.makedirs("real/sub")
    os.symlink("real/sub", "link")
    through = (*RETRY_75, "--idempotency-key", "k", "--idempotency-store", "link/../store")
    process = started(*through, "--", *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait")
    job = int(fifo.line())
    assert run_cli(*store[:-1], "real/store", "--", "touch", "second", code=75).stderr == BUSY
    os.kill(job, signal.SIGUSR1)
    ended(process, 0)
    assert not os.path.exists("store") and os.stat("real/store").st_mode & 0o777 == 0o600


def test_a_claim_that_waits_holds_nothing(store: tuple[object, ...]) -> None:
    """While it waits for a reader, its row is not there, and the number of it is another key's."""
    run_cli(*store, "--", "true", code=0)
    reader = sqlite3.connect("store", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM runs").fetchall()
    waiting = started(*store, "--idempotency-key", "waits", "--", "echo", "waited")
    writer = sqlite3.connect("store", isolation_level=None, timeout=0)

    def none_tries() -> bool:
        try:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("ROLLBACK")
            return True
        except sqlite3.OperationalError:
            return False

    def stopped_between_two_tries() -> bool:
        until(none_tries)
        waiting.send_signal(signal.SIGSTOP)
        until(lambda: state(waiting.pid) == "T")
        if none_tries():
            return True
        waiting.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        return False

    until(lambda: waiting.pid in users(os.path.realpath("store.lock")))
    time.sleep(0.5)
    until(stopped_between_two_tries)
    reader.execute("ROLLBACK")
    assert run_cli(*store, "--idempotency-key", "other", "--", "echo", "x", code=0).stdout == b"x\n"
    waiting.send_signal(signal.SIGCONT)
    assert ended(waiting, 0).stdout == b"waited\n"


def test_a_daemon_of_a_run_that_ended_does_not_hold_its_key(store: tuple[object, ...]) -> None:
    daemon = 'echo $$ >"$0"; exec sleep 600'
    start = f"setsid -f sh -c '{daemon}' daemon >/dev/null 2>&1; until [ -s daemon ]; do sleep 0.01; done"
    run_cli(*store, "--", "sh", "-c", f"{start}; exit 65", code=65)
    assert run_cli(*store, "--", "echo", "x", code=0).stdout == b"x\n"
    os.kill(int(Path("daemon").read_text()), signal.SIGKILL)


def test_outputs_are_returned_while_others_write(store: tuple[object, ...]) -> None:
    run_cli(*store, "--", "echo", "out", code=0)
    more = [(*store, "--idempotency-key", f"k{number}") if number % 2 else store for number in range(40)]
    runs = [started(*options, "--", "echo", "out") for options in more]
    assert {ended(run, 0).stdout for run in runs} == {b"out\n"}


def test_an_output_that_is_gone_is_not_an_empty_one(store: tuple[object, ...]) -> None:
    run_cli(*store, "--", "echo", "out", code=0)
    rows("DELETE FROM chunks")
    assert run_cli(*store, "--", "touch", "started", code=125).stderr == NOT_STORED and not os.path.exists("started")


def test_a_success_is_recorded_before_all_else(store: tuple[object, ...], fifo: Fifo) -> None:
    options = ("--breaker", "b", "--event-log", "log")
    process = started(*store, *options, "--", *PROBE, fifo.path, "on:USR1=0", "out:out", "say:{pid}", "wait")
    job = int(fifo.line())
    holders = [lock_of_another_run(name) for name in ("b.lock", "log")]
    os.kill(job, signal.SIGUSR1)
    until(lambda: rows("SELECT state FROM runs") == [("succeeded",)])
    assert process.poll() is None
    process.kill()
    ended(process, -9)
    assert run_cli(*store, "--", "false", code=0).stdout == b"out" and holders


@pytest.mark.parametrize("again", (False, True))
def test_a_stop_signal_ends_the_wait_to_record(store: tuple[object, ...], fifo: Fifo, again: bool) -> None:
    process = started(*store, "--", *PROBE, fifo.path, "on:TERM=0", "say:{pid}", "wait")
    fifo.line()
    with locked():
        process.terminate()
        assert fifo.until_gone() == ["got SIGTERM"]
        begin = time.monotonic()
        if again:
            time.sleep(1.1)
            process.terminate()
        assert event("interrupted", kind="sigterm") in ended(process, 143).stderr
    assert time.monotonic() - begin < (4.5 if again else 20)
    assert run_cli(*store, "--", "false", code=125).stderr == UNKNOWN
