"""Output: delivered whole to whatever the caller has there, kept without memory, and never half of it as a success."""

import hashlib
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import tty
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CLEAN_ENV,
    ISOLATED,
    PROBE,
    RETRY_75,
    UNSHARE,
    Fifo,
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
)

ERROR = event("wrapper_error", kind="OSError")
Target = tuple[int, int]  # the caller's end, the reader's


def digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 MB that do not repeat, more than any pipe holds."""
    path = tmp_path_factory.mktemp("big") / "big"
    path.write_bytes(b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(100_000)))
    return path


def file(folder: Path, flags: int = 0) -> Target:
    path = folder / "target"
    return os.open(path, os.O_CREAT | os.O_WRONLY | flags), os.open(path, os.O_RDONLY)


def appended_file(folder: Path) -> Target:
    return file(folder, os.O_APPEND)


def pipe(folder: Path) -> Target:
    reader, writer = os.pipe()
    return writer, reader


def not_blocking(target: Callable[[Path], Target]) -> Callable[[Path], Target]:
    def made(folder: Path) -> Target:
        writer, reader = target(folder)
        os.set_blocking(writer, False)
        return writer, reader

    made.__name__ = f"{target.__name__}_not_blocking"
    return made


def named_pipe(folder: Path) -> Target:
    os.mkfifo(folder / "target")
    reader = os.open(folder / "target", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    return os.open(folder / "target", os.O_WRONLY), reader


def stream_socket(folder: Path) -> Target:
    writer, reader = socket.socketpair()
    return writer.detach(), reader.detach()


def terminal(folder: Path) -> Target:
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return writer, reader


def read_all(reader: int) -> bytes:
    parts = []
    try:
        while part := os.read(reader, 1 << 20):
            parts.append(part)
    except OSError:
        pass  # a terminal's way to say that it is over
    return b"".join(parts)


STREAMS = (pipe, named_pipe, stream_socket, terminal)
FILES = (file, appended_file)
TARGETS = (*FILES, *STREAMS, *map(not_blocking, STREAMS))


def taken(
    target: Callable[[Path], Target], folder: Path, stream: str, *job: Any, code: int, options: tuple[str, ...] = ()
) -> bytes:
    """What a reader gets of that stream."""
    writer, reader = target(folder)
    streams: dict[str, Any] = {stream: writer}
    process = started(*RETRY_75, *options, "--", *job, **streams)
    os.close(writer)
    if target in FILES:
        ended(process, code)
        return read_all(reader)
    with ThreadPoolExecutor() as pool:
        output = pool.submit(read_all, reader)
        ended(process, code)
    return output.result()


@pytest.mark.parametrize("target", TARGETS)
def test_delivered_whole(tmp_path: Path, big: Path, target: Callable[[Path], Target]) -> None:
    assert digest(taken(target, tmp_path, "stdout", "cat", big, code=0)) == digest(big.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_a_history_is_told_whole(tmp_path: Path, big: Path, target: Callable[[Path], Target]) -> None:
    history = taken(target, tmp_path, "stderr", "sh", "-c", f"cat {big} {big} >&2; echo >&2; exit 65", code=65)
    assert digest(history) == digest(failed(65) + 2 * big.read_bytes() + b"\n")


@pytest.mark.parametrize("target", TARGETS)
def test_a_stream_is_shown_whole(tmp_path: Path, big: Path, target: Callable[[Path], Target]) -> None:
    job = ("sh", "-c", f"cat {big} >&2; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75")
    shown = taken(target, tmp_path, "stderr", *job, code=0, options=("--stream-stderr",))
    assert digest(shown) == digest(big.read_bytes() + b"\n" + failed(75, 1, 0) + big.read_bytes())


def test_a_history_is_told_whole_to_a_pipe_that_is_full(fifo: Fifo, tmp_path: Path, big: Path) -> None:
    """A non-blocking one without room for the first line, for the moment."""
    writer, reader = not_blocking(pipe)(tmp_path)
    filling = b"x" * os.write(writer, b"x" * 10_000_000)
    between = os.open(fifo.path, os.O_WRONLY)  # no end of file between the attempts
    process = started(*RETRY_75, "--", "sh", "-c", f"cat {big} >&2; echo >{fifo.path}; exit 75", stderr=writer)
    os.close(writer)
    assert [fifo.line() for _ in range(3)] == [""] * 3
    until_backoff(process.pid)
    with ThreadPoolExecutor() as pool:
        told = pool.submit(read_all, reader)
        ended(process, 75)
    os.close(between)
    parts = (filling, *(line + big.read_bytes() + b"\n" for line in (failed(75, 1, 0), failed(75, 2, 0), failed(75, 3))))
    assert digest(told.result()) == digest(b"".join(parts))


@needs_strace
@pytest.mark.parametrize("refusal", ("ENOSYS", "EPERM", "EOPNOTSUPP"))
def test_a_kernel_that_refuses_the_fast_ways(big: Path, refusal: str) -> None:
    """A sandbox's filter, an old kernel: the plain way remains."""
    refusals = ("-e", f"inject=splice:error={refusal}", "-e", "inject=sendfile:error=ENOSYS")
    done = run_cli("strace", "-qq", "-o", "/dev/null", *refusals, *ISOLATED, *RETRY_75, "--", "cat", big, code=0)
    assert digest(done.stdout) == digest(big.read_bytes())
    assert done.stderr == b""


