"""README, install: however the scripts come to a host, they do the same, and what is built holds what it must."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, HANG_S, PROBE, PYTHON, RETRY, ROOT, SINGLE, Fifo, ended, event, failed, run_cli, started

from retry_command import VERSION

pytestmark = pytest.mark.field
BLOCK = (ROOT / "README.md").read_text().partition("\n## Install\n\n```sh\n")[2].partition("```")[0]
QUICK = ("--retry-code", "75", "--initial-delay-ms", "0", "--max-attempts", "2", "--")
LOCK = ("--lock", "lock", "--")
BUSY = b'{"status":"busy","reason":"lock_held","lock":"lock"}\n'
NO_COMMAND = b'{"status":"error","reason":"invalid_arguments","message":"-- COMMAND is missing"}\n'
WAYS = ("copied", "symlink", "venv", "wheel", "sdist", "pipx")


def shell(command: str, cwd: Path, **more: object) -> None:
    """Lines of the README, or like it; pip needs the environment that it was configured in."""
    env = {**os.environ, "PATH": CLEAN_ENV["PATH"], **{name: str(value) for name, value in more.items()}}
    words = ("sh", "-ec", command)
    end = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=4 * HANG_S, check=False)
    if end.returncode:
        raise RuntimeError(f"{command}\n{end.stdout}{end.stderr}")


def lines(*starts: str) -> str:
    """The README's lines that begin so."""
    found = [line for line in BLOCK.splitlines() if line.startswith(starts)]
    assert len(found) == len(starts)
    return "\n".join(found)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, so that nothing is left in it."""
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.lock")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "copy", ignore=unwanted)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with pip, build and pipx."""
    venv = tmp_path_factory.mktemp("tools")
    try:
        shell(f"{PYTHON} -m venv {venv} && {venv}/bin/pip install --quiet build pipx 'setuptools>=77'", venv)
    except RuntimeError as e:
        pytest.skip(f"needs venv, pip and PyPI: {str(e).strip().splitlines()[-1]}")
    return f"{venv}/bin:{CLEAN_ENV['PATH']}"


@pytest.fixture(scope="module")
def dist(tree: Path, tools: str) -> Path:
    shell("python3 -m build && " + lines("pip wheel"), tree, PATH=tools)
    return tree / "dist"


