"""What the job reads: nothing, all of our stdin in each attempt, or our stdin itself."""

import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CLEAN_ENV,
    ISOLATED,
    PYTHON,
    RETRY,
    RETRY_75,
    UNPRIVILEGED,
    UNSHARE,
    ended,
    event,
    failed,
    needs_namespaces,
    needs_strace,
    run_cli,
    started,
    state,
    until,
)

REPLAY = (*RETRY_75, "--stdin", "replay", "--")
INHERIT = (*RETRY_75, "--stdin", "inherit", "--")
THIRD = '[ "$RETRY_WRAPPER_ATTEMPT" = 3 ] || exit 75'
TEXT = bytes(range(256)) * 5000  # more than a pipe holds
DIGEST = ("sh", "-c", f"sha256sum; {THIRD}")


def sha256sum(data: bytes) -> bytes:
    return subprocess.run(["sha256sum"], input=data, stdout=subprocess.PIPE, check=True).stdout


def test_each_attempt_reads_it_from_the_start() -> None:
    assert run_cli(*REPLAY, *DIGEST, input=TEXT, code=0).stdout == sha256sum(TEXT)


@pytest.mark.parametrize("options", ((), ("--stdin", "replay")))
def test_what_an_attempt_does_with_it_is_its_own(options: tuple[str, ...]) -> None:
    """It reads a part, seeks, or leaves a process behind, in a session of its own, that reads on."""
    third = "[ $RETRY_WRAPPER_ATTEMPT = 3 ] && exec head -c 9"
    job = f"{third}; head -c 5 >/dev/null; setsid sh -c 'exec cat >/dev/null' & wait; exit 75"
    shown = run_cli(
        *RETRY_75, *options, "--", "sh", "-c", f"[ $RETRY_WRAPPER_ATTEMPT = 3 ] && exec head -c 9; {job}", input=b"1234567890"
    )
    assert (shown.returncode, shown.stdout) == (0, b"123456789" if options else b"")


@pytest.mark.parametrize("size", (0, 1, 65536, 3_000_001))
@pytest.mark.parametrize("offset", (0, 7))
def test_a_file_from_where_it_stands(tmp_path: Path, size: int, offset: int) -> None:
    (tmp_path / "input").write_bytes(b"skipped"[:offset] + TEXT[:1] * size)
    with open(tmp_path / "input", "rb") as file:
        file.seek(offset)
        assert run_cli(*REPLAY, *DIGEST, stdin=file, code=0).stdout == sha256sum(TEXT[:1] * size)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == offset + size  # read once


def test_dev_null_and_a_socket() -> None:
    assert run_cli(*REPLAY, *DIGEST, code=0).stdout == sha256sum(b"")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"x" * 1000)
        ours.shutdown(socket.SHUT_WR)
        assert run_cli(*REPLAY, *DIGEST, stdin=theirs, code=0).stdout == sha256sum(b"x" * 1000)


@pytest.mark.parametrize("blocking", (True, False))
def test_it_comes_in_pieces(tmp_path: Path, blocking: bool) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, blocking)
    process = started(*REPLAY, "sh", "-c", f"touch started; cat; {THIRD}", stdin=reader, cwd=tmp_path)
    os.close(reader)
    for piece in (b"a", b"b\n"):
        os.write(writer, piece)
        until(lambda: state(process.pid) == "S")
        assert not os.listdir(tmp_path)  # each attempt gets all of it
    os.close(writer)
    assert ended(process, 0).stdout == b"ab\n"


def test_the_job_may_stop_reading_early() -> None:
    assert run_cli(*REPLAY, "sh", "-c", f"exec 0<&-; {THIRD}; echo done", input=TEXT, code=0).stdout == b"done\n"


@pytest.mark.parametrize(("options", "left"), ((("--stdin", "replay"), b""), ((), b"x\ny\n"), (("--stdin", "null"), b"x\ny\n")))
def test_only_replay_reads_it(options: tuple[str, ...], left: bytes) -> None:
    script = '"$@"; cat'
    done = run_cli("sh", "-c", script, "sh", *RETRY_75, *options, "--", "true", input=b"x\ny\n", code=0)
    assert done.stdout == left


def test_a_while_loop_keeps_its_input() -> None:
    script = 'while read -r x; do "$@" sh -c "echo $x"; done'
    assert run_cli("sh", "-c", script, "sh", *RETRY_75, "--", input=b"1\n2\n3\n", code=0).stdout == b"1\n2\n3\n"