def test_a_reset_connection_is_a_reader_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        ours, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close is a reset
    with ours:
        assert run_cli(*RETRY_75, "--", "echo", "x", stdout=ours, code=141).stderr == b""


def test_dev_null_takes_it(big: Path) -> None:
    with open("/dev/null", "wb") as null:
        assert run_cli(*RETRY_75, "--", "cat", big, stdout=null, code=0).stderr == b""


@pytest.mark.parametrize("mode", ("wb", "ab"))
def test_what_the_file_has_already_stays(tmp_path: Path, mode: str) -> None:
    with open(tmp_path / "log", mode) as log:
        log.write(b"before\n")
        log.flush()
        run_cli(*RETRY_75, "--", "echo", "x", stdout=log, stderr=log, code=0)
        run_cli(*RETRY_75, "--", "sh", "-c", "echo y >&2; exit 65", stdout=log, stderr=log, code=65)
        log.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nx\n" + failed(65) + b"y\nafter\n"


@pytest.mark.parametrize("size", (1 << 12, 1 << 20))
def test_our_callers_pipe_never_gets_smaller(size: int) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as ours, open(writer, "wb") as theirs:
        fcntl(theirs, F_SETPIPE_SZ, size)
        run_cli(*RETRY_75, "--", "echo", "done", code=0, stdout=theirs)
        assert fcntl(ours, F_GETPIPE_SZ) >= size and os.read(reader, 9) == b"done\n"


def test_both_streams_big_at_once(big: Path) -> None:
    done = run_cli(*RETRY_75, "--", "sh", "-c", f"cat {big} & cat {big} {big} >&2; wait; cat {big}", code=0)
    assert digest(done.stdout) == digest(done.stderr) == digest(2 * big.read_bytes())


SIZE = 100_000_000
FLOODS = (  # job, the stream that shows it, what precedes it there, exit code
    (f"head -c {SIZE} /dev/zero", "stdout", b"", 0),
    (f"head -c {SIZE} /dev/zero; head -c {SIZE} /dev/zero >&2; exit 2", "stderr", failed(2), 2),
)


@pytest.mark.parametrize(("job", "stream", "before", "code"), FLOODS)
def test_memory_stays_flat(job: str, stream: str, before: bytes, code: int) -> None:
    process = started(*RETRY_75, "--", "sh", "-c", job)
    output = getattr(process, stream)
    assert output.read(len(before)) == before
    left = SIZE
    while left > SIZE // 10:
        data = output.read(1 << 20)
        assert data
        left -= len(data)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())  # it still has a tenth to deliver
    assert peak and int(peak[1]) < 40_000
    done = ended(process, code)
    assert digest(done.stdout + done.stderr) == digest(bytes(left) + b"\n" * (code != 0))


HOLDING = (  # what the job's child does with our pipes, which it keeps open
    ("says nothing", "wait", b"out"),
    ("has said something", "out:+more wait", b"out+more"),
)


@pytest.mark.parametrize(("words", "stdout"), [row[1:] for row in HOLDING], ids=[row[0] for row in HOLDING])
def test_a_background_process_is_not_waited_for(fifo: Fifo, words: str, stdout: bytes) -> None:
    process = started(*RETRY_75, "--", *PROBE, fifo.path, "out:out", "leave:0", "say:{pid}", *words.split())
    child = int(fifo.line())
    assert ended(process, 0).stdout == stdout
    assert state(child) == "S" and fifo.silent()


def test_a_background_process_that_writes_without_end(tmp_path: Path) -> None:
    """It gets SIGPIPE when we are gone."""
    done = run_cli(*RETRY_75, "--", "sh", "-c", "echo out; yes & echo $! >pid; exit 0", cwd=tmp_path, code=0)
    assert done.stdout.startswith(b"out\n") and set(done.stdout[4:]) <= set(b"y\n")
    until(lambda: state(int((tmp_path / "pid").read_text())) == "Z")


# Temporary folders


@pytest.fixture
def spool_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


