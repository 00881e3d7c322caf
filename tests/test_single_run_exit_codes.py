"""single_run.py: each row of the exit table, with its JSON line byte for byte."""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, PROBE, SINGLE, UNPRIVILEGED, Fifo, ended, json_line, run_cli, single, started, without

CODES = (0, 1, 2, 3, 42, 75, 125, 126, 127, 128, 130, 255)
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ, 34, 64)
AFTER_SIGINT = (("on:INT=0",), ("on:INT=7",), ("on:INT=75",), ("ignore:INT", "on:USR1=3"))

LOCKS = (  # the lock path in a folder with one thing of each kind (see `things`), its reason
    ("missing/lock", "lock_parent_not_found"),
    ("missing/parent/lock", "lock_parent_not_found"),
    ("closed/lock", "lock_permission_denied"),
    ("readonly/lock", "lock_permission_denied"),
    ("unreadable", "lock_permission_denied"),
    ("unwritable", "lock_permission_denied"),
    ("folder", "lock_open_failed"),
    ("folder/", "lock_open_failed"),
    (".", "lock_open_failed"),
    ("link", "lock_open_failed"),
    ("dangling", "lock_open_failed"),
    ("loop", "lock_open_failed"),
    ("link-to-folder", "lock_open_failed"),
    ("socket", "lock_open_failed"),
    ("file/x", "lock_open_failed"),
    ("n" * 300, "lock_open_failed"),
    ("fifo", "lock_not_regular_file"),
    ("/dev/null", "lock_not_regular_file"),
    ("/dev/tty0", "lock_not_regular_file"),
    ("foreign", "lock_file_has_foreign_content"),
)
COMMANDS = (  # argv[0] in the same folder, its reason
    ("no-such-program", "command_not_found"),
    ("./missing", "command_not_found"),
    ("/missing/x", "command_not_found"),
    ("./interpreter-missing", "command_not_found"),
    ("", "command_not_executable"),
    ("./folder", "command_not_executable"),
    ("/", "command_not_executable"),
    ("./mode-644", "command_not_executable"),
    ("./text", "child_start_failed"),
)
REFUSALS = (  # the kernel refuses a call (strace arranges that), the reason
    (("-P", "lock", "-e", "inject=fstat,newfstatat:error=EIO"), "lock_stat_failed"),
    (("-P", "lock", "-e", "inject=flock:error=ENOLCK"), "lock_acquire_failed"),
    (("-P", "lock", "-e", "inject=ftruncate,pwrite64,write:error=EIO"), "lock_metadata_write_failed"),
)
FILES = (
    ("file", "", 0o644),
    ("foreign", "keep me\n", 0o644),
    ("unreadable", "", 0o200),
    ("unwritable", "", 0o400),
    ("text", "true\n", 0o755),
    ("mode-644", "#!/bin/sh\n", 0o644),
    ("interpreter-missing", "#!/missing/x\n", 0o755),
)
BYTES_IN_NAMES = (
    b'"quoted" and back\\slash',
    bytes(range(1, 32)),
    b"\x7f",
    "žluťoučký 鍵 🔒".encode(),
    "\u2028\u2029\ufeff".encode(),
    b"\xff",
    b"cut \xe9\x8d",
    b"\xed\xb3\xbf",
    b"\\udcff \\u0041",
    b"$HOME * `id`",
)


@pytest.fixture
def things(here: Path) -> Path:
    for folder, mode in (("folder", 0o755), ("closed", 0o000), ("readonly", 0o555)):
        (here / folder).mkdir(mode)
    for name, text, mode in FILES:
        (here / name).write_text(text)
        (here / name).chmod(mode)
    for link, target in (("link", "file"), ("dangling", "nowhere"), ("loop", "loop"), ("link-to-folder", "folder")):
        (here / link).symlink_to(target)
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("socket")
    return here


@pytest.fixture
def held(here: Path) -> Path:
    """A lock that this process holds until the test ends."""
    lock = here / "held"
    fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    return lock


@pytest.mark.parametrize("code", CODES)
def test_the_commands_own_code(here: Path, code: int) -> None:
    end = single("lock", "sh", "-c", f"exit {code}", code=code)
    assert (end.stdout, end.stderr) == (b"", b"")


@pytest.mark.parametrize("number", SIGNALS)
def test_the_command_dies_of_a_signal(here: Path, number: int) -> None:
    end = single("lock", "bash", "-c", f"kill -{number} $$", code=128 + number)
    assert (end.stdout, end.stderr) == (b"", b"")


@pytest.mark.parametrize("words", AFTER_SIGINT)
def test_130_after_sigint_whatever_the_command_returns(here: Path, fifo: Fifo, words: tuple[str, ...]) -> None:
    run = started(SINGLE, "--lock", "lock", "--", *PROBE, fifo.path, *words, "say:{pid}", "wait")
    job = int(fifo.line())
    run.send_signal(signal.SIGINT)
    if "ignore:INT" in words:
        os.kill(job, signal.SIGUSR1)
    end = ended(run, 130)
    assert (end.stdout, end.stderr) == (b"", b"")


