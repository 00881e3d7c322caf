"""What the job gets besides its arguments: environment, stdin, descriptors, signals; and what cannot get into the wrapper."""

import itertools
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import CLEAN_ENV, ISOLATED, PYTHON, RETRY, RETRY_75, ROOT, at_entry, failed, run_cli

Environment = dict[bytes, bytes]
OURS = {b"RETRY_WRAPPER_ATTEMPT=1", b"RETRY_WRAPPER_MAX_ATTEMPTS=3", b"RETRY_WRAPPER_RETRY_AFTER_FILE=/proc/N/fd/N"}
SHOW_ENVIRONMENT = ("--", "/bin/cat", "/proc/self/environ")  # as it is: env(1) and shells have ideas of their own
UTF8 = b"LC_ALL=C.UTF-8"


def entries(environ: bytes) -> list[bytes]:
    assert environ.endswith(b"\0")
    return sorted(re.sub(rb"/proc/\d+/fd/\d+", b"/proc/N/fd/N", environ[:-1]).split(b"\0"))


ENVIRONMENTS: tuple[Environment, ...] = (
    {},
    {b"A": b"1", b"LANG": b"C"},
    {b"LC_CTYPE": b"C"},
    {b"LC_ALL": b"C"},
    {b"LC_ALL": b"POSIX", b"LC_CTYPE": b"UTF-8"},
    {b"A": b"", b"B": b"=", b"C": b"a\nb", b"D": b"\xff\xfe", b"\xff": b"x", b"a b": b"x", b"LANG": b"C"},
    {b"PYTHONPATH": b"/no/such", b"PYTHONHOME": b"/no/such", b"PYTHONUTF8": b"0", b"PYTHONSTARTUP": b"x", b"PYTHONVERBOSE": b"1"},
    {b"TMPDIR": b"/no/such", b"COLUMNS": b"1", b"PATH": b"", b"IFS": b"x", b"_": b"x"},
)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_the_jobs_environment_is_the_callers(environment: Environment) -> None:
    done = run_cli(*ISOLATED, *RETRY_75, *SHOW_ENVIRONMENT, env=environment, code=0)
    assert entries(done.stdout) == sorted({name + b"=" + value for name, value in environment.items()} | OURS)


def test_also_when_started_by_path() -> None:
    done = run_cli(*RETRY_75, *SHOW_ENVIRONMENT, env={**CLEAN_ENV, "PYTHONPATH": "/no/such"}, code=0)
    given = {f"{name}={value}".encode() for name, value in CLEAN_ENV.items()}
    assert entries(done.stdout) == sorted(given | OURS | {b"PYTHONPATH=/no/such"})


def test_the_callers_values_of_our_variables_are_replaced() -> None:
    mine = {**CLEAN_ENV, "RETRY_WRAPPER_ATTEMPT": "9", "RETRY_WRAPPER_MAX_ATTEMPTS": "9", "RETRY_WRAPPER_OTHER": "9"}
    job = ("sh", "-c", "[ $RETRY_WRAPPER_ATTEMPT = 3 ] || exit 75; env | grep RETRY_ | grep -v _FILE= | sort")
    variables = run_cli(*RETRY_75, "--max-attempts", "4", "--", *job, env=mine, code=0).stdout
    assert variables == b"RETRY_WRAPPER_ATTEMPT=3\nRETRY_WRAPPER_MAX_ATTEMPTS=4\nRETRY_WRAPPER_OTHER=9\n"


EXEC = """if True:
    import ctypes, os, sys
    words = [os.fsencode(word) for word in sys.argv[1:]]
    split = words.index(b"EXEC")
    array = lambda words: (ctypes.c_char_p * (len(words) + 1))(*words)
    ctypes.CDLL(None).execve(words[split + 1], array(words[split + 1:]), array(words[:split]))
"""
RAW: tuple[tuple[tuple[bytes, ...], set[bytes]], ...] = (  # environ, what the job must have of it
    ((b"A=1", b"A=2", b"B=3", b"A=4"), {b"A=1", b"B=3"}),  # getenv(3) sees the first
    ((b"=x", b"A=1", b"=", b"==", b""), {b"A=1"}),
    ((b"A=1", b"NAME-ALONE", b"B=2"), {b"A=1", b"B=2"}),
    ((b"RETRY_WRAPPER_ATTEMPT=8", b"RETRY_WRAPPER_ATTEMPT=9"), set()),
)