READ_ONLY = "mount -o remount,bind,ro / && " + " && ".join(
    f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in ("/tmp", "/var/tmp", "/dev/shm")
)
FULL = 'mount -t tmpfs -o size=64k none "$TMPDIR" && head -c 65536 /dev/zero >"$TMPDIR/x"'
NO_FILES = 'mount -t tmpfs -o nr_inodes=1 none "$TMPDIR"'
SMALL = 'mount -t tmpfs -o size=64k none "$TMPDIR"'
UNWRITABLE = 'mount -t tmpfs -o ro none "$TMPDIR"'


def mounted(mounts: str, *command: Any) -> tuple[Any, ...]:
    """The command after these mounts, which nobody else sees."""
    return (*UNSHARE, "sh", "-c", f'{mounts} || exit 99; exec "$@"', "sh", *command)


@pytest.mark.parametrize("folder", ("/no/such", "/dev/null", "/proc", "", "relative", "/no/such\n", "x" * 300))
def test_the_next_folder_where_one_is_of_no_use(big: Path, folder: str) -> None:
    env = {**CLEAN_ENV, "TMPDIR": folder}
    assert digest(run_cli(*RETRY_75, "--", "cat", big, env=env, code=0).stdout) == digest(big.read_bytes())


@needs_namespaces
@pytest.mark.parametrize("mounts", (UNWRITABLE, NO_FILES, FULL))
def test_the_next_folder_where_one_takes_nothing(spool_folder: Path, big: Path, mounts: str) -> None:
    done = run_cli(*mounted(mounts, *RETRY_75, "--", "cat", big), env={**CLEAN_ENV, "TMPDIR": str(spool_folder)}, code=0)
    assert digest(done.stdout) == digest(big.read_bytes())


@needs_namespaces
@pytest.mark.parametrize("mounts", ("true", UNWRITABLE, NO_FILES, FULL))
def test_no_folder_at_all(fifo: Fifo, spool_folder: Path, mounts: str) -> None:
    job = (*PROBE, fifo.path, "say:started")
    env = {**CLEAN_ENV, "TMPDIR": str(spool_folder)}
    done = run_cli(*mounted(f"{READ_ONLY} && {mounts}", *RETRY_75, "--", *job), cwd="/", env=env, code=125)
    assert done.stdout == b""
    assert re.fullmatch(rb'\{"source":"retry_wrapper","event":"wrapper_error","kind":"[A-Za-z]*Error"\}\n', done.stderr)
    assert fifo.silent()


def not_whole(done: subprocess.CompletedProcess[bytes]) -> None:
    """That is no success, nor tried again."""
    assert done.stdout == b""
    assert (b"\n" + done.stderr).count(b"\n" + ERROR) == 1
    assert b'"retrying":true' not in done.stderr


@pytest.mark.parametrize("code", (0, 65, 75))
@pytest.mark.parametrize("redirection", ("", ">&2"))
def test_a_spool_at_the_file_size_limit(tmp_path: Path, code: int, redirection: str) -> None:
    """The job is not disturbed and ends as it wants."""
    job = f"echo start >>log; head -c 3000000 /dev/zero {redirection}; echo $? >>log; exit {code}"
    done = run_cli("sh", "-c", 'ulimit -f 100; exec "$@"', "sh", *RETRY_75, "--", "sh", "-c", job, cwd=tmp_path, code=125)
    assert (tmp_path / "log").read_text() == "start\n0\n"
    not_whole(done)


@needs_namespaces
@pytest.mark.parametrize("code", (0, 65, 75))
@pytest.mark.parametrize("redirection", ("", ">&2"))
def test_a_spool_on_a_full_disk(fifo: Fifo, spool_folder: Path, code: int, redirection: str) -> None:
    job = f"exec 9>{fifo.path}; echo start >&9; head -c 3000000 /dev/zero {redirection}; echo $? >&9; exit {code}"
    env = {**CLEAN_ENV, "TMPDIR": str(spool_folder)}
    done = run_cli(*mounted(f"{READ_ONLY} && {SMALL}", *RETRY_75, "--", "sh", "-c", job), cwd="/", env=env, code=125)
    assert fifo.until_gone() == ["start", "0"]
    not_whole(done)


def test_no_temporary_file_has_a_name(fifo: Fifo, spool_folder: Path) -> None:
    job = (*PROBE, fifo.path, "out:x", "err:y", "on:USR1=0", "say:ready", "wait")
    process = started(*RETRY_75, "--", *job, env={**CLEAN_ENV, "TMPDIR": str(spool_folder)})
    assert fifo.line() == "ready"
    assert list(spool_folder.iterdir()) == []
    process.send_signal(signal.SIGUSR1)
    ended(process, 0)
