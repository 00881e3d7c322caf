"""Several users on one host: whose lock is where, who can hold it against whom, and what becomes of it beyond sudo."""

import os
import re
import shutil

import pytest
from conftest import ROOT
from private_host import AS_BILL, AS_STRANGER, BILL, FIELD, Host, host

__all__ = ["host"]
pytestmark = FIELD
README = (ROOT / "README.md").read_text()
(TMPFILES,) = re.findall(r"```text\n(# /etc/tmpfiles.d/bill.conf\n.*?)```", README, re.DOTALL)
AS_ROOT = ""
# The stranger comes first. His background process holds the lock until the host is gone; then three runs of the victim's.
FIRST_COME = (
    f"""{AS_STRANGER} sh -c 'umask $1; exec 9>>"$0/bill.lock" && flock --nonblock 9 && (sleep 1000 >&- 2>&- &)' $0 $1 2>&-"""
    "; echo stranger $?; for i in 1 2 3; do {victim} single_run.py --lock $0/bill.lock -- echo ran; echo $?; done"
)
# All above the job is killed: the wrapper, and what is between the two.
KILLED = r"""{line} &
read -r user job </run/ready && read -r _ _ _ parent _ </proc/$job/stat && echo $user
kill -KILL $(sed 's/.*"owner_pid":\([0-9]*\).*/\1/' $0) $parent && wait
while grep -q 'State:.[^Z]' /proc/$parent/status; do sleep 0.01; done
single_run.py --lock $0 -- true; echo $?
kill -0 $job && echo lives"""


def test_the_readmes_folder(host: Host) -> None:
    if not shutil.which("systemd-tmpfiles"):
        pytest.skip("needs systemd-tmpfiles")
    host.write("opt/bill.conf", TMPFILES)
    make = "systemd-tmpfiles --create /opt/bill.conf && stat -c '%U %G %a' /run/bill"
    outer = f'{AS_BILL} single_run.py --lock /run/bill/bill.lock -- sh -c "$0"'
    inner = "stat -c '%U %a' /run/bill/bill.lock; single_run.py --lock /run/bill/bill.lock -- echo never"
    end = host.run("sh", "-c", f"{make} && {outer}", inner, code=75)
    assert end.stdout == b"bill bill 700\nbill 600\n"
    assert end.stderr == b'{"status":"busy","reason":"lock_held","lock":"/run/bill/bill.lock"}\n'


@pytest.mark.parametrize(
    ("folder", "mode", "owner", "umask", "victim", "code"),
    (
        ("/run/lock", 0o1777, 0, "0", AS_BILL, 75),
        ("/run/lock", 0o1777, 0, "0", AS_ROOT, 75),
        ("/run/lock", 0o1777, 0, "077", AS_BILL, 3),
        ("/run/lock", 0o1777, 0, "077", AS_ROOT, 75),
        ("/run/bill", 0o700, BILL, "0", AS_BILL, 0),
        ("/run/bill", 0o755, BILL, "0", AS_BILL, 0),  # RuntimeDirectory='s mode
        (f"/run/user/{BILL}", 0o700, BILL, "0", AS_BILL, 0),  # an XDG_RUNTIME_DIR
        ("/run", 0o755, 0, "0", AS_ROOT, 0),
    ),
)
def test_who_comes_first(host: Host, folder: str, mode: int, owner: int, umask: str, victim: str, code: int) -> None:
    """In a world-writable folder a stranger holds the lock for ever; in a folder of its user's he cannot even create it."""
    host.folder(folder.lstrip("/"), mode, owner)
    words = host.run("sh", "-c", FIRST_COME.format(victim=victim), folder, umask).stdout.decode().split()
    assert (words[1] == "0") == bool(code)
    assert words[2:] == 3 * ([str(code)] if code else ["ran", "0"])


def test_the_lock_of_another_user_is_left_alone(host: Host) -> None:
    """Once it is there, a stranger cannot take it, though he may look for it (mode 0755): it is 0600."""
    host.folder("run/bill", 0o755, BILL)
    line = "single_run.py --lock /run/bill/bill.lock -- true"
    script = f"{AS_BILL} {line}; {AS_STRANGER} flock /run/bill/bill.lock echo has it; echo $?; {AS_STRANGER} {line}; echo $?"
    end = host.run("sh", "-c", script)
    assert end.stdout == b"66\n3\n" and b'"reason":"lock_permission_denied"' in end.stderr
    assert (host.root / "run/bill/bill.lock").stat().st_uid == BILL


@pytest.mark.parametrize(
    ("line", "kept"),
    (
        (f"single_run.py --lock /run/bill.lock -- {AS_BILL} /opt/bill/job", True),
        ("single_run.py --lock /run/bill.lock -- runuser -u bill -- /opt/bill/job", True),
        ("sudo -n -u bill /usr/local/bin/single_run.py --lock /run/bill/bill.lock -- /opt/bill/job", True),
        ("single_run.py --lock /run/bill.lock -- sudo -n -u bill /opt/bill/job", False),
    ),
    ids=("setpriv inside", "runuser inside", "sudo outside", "sudo inside"),
)
def test_another_users_job_outlives_all_above_it(host: Host, line: str, kept: bool) -> None:
    """Whether the lock lives as long as the job: sudo gives it no descriptors but 0 to 2, so it belongs outside."""
    if not shutil.which(program := re.findall("setpriv|runuser|sudo", line)[0]):
        pytest.skip(f"needs {program}")
    host.folder("run/bill", 0o700, BILL)
    os.mkfifo(host.root / "run/ready")
    (host.root / "run/ready").chmod(0o666)
    host.program("opt/bill/job", 'echo "$(id -un)" $$ >/run/ready; exec sleep 1000')
    (lock,) = re.findall("--lock (.*?) ", line)
    end = host.run("sh", "-c", KILLED.format(line=line), lock, code=0)
    assert end.stdout == b"bill\n%d\nlives\n" % (75 if kept else 0)