@pytest.mark.parametrize(("environ", "seen"), RAW)
def test_entries_that_no_shell_makes(environ: tuple[bytes, ...], seen: set[bytes]) -> None:
    show = "import os, sys; sys.stdout.buffer.write(b''.join(b'%s=%s\\0' % pair for pair in os.environb.items()))"
    job = (*ISOLATED, "-c", show)
    words = (*ISOLATED, *RETRY_75, "--", *job)
    done = run_cli(*ISOLATED, "-c", EXEC, *environ, UTF8, "EXEC", *words, code=0)
    assert entries(done.stdout) == sorted(seen | OURS | {UTF8})


# whatever the script may import, now or later; and what Python itself imports before its first line
MODULES = """
    _signal argparse bisect collections contextlib copy ctypes dataclasses datetime enum errno fcntl functools gettext hashlib
    inspect itertools json linecache locale logging math operator pathlib random re select selectors shlex shutil signal socket
    sqlite3 string struct subprocess tempfile termios textwrap threading time token tokenize traceback types typing uuid warnings
"""
AT_STARTUP = "abc codecs encodings genericpath io os posixpath site sitecustomize stat sys usercustomize"
HIJACKS = (  # how it is started, in PYTHONPATH, in the current folder; always beside the script
    (("{folder}/retry_command.py",), "{folder}", "{folder}"),
    (("./retry_command.py",), ".", "{folder}"),
    (("{folder}/retry_command.py",), "", "{folder}"),
    (("{folder}/retry_command.py",), "{folder}", "/"),
    ((PYTHON, "{folder}/retry_command.py"), None, "{folder}"),
    ((PYTHON, "retry_command.py"), None, "{folder}"),
    ((PYTHON, "{folder}/retry_command.py"), None, "/"),
    ((PYTHON, "-S", "./retry_command.py"), None, "{folder}"),
    ((*ISOLATED, "retry_command.py"), "{folder}", "{folder}"),
)


@pytest.mark.parametrize(("command", "python_path", "cwd"), HIJACKS)
def test_no_foreign_module_is_run(tmp_path: Path, command: tuple[str, ...], python_path: str | None, cwd: str) -> None:
    shutil.copy(RETRY, tmp_path)
    for module in (MODULES + AT_STARTUP).split():
        (tmp_path / f"{module}.py").write_text("raise SystemExit('hijacked by ' + __name__)\n")
    env = dict(CLEAN_ENV) if python_path is None else {**CLEAN_ENV, "PYTHONPATH": python_path.format(folder=tmp_path)}
    words = [word.format(folder=tmp_path) for word in command]
    job = ("sh", "-c", 'echo "${PYTHONPATH-none}"; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75')
    options = ("--retry-code", "75", "--initial-delay-ms", "0", "--")
    done = run_cli(*words, *options, *job, env=env, cwd=cwd.format(folder=tmp_path), code=0)
    assert (done.stdout.decode(), done.stderr) == (env.get("PYTHONPATH", "none") + "\n", b"")


def test_no_foreign_module_by_interpreter_and_python_path(tmp_path: Path) -> None:
    """What Python itself imports before the script's first line is out of its reach; the rest is not."""
    for module in MODULES.split():
        (tmp_path / f"{module}.py").write_text("raise SystemExit('hijacked by ' + __name__)\n")
    env = {**CLEAN_ENV, "PYTHONPATH": str(tmp_path)}
    done = run_cli(PYTHON, "-S", *RETRY_75, "--", "sh", "-c", "echo $PYTHONPATH", env=env, code=0)
    assert (done.stdout.decode(), done.stderr) == (f"{tmp_path}\n", b"")


def test_stdin_is_empty() -> None:
    done = run_cli(*RETRY_75, "--", "sh", "-c", "readlink /proc/self/fd/0; cat", input=b"not for the job", code=0)
    assert done.stdout == b"/dev/null\n"


def test_our_stdin_is_left_alone() -> None:
    loop = 'while read line; do "$@" && echo $line; done'
    done = run_cli("sh", "-c", loop, "sh", *RETRY_75, "--", "cat", input=b"one\ntwo\nthree\n", code=0)
    assert done.stdout == b"one\ntwo\nthree\n"
    run_cli(*RETRY_75, "--", "true", input=bytes(10_000_000), code=0)


def test_inherited_descriptors_reach_every_attempt(tmp_path: Path) -> None:
    files = " ".join(f"{fd}>>{fd}" for fd in range(3, 10))
    job = "for fd in 3 4 5 6 7 8 9; do echo $fd >&$fd; done; exit 75"
    run_cli("sh", "-c", f'exec "$@" {files}', "sh", *RETRY_75, "--", "sh", "-c", job, cwd=tmp_path, code=75)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(fd): f"{fd}\n" * 3 for fd in range(3, 10)}


def test_no_descriptor_of_ours_reaches_the_job() -> None:
    done = run_cli("sh", "-c", 'exec "$@" 5</dev/null', "sh", *RETRY_75, "--", "ls", "/proc/self/fd", code=0)
    assert done.stdout.split() == [b"0", b"1", b"2", b"3", b"5"]  # 3 is what ls reads


