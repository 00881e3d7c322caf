"""A host of a test's own: its /run, /opt, programs and users are folders and files of the test, seen in namespaces alone."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PROBE, RETRY, SINGLE, UNSHARE, Fifo, json_line, needs_namespaces, opened_fifo, run_cli

BILL, STRANGER = 65533, 65534
CRON_PATH = "/usr/bin:/bin"
AS_BILL, AS_STRANGER = (f"setpriv --reuid={uid} --regid={uid} --clear-groups" for uid in (BILL, STRANGER))
# The tests' own Python may be in a folder that other users may not enter, and is not where cron looks for it.
SYSTEM_PYTHON = "/usr/bin/python3 -ISc 'import sys; sys.exit(sys.version_info < (3, 10))'"
needs_system_python = pytest.mark.skipif(
    subprocess.run(["sh", "-c", SYSTEM_PYTHON], check=False, capture_output=True).returncode != 0,
    reason="needs Python 3.10 or newer as /usr/bin/python3",
)
PROBE_THERE = ("/usr/bin/python3", "-IS", "/opt/probe.py", "/opt/fifo")
BUSY = json_line(status="busy", reason="lock_held", lock="/run/bill/bill.lock")
FIELD = [pytest.mark.field, needs_namespaces, needs_system_python]


class Host:
    """What is written below its root is there for the commands that it runs; all that they leave behind ends with them."""

    def __init__(self, root: Path):
        self.root = root
        for folder in ("run", "opt/bill", "usr/local/bin"):
            (root / folder).mkdir(parents=True)
        for script in (RETRY, SINGLE):
            shutil.copy(script, root / "usr/local/bin")
        shutil.copy(PROBE[-1], root / "opt")
        self.write("etc/passwd", Path("/etc/passwd").read_text() + f"bill:*:{BILL}:{BILL}::/:/bin/sh\n")
        self.write("etc/group", Path("/etc/group").read_text() + f"bill:*:{BILL}:\n")
        places = ("run", "opt", "usr/local/bin", "etc/passwd", "etc/group")
        self.mounts = [(str(root / place), f"/{place}") for place in places]

    def write(self, path: str, text: str, mode: int = 0o644) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file

    def program(self, path: str, script: str) -> Path:
        return self.write(path, f"#!/bin/sh\n{script}\n", 0o755)

    def folder(self, path: str, mode: int, owner: int = 0) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, owner, owner)
        folder.chmod(mode)
        return folder

    def opened_fifo(self) -> Iterator[Fifo]:
        """What a probe of any user there (PROBE_THERE) writes to."""
        path = self.root / "opt/fifo"
        path.unlink(missing_ok=True)
        for channel in opened_fifo(path):
            path.chmod(0o666)
            yield channel

    def command(self, *argv: Any) -> tuple[Any, ...]:
        mounts = "".join(f"mount --bind {source} {target} && " for source, target in self.mounts)
        return (*UNSHARE, "sh", "-c", f'{mounts}exec "$@"', "sh", *argv)

    def run(self, *argv: Any, code: int | None = None) -> subprocess.CompletedProcess[bytes]:
        env = {"PATH": f"/usr/local/bin:{CRON_PATH}:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
        return run_cli(*self.command(*argv), code=code, env=env)


def begun_with_a_child(fifo: Fifo) -> None:
    """Come back when a probe with the words `fork ... say:begun` and its child have begun."""
    assert sorted(fifo.line().split()[0] for _ in range(3)) == ["begun", "begun", "child"]


def cgroup2() -> list[str]:
    """Where it is mounted, if it is."""
    return run_cli("findmnt", "--noheadings", "--types=cgroup2", "--output=TARGET").stdout.decode().split()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")