@pytest.fixture(scope="module", params=WAYS)
def commands(request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Both commands' names in PATH, after an installation in a folder with a space in its name."""
    way: str = request.param
    home = tmp_path_factory.mktemp(way) / "a b"
    target = home / "bin"
    names = ("retry-command", "single-run")
    if way in ("copied", "symlink"):
        target.mkdir(parents=True)
        names = (RETRY.name, SINGLE.name)
    if way == "copied":
        shell(lines("install ").replace("/usr/local/bin", f"'{target}'"), tree)
    elif way == "symlink":
        for name in names:
            shutil.copy(tree / name, home)
            (target / name).symlink_to(f"../{name}")
    else:
        tools = request.getfixturevalue("tools")
        if way == "venv":
            shell(lines("python3 -m venv").replace("/opt/retry", f"'{home}'"), tree, PATH=tools)
        elif way == "pipx":
            shell(lines("pipx "), tree, PATH=tools, PIPX_HOME=home, PIPX_BIN_DIR=target, PIPX_MAN_DIR=home / "man")
        else:
            dist = request.getfixturevalue("dist")
            install = lines("pip install --no-index") if way == "wheel" else "pip install dist/*.tar.gz"
            shell(f"python3 -m venv --without-pip '{home}'; PIP_PYTHON='{home}' {install}", dist.parent, PATH=tools)
    path = CLEAN_ENV["PATH"]
    CLEAN_ENV["PATH"] = f"{target}:{path}"
    yield names
    CLEAN_ENV["PATH"] = path


TWICE = 'echo "$RETRY_WRAPPER_ATTEMPT"; [ "$RETRY_WRAPPER_ATTEMPT" = 2 ] || exit 75'
FAILS = failed(75, 1, 0, 2) + b"no\n" + failed(75, 2, None, 2) + b"no\n"
NOT_FOUND = event("launch_error", attempt=1, max_attempts=2, kind="not_found", retrying=False)
USAGE = b"usage: NAME --retry-code CODES [OPTIONS] -- COMMAND [ARG ...]\nNAME: error: "
CASES = {
    "success": (0, (*QUICK, "echo", "done"), 0, b"done\n", b""),
    "retry": (0, (*QUICK, "sh", "-c", TWICE), 0, b"2\n", b""),
    "final failure": (0, (*QUICK, "sh", "-c", "echo lost; echo no >&2; exit 75"), 75, b"", FAILS),
    "no such program": (0, (*QUICK, "./none"), 127, b"", NOT_FOUND),
    "usage": (0, (), 2, b"", USAGE + b"the following arguments are required: --retry-code\n"),
    "version": (0, ("--version",), 0, f"retry_command.py {VERSION}\n".encode(), b""),
    "stdin": (0, (*QUICK, "readlink", "/proc/self/fd/0"), 0, b"/dev/null\n", b""),
    "lock": (1, (*LOCK, "sh", "-c", "echo done; exit 7"), 7, b"done\n", b""),
    "lock usage": (1, ("--lock", "lock"), 2, b"", NO_COMMAND),
    "lock version": (1, ("--version",), 0, f"single_run.py {VERSION}\n".encode(), b""),
    "lock stdin": (1, (*LOCK, "readlink", "/proc/self/fd/0"), 0, b"/dev/null\n", b""),
}


@pytest.mark.parametrize("case", CASES)
def test_however_installed_it_does_the_same(commands: tuple[str, str], here: Path, case: str) -> None:
    which, words, code, out, err = CASES[case]
    end = run_cli(commands[which], *words, code=code, input=b"not for the job")
    assert (end.stdout, end.stderr) == (out, err.replace(b"NAME", commands[0].encode()))


def test_both_together_while_the_lock_is_busy_and_until_a_stop(commands: tuple[str, str], here: Path, fifo: Fifo) -> None:
    retry, single = commands
    run = started(single, *LOCK, retry, *QUICK, *PROBE, fifo.path, "on:TERM=9", "say:begun", "wait")
    assert fifo.line() == "begun"
    busy = run_cli(single, *LOCK, "echo", "ran", code=75)
    assert (busy.stdout, busy.stderr) == (b"", BUSY)
    run.send_signal(signal.SIGTERM)
    assert fifo.until_gone() == ["got SIGTERM"]
    assert ended(run, 143).stdout == b""


def test_what_is_built(dist: Path, tmp_path: Path) -> None:
    """The wheel: two files and one version. The sdist: its tests can be run."""
    stem = f"retry_command_single_run-{VERSION}"
    with zipfile.ZipFile(dist / f"{stem}-py3-none-any.whl") as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {"retry_command.py", "single_run.py", f"{stem}.dist-info"}
        assert f"\nVersion: {VERSION}\n" in wheel.read(f"{stem}.dist-info/METADATA").decode()
        assert wheel.read("retry_command.py") == RETRY.read_bytes() and wheel.read("single_run.py") == SINGLE.read_bytes()
    shell(f"tar -xf '{dist / stem}.tar.gz'", tmp_path)
    for file in (ROOT / "LICENSE", ROOT / "README.md", ROOT / "demo_job.py", *(ROOT / "tests").glob("*.py")):
        assert (tmp_path / stem / file.relative_to(ROOT)).read_bytes() == file.read_bytes()
    assert f"\nVersion: {VERSION}\n" in (tmp_path / stem / "PKG-INFO").read_text()
    shell(f"'{sys.executable}' -m pytest --quiet tests/test_demo_job.py tests/test_twins.py", tmp_path / stem)