def test_closed_descriptors_stay_so_for_the_job_where_it_has_none() -> None:
    run_cli("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *RETRY_75, "--", "sh", "-c", "[ ! -e /proc/self/fd/3 ]", code=0)


CLOSED = [" ".join(closed) for closed in itertools.product(("", "<&-"), ("", ">&-"), ("", "2>&-"))]


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_descriptors(tmp_path: Path, closed: str) -> None:
    """No output lands in a file of another, and what cannot be written is no success."""
    (tmp_path / "data").write_text("untouched")
    out_gone, err_gone = " >&-" in f" {closed}", "2>&-" in closed
    wrapper = ("sh", "-c", f'exec "$@" 3<>data {closed}', "sh", *RETRY_75, "--", "sh", "-c")
    spoken = run_cli(*wrapper, "echo out; echo err >&2", cwd=tmp_path, code=125 if out_gone or err_gone else 0)
    assert spoken.stdout == (b"" if out_gone else b"out\n")
    assert b"Traceback" not in spoken.stderr
    quiet = run_cli(*wrapper, "! read word && readlink /proc/self/fd/0 | grep -qx /dev/null", cwd=tmp_path, code=0)
    assert quiet.stdout + quiet.stderr == b""
    lost = run_cli(*wrapper, "echo out; echo err >&2; exit 65", cwd=tmp_path, code=65)
    assert (lost.stdout, lost.stderr) == (b"", b"" if err_gone else failed(65) + b"err\n")
    assert (tmp_path / "data").read_text() == "untouched" and len(list(tmp_path.iterdir())) == 1


ENTRIES: tuple[tuple[set[int], set[int]], ...] = (  # ignored, blocked
    (set(), set()),
    ({signal.SIGHUP}, set()),
    ({signal.SIGINT, signal.SIGQUIT}, set()),
    ({signal.SIGTERM, signal.SIGUSR1, signal.SIGWINCH, signal.SIGRTMIN + 3}, set()),
    ({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}, set()),
    (set(), {signal.SIGTERM}),
    (set(), {*signal.valid_signals()}),
    ({signal.SIGHUP, signal.SIGUSR1}, {signal.SIGHUP, signal.SIGUSR2}),
)


def signals_of(*start: Any, **more: Any) -> list[int]:
    """What a program started so has blocked, ignored and caught; without 32 and 33, which are glibc's own."""
    shown = run_cli(*start, "grep", "^Sig[BIC]", "/proc/self/status", code=0, **more).stdout  # no shell: dash changes its mask
    return [int(line.split()[1], 16) & ~(0b11 << 31) for line in shown.splitlines()]


@pytest.mark.parametrize(("ignored", "blocked"), ENTRIES)
def test_the_jobs_signals_are_the_callers(ignored: set[int], blocked: set[int]) -> None:
    entry = at_entry(ignored, blocked)
    assert signals_of(*RETRY_75, "--", preexec_fn=entry) == signals_of(preexec_fn=entry)


@pytest.mark.parametrize("number", (signal.SIGPIPE, signal.SIGXFSZ))
def test_what_python_ignores_is_back_to_default(number: int) -> None:
    assert signals_of(*RETRY_75, "--", preexec_fn=at_entry({number})) == signals_of()


CHILDREN = (("exit 0", 0), ("exit 65", 65), ("exit 75", 75), ("kill -9 $$", 137), ("sleep 0.1; exit 3", 3))


@pytest.mark.parametrize(("job", "code"), CHILDREN)
def test_a_caller_that_ignores_its_children(job: str, code: int) -> None:
    run_cli(*RETRY_75, "--", "sh", "-c", job, preexec_fn=at_entry({signal.SIGCHLD}), code=code)


def test_the_current_folder_and_umask_are_the_callers(tmp_path: Path) -> None:
    done = run_cli(*RETRY_75, "--", "sh", "-c", "pwd -P; umask", cwd=tmp_path, umask=0o137, code=0)
    assert done.stdout == os.fsencode(tmp_path.resolve()) + b"\n0137\n"


def test_an_installed_commands_python_winds_up_in_peace() -> None:
    """It calls main() and may take its time afterwards, without our handlers."""
    slow_end = "Slow = type('Slow', (), {'__del__': lambda self, sleep=time.sleep: sleep(0.3)}); slow = Slow()"
    program = f"import sys, time; from retry_command import main; {slow_end}; sys.exit(main())"
    done = run_cli(PYTHON, "-c", program, *RETRY_75[1:], "--", "echo", "x", cwd=ROOT, code=0)
    assert (done.stdout, done.stderr) == (b"x\n", b"")