@pytest.mark.parametrize("stdin", ("<&-", "0>output"))
def test_an_input_that_cannot_be_read(tmp_path: Path, stdin: str) -> None:
    done = run_cli("bash", "-c", f'"$@" {stdin}', "bash", *REPLAY, "touch", "started", cwd=tmp_path, code=125)
    assert (done.stdout, done.stderr) == (b"", event("wrapper_error", kind="OSError"))
    assert not (tmp_path / "started").exists()


@needs_namespaces
def test_a_full_disk(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1M none "$TMPDIR"; exec "$@"'
    environment = {**CLEAN_ENV, "TMPDIR": str(tmp_path)}
    done = run_cli(*UNSHARE, "sh", "-c", script, "sh", *REPLAY, "echo", "started", input=b"x" * 3_000_000, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (125, b"", event("wrapper_error", kind="OSError"))


@pytest.mark.parametrize(
    ("number", "code", "kind"), ((signal.SIGTERM, 143, "sigterm"), (signal.SIGINT, 130, "keyboard_interrupt"))
)
def test_a_stop_signal_while_it_is_read(tmp_path: Path, number: int, code: int, kind: str) -> None:
    reader, writer = os.pipe()
    process = started(*REPLAY, "touch", "started", stdin=reader, cwd=tmp_path)
    os.write(writer, b"x")
    until(lambda: not select.select([reader], [], [], 0)[0])  # it has taken that, and waits for more
    process.send_signal(number)
    done = ended(process, code)
    os.close(reader)
    os.close(writer)
    assert (done.stdout, done.stderr) == (b"", event("interrupted", kind=kind)) and not os.listdir(tmp_path)


@needs_strace
def test_a_kernel_that_refuses_splice() -> None:
    refusal = ("strace", "-qq", "-o", "/dev/null", "-e", "inject=splice:error=ENOSYS", *ISOLATED)
    assert run_cli(*refusal, *REPLAY, *DIGEST, input=TEXT, code=0).stdout == sha256sum(TEXT)


SIZE = 1 << 30
PEAK = "import os, resource, sys; _, status = os.waitpid(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0); \
print(os.waitstatus_to_exitcode(status), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"


def test_memory_stays_flat() -> None:
    job = ("sh", "-c", "wc -c >&2; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75")
    script = f'head -c {SIZE} /dev/zero | {PYTHON} -c "$0" {PYTHON} -IS "$@"'
    done = run_cli("sh", "-c", script, PEAK, *REPLAY, *job)
    code, peak_kb = map(int, done.stdout.split())
    assert code == 0 and int(done.stderr) == SIZE and peak_kb < 40_000


def test_inherit_reads_on_where_the_last_attempt_left_off() -> None:
    job = ("bash", "-c", 'read -r line; echo "$line" >&2; exit 75')
    events = (failed(75, 1, 0), failed(75, 2, 0), failed(75, 3))
    done = run_cli(*INHERIT, *job, input=b"a\nb\nc\nd\n", code=75)
    assert done.stderr == b"".join(event + text for event, text in zip(events, (b"a\n", b"b\n", b"c\n"), strict=True))


def test_inherit_is_a_member_of_a_pipeline() -> None:
    script = 'set -o pipefail; yes | "$@" head -n 1; echo "${PIPESTATUS[0]}"'
    assert run_cli("bash", "-c", script, "bash", *INHERIT, code=0).stdout == b"y\n141\n"


def test_inherit_of_a_closed_stdin() -> None:
    done = run_cli("sh", "-c", '"$@" <&-', "sh", *INHERIT, "sh", "-c", "read x || exit 65", code=65)
    assert done.stderr.startswith(failed(65))


@pytest.mark.parametrize("value", ("", "Replay", "file", "/dev/null"))
def test_refused(value: Any) -> None:
    assert b"--stdin" in run_cli(RETRY, "--retry-code", "75", "--stdin", value, "--", "true", code=2).stderr


@needs_namespaces
def test_an_endless_input_on_a_full_disk_ends(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1M none "$TMPDIR"; yes | "$@"'
    environment = {**CLEAN_ENV, "TMPDIR": str(tmp_path)}
    done = run_cli(*UNSHARE, "sh", "-c", script, "sh", *REPLAY, "echo", "started", env=environment, code=125)
    assert (done.stdout, done.stderr) == (b"", event("wrapper_error", kind="OSError"))


@pytest.mark.parametrize(
    "job", ("echo junk >/dev/stdin", "echo junk >>/dev/fd/0", "truncate -s 3 /dev/stdin", "(: 1<>/dev/stdin)")
)
def test_no_attempt_can_change_what_the_next_one_reads(job: str) -> None:
    done = run_cli(*UNPRIVILEGED, *ISOLATED, *REPLAY, "sh", "-c", f"cat >&2; {job}; exit 75", input=b"one\ntwo\n", code=75)
    assert done.stderr.count(b"one\ntwo\n") == 3