@pytest.mark.parametrize("given", ("held", "./held", "../here/held", "{here}/held"))
def test_busy(held: Path, given: str) -> None:
    given = given.format(here=held.parent)
    end = single(given, "echo", "started", code=75)
    assert (end.stdout, end.stderr) == (b"", json_line(status="busy", reason="lock_held", lock=given))


@pytest.mark.parametrize(("lock", "reason"), LOCKS)
def test_no_lock(things: Path, lock: str, reason: str) -> None:
    before = sorted(os.listdir())
    end = run_cli(*UNPRIVILEGED, SINGLE, "--lock", lock, "--", "echo", "started", code=3)
    assert (end.stdout, end.stderr) == (b"", json_line(status="error", reason=reason, lock=lock))
    assert sorted(os.listdir()) == before and (things / "foreign").read_text() == "keep me\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
@pytest.mark.parametrize(("mode", "code"), ((0o600, 3), (0o666, 0)))
def test_another_users_file_in_a_sticky_folder(here: Path, mode: int, code: int) -> None:
    """0: fs.protected_regular or not, a lock on it is a lock. Nothing is asked of the record."""
    here.chmod(0o1777)
    Path("theirs").touch()
    Path("theirs").chmod(mode)
    os.chown("theirs", 65534, 65534)
    end = run_cli(*UNPRIVILEGED, SINGLE, "--lock", "theirs", "--", "echo", "started", code=code)
    denied = json_line(status="error", reason="lock_permission_denied", lock="theirs")
    assert (end.stdout, end.stderr) == ((b"", denied) if code else (b"started\n", b""))


@pytest.mark.parametrize(("command", "reason"), COMMANDS)
def test_no_start(things: Path, command: str, reason: str) -> None:
    end = single("lock", command, "argument", code=3)
    assert (end.stdout, end.stderr) == (b"", json_line(status="error", reason=reason, command=command))
    single("lock", "true", code=0)


def test_no_room_for_the_record(here: Path) -> None:
    end = single("lock", "echo", "started", code=3, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert (end.stdout, end.stderr) == (b"", json_line(status="error", reason="lock_metadata_write_failed", lock="lock"))
    assert Path("lock").read_bytes() == b""


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize(("arrangement", "reason"), REFUSALS)
def test_the_kernel_refuses(here: Path, arrangement: tuple[str, ...], reason: str) -> None:
    lock = str(here / "lock")
    words = [lock if word == "lock" else word for word in arrangement]
    end = run_cli("strace", "-f", "-qq", "-o", os.devnull, *words, SINGLE, "--lock", lock, "--", "echo", "started", code=3)
    assert (end.stdout, end.stderr) == (b"", json_line(status="error", reason=reason, lock=lock))


def test_the_unexpected_is_one_line(here: Path) -> None:
    """With 10 descriptors at most the lock cannot become descriptor 10."""
    end = single("lock", "echo", "started", code=3, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)))
    assert end.stdout == b"" and end.stderr.count(b"\n") == 1 and json.loads(end.stderr)["status"] == "error"


@pytest.mark.parametrize("locale", ("C.UTF-8", "C"))
def test_quoting(here: Path, locale: str) -> None:
    """Each line parses, and os.fsencode gives the bytes back."""
    runs = []
    for name in BYTES_IN_NAMES:
        Path(os.fsdecode(name)).write_text("foreign")
        missing = name + b" missing"
        for lock, command, fields in (
            (name, b"true", {"reason": "lock_file_has_foreign_content", "lock": os.fsdecode(name)}),
            (name + b" free", missing, {"reason": "command_not_found", "command": os.fsdecode(missing)}),
        ):
            runs.append((started(SINGLE, "--lock", lock, "--", command, env={**CLEAN_ENV, "LC_ALL": locale}), fields))
    for run, fields in runs:
        end = ended(run, 3)
        assert end.stderr == json_line(status="error", **fields)
        assert json.loads(end.stderr.decode()) == {"status": "error", **fields}


@pytest.mark.parametrize(
    ("words", "code"),
    (
        (("--lock", "held", "--", "true"), 75),
        (("--lock", "missing/lock", "--", "true"), 3),
        (("--lock", "lock", "--", "./missing"), 3),
        (("--lock",), 2),
    ),
)
def test_an_ending_keeps_its_code_when_its_line_cannot_be_written(held: Path, words: tuple[str, ...], code: int) -> None:
    with open("/dev/full", "wb") as full:
        run_cli(SINGLE, *words, code=code, stderr=full)
    run_cli(SINGLE, *words, code=code, preexec_fn=without(2))
    reader, writer = os.pipe()
    os.close(reader)
    run_cli(SINGLE, *words, code=code, stderr=writer)
    os.close(writer)


def test_help_shows_the_table() -> None:
    shown = run_cli(SINGLE, "--help", code=0).stdout.decode()
    for code in (0, 2, 3, 75, 130):
        assert re.search(rf"^ *{code} ", shown, re.MULTILINE)
