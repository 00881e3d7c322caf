"""The exit code of retry_command.py says how the run ended: each row of its table, by a real process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import CLEAN_ENV, RETRY, RETRY_75, event, failed, launch_error, run_cli, started

PASSED_ON = (1, 2, 74, 76, 124, 125, 126, 127, 128, 130, 141, 143, 255)
DEADLY = (1, 2, 3, 9, 10, 11, 13, 15, 25, 34, 64)  # 13 and 25: ignored by Python, not by the job
ENDS = (  # what the job does, exit code, stderr
    ("exit 0", 0, b""),
    ("exit 65", 65, failed(65)),
    ("exit 75", 75, failed(75, 1, 0) + failed(75, 2, 0) + failed(75, 3)),
    ("[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exit 75; exit 0", 0, b""),
    ("[ $RETRY_WRAPPER_ATTEMPT = 3 ] || exit 75", 0, b""),
    ("[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exit 75; exit 65", 65, failed(75, 1, 0) + failed(65, 2)),
    ("[ $RETRY_WRAPPER_ATTEMPT = 1 ] && exit 75; kill -9 $$", 137, failed(75, 1, 0) + failed(-9, 2)),
    ("ulimit -c unlimited; kill -QUIT $$", 131, failed(-3)),  # its end is "dumped", not "killed"
    ("kill -INT $PPID; exec sleep 1000", 130, failed(-2) + event("interrupted", kind="keyboard_interrupt")),
    *((f"exit {code}", code, failed(code)) for code in PASSED_ON),
    *((f"kill -{number} $$", 128 + number, failed(-number)) for number in DEADLY),
)


@pytest.mark.parametrize(("job", "code", "stderr"), ENDS, ids=[job for job, _, _ in ENDS])
def test_the_end_of_the_job(tmp_path: Path, job: str, code: int, stderr: bytes) -> None:
    done = run_cli(*RETRY_75, "--", "sh", "-c", job, cwd=tmp_path, code=code)
    assert (done.stdout, done.stderr) == (b"", stderr)


LISTED = (  # listed codes, the job's, attempts
    (("1",), 1, 3),
    (("124",), 124, 3),
    (("75", "111"), 75, 3),
    (("75", "111"), 111, 3),
    (("75", "75"), 75, 3),
    (("75", "111"), 76, 1),
    (("75", "111"), 7, 1),
)


@pytest.mark.parametrize(("listed", "code", "attempts"), LISTED)
def test_only_listed_codes_are_retried(tmp_path: Path, listed: tuple[str, ...], code: int, attempts: int) -> None:
    codes = [word for one in listed for word in ("--retry-code", one)]
    run_cli(RETRY, *codes, "--initial-delay-ms", "0", "--", "sh", "-c", f"echo >>log; exit {code}", cwd=tmp_path, code=code)
    assert (tmp_path / "log").read_bytes() == b"\n" * attempts


@pytest.mark.parametrize("attempts", (1, 2, 10))
def test_as_many_attempts_as_allowed(tmp_path: Path, attempts: int) -> None:
    job = ("sh", "-c", "echo $RETRY_WRAPPER_ATTEMPT/$RETRY_WRAPPER_MAX_ATTEMPTS >>log; exit 75")
    run_cli(*RETRY_75, "--max-attempts", str(attempts), "--", *job, cwd=tmp_path, code=75)
    assert (tmp_path / "log").read_text().split() == [f"{n}/{attempts}" for n in range(1, attempts + 1)]


FILES = (
    ("text", "exit 0\n", 0o755),
    ("empty", "", 0o755),
    ("mode-644", "#!/bin/sh\n", 0o644),
    ("script", "#!/bin/sh\n", 0o755),
    ("no-interpreter", "#!/no/such/interpreter\n", 0o755),
    ("folder-for-interpreter", "#!/\n", 0o755),
)
LAUNCHES = (  # command, in a folder with these files that is also in PATH; exit code; kind
    ("no-such-program", 127, "not_found"),
    ("./no-such-file", 127, "not_found"),
    ("./no-such-folder/job", 127, "not_found"),
    ("./no-interpreter", 127, "not_found"),
    ("no-interpreter", 127, "not_found"),
    ("", 126, "permission_denied"),
    ("/", 126, "permission_denied"),
    ("./folder", 126, "permission_denied"),
    ("./mode-644", 126, "permission_denied"),
    ("mode-644", 126, "permission_denied"),
    ("./folder-for-interpreter", 126, "permission_denied"),
    ("./text", 125, "os_error"),
    ("./empty", 125, "os_error"),
    ("./script/job", 127, "not_found"),
    ("./loop", 125, "os_error"),
    ("./" + "n" * 300, 125, "os_error"),
)


@pytest.mark.parametrize(("command", "code", "kind"), LAUNCHES, ids=[row[0][:30] for row in LAUNCHES])
def test_a_job_that_cannot_start(tmp_path: Path, command: str, code: int, kind: str) -> None:
    for name, text, mode in FILES:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    env = {**CLEAN_ENV, "PATH": f"{CLEAN_ENV['PATH']}:{tmp_path}"}
    done = run_cli(*RETRY_75, "--retry-code", "124", "--", command, "word", cwd=tmp_path, env=env, code=code)
    assert (done.stdout, done.stderr) == (b"", launch_error(kind))


def test_a_job_that_is_deleted_between_attempts(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.write_text('#!/bin/sh\necho once >&2\nrm "$0"\nexit 75\n')
    job.chmod(0o755)
    done = run_cli(*RETRY_75, "--", job, code=127)
    assert (done.stdout, done.stderr) == (b"", failed(75, 1, 0) + b"once\n" + launch_error("not_found", 2))


ERROR = event("wrapper_error", kind="OSError")
UNDELIVERED = (  # the caller's redirections, job, exit code, stderr
    (">/dev/full", "echo x", 125, ERROR),
    (">/dev/full", "true", 0, b""),
    (">/dev/full", "echo x; exit 65", 65, failed(65)),
    (">/dev/full 2>&1", "echo x", 125, b""),
    ("2>/dev/full", "echo x >&2", 125, b""),
    ("2>/dev/full", "echo x >&2; exit 65", 65, b""),
    ("2>/dev/full", "exit 75", 75, b""),
    ("2>/dev/full", "kill -9 $$", 137, b""),
    ("2>/dev/full", "kill -TERM $PPID; exec sleep 1000", 143, b""),
    (">&-", "echo x", 125, ERROR),
    (">&-", "true", 0, b""),
    (">&-", "echo x; exit 65", 65, failed(65)),
    ("2>&-", "echo x >&2", 125, b""),
    ("2>&-", "true", 0, b""),
    ("2>&-", "exit 65", 65, b""),
    (">&- 2>&-", "echo x", 125, b""),
)


@pytest.mark.parametrize(("redirections", "job", "code", "stderr"), UNDELIVERED)
def test_output_that_cannot_be_written(redirections: str, job: str, code: int, stderr: bytes) -> None:
    done = run_cli("sh", "-c", f'exec "$@" {redirections}', "sh", *RETRY_75, "--", "sh", "-c", job, code=code)
    assert (done.stdout, done.stderr) == (b"", stderr)


READERLESS = (  # which of our streams has lost its reader, job, exit code, what the other shows
    ("stdout", "echo x", 141, b""),
    ("stderr", "echo x >&2", 141, b""),
    ("stdout", "true", 0, b""),
    ("stdout", "echo x >&2", 0, b"x\n"),
    ("stdout", "echo x; exit 65", 65, failed(65)),
    ("stderr", "echo x >&2; exit 65", 65, b""),
    ("stderr", "exit 75", 75, b""),
    ("stderr", "kill -TERM $PPID; exec sleep 1000", 143, b""),
)


@pytest.mark.parametrize(("stream", "job", "code", "shown"), READERLESS)
def test_output_without_a_reader(stream: str, job: str, code: int, shown: bytes) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    streams: dict[str, Any] = {stream: writer}
    done = run_cli(*RETRY_75, "--", "sh", "-c", job, code=code, **streams)
    os.close(writer)
    assert (done.stdout or b"") + (done.stderr or b"") == shown


@pytest.mark.parametrize("ignored", (False, True))
def test_a_reader_that_leaves_in_the_middle(ignored: bool) -> None:
    def entry() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = started(*RETRY_75, "--", "head", "-c", "5000000", "/dev/zero", preexec_fn=entry)
    assert process.stdout and process.stderr
    assert process.stdout.read(1) == b"\0"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


def test_bad_arguments() -> None:
    run_cli(RETRY, "--retry-code", "0", "--", "true", code=2)
