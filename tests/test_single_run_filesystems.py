"""single_run.py: where a lock file may be, and what happens where it cannot be made or written."""

import json
import os
import signal
from pathlib import Path

import pytest
from conftest import PROBE, PYTHON, SINGLE, Fifo, ended, json_line, needs_namespaces, run_cli, send, single, started

import single_run

MOUNTS = r"""22 28 0:20 / /proc rw,nosuid - proc proc rw
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 28 0:44 / /mnt/nfs rw - nfs srv:/data rw,vers=3
41 28 0:45 / /mnt/nfs\0404 rw,relatime shared:9 master:2 - nfs4 srv:/my\040-\040data rw
42 28 0:46 / /mnt/a\040-\040nfs rw - ext4 /dev/sdb1 rw
43 28 0:47 / /mnt/win rw - cifs //srv/share rw
44 28 0:48 / /mnt/smb rw - smb3 //srv/share rw
45 28 0:49 / /mnt/9p rw - 9p host rw,trans=virtio
46 28 0:50 / /mnt/ssh rw - fuse.sshfs me@srv: rw
47 28 0:51 / /var/lib/docker rw master:1 propagate_from:2 - overlay overlay rw,lowerdir=/l,upperdir=/u
48 28 8:1 /home/x /bind rw shared:1 - ext4 /dev/sda1 rw
49 28 0:44 /sub /bind/nfs rw - nfs srv:/data rw
50 28 0:52 / /run rw - tmpfs tmpfs rw
51 28 0:53 / /mnt/btrfs rw - btrfs /dev/sdc rw,subvol=/nfs
52 28 0:54 / /mnt/ntfs rw - fuseblk /dev/sdd1 rw
53 28 0:55 / /vm rw - virtiofs host rw
54 28 0:56 / /mnt/nfsd rw - nfsd nfsd rw
"""
MOUNTS += "55 28 0:57 / /mnt/a\x0b56\x0cb rw - nfs srv:/data rw\n56 28 0:58 / /mnt/c\u2028d rw - tmpfs tmpfs rw\n"
REFUSED = {40: "nfs", 41: "nfs4", 43: "cifs", 44: "smb3", 45: "9p", 46: "fuse.sshfs", 49: "nfs", 55: "nfs"}


@pytest.mark.parametrize("line", MOUNTS.strip().split("\n"))
def test_which_mounts_are_refused(line: str) -> None:
    number = line.split(maxsplit=1)[0]
    device, kind = single_run.mount_of(MOUNTS, number)
    assert device == line.split()[2] and kind == line.rpartition(" - ")[2].split()[0]
    assert (kind in single_run.NETWORK_FILESYSTEMS) == (int(number) in REFUSED)
    assert REFUSED.get(int(number), kind) == kind


@pytest.mark.parametrize("text", ("", "4 5 6", MOUNTS))
def test_a_mount_that_is_not_listed_is_none(text: str) -> None:
    assert single_run.mount_of(text, "99") == ("", "")


def test_a_network_file_system(here: Path) -> None:
    """There is none here to mount: the kind of this folder's own file system is declared to be one."""
    fd = os.open(".", os.O_RDONLY)
    kind, _ = single_run.place_of(fd)
    os.close(fd)
    script = f"import sys, single_run; single_run.NETWORK_FILESYSTEMS = {{{kind!r}}}; sys.exit(single_run.main())"
    python = (PYTHON, "-c", script)
    env = {"PYTHONPATH": str(SINGLE.parent), "PATH": os.environ["PATH"]}
    end = run_cli(*python, "--lock", "lock", "--", "touch", "started", env=env, code=3)
    assert json.loads(end.stderr) == {"status": "error", "reason": "lock_on_network_filesystem", "lock": "lock"}
    assert not Path("started").exists()
    run_cli(*python, "--lock", "lock", "--status", env=env, code=3)
    run_cli(*python, "--lock", "lock", "--allow-network-fs", "--", "touch", "started", env=env, code=0)
    assert Path("started").exists()
    end = run_cli(*python, "--lock", "lock", "--allow-network-fs", "--status", env=env, code=3)
    assert json.loads(end.stdout)["state"] == "unknown"  # other hosts' locks are not shown here


@pytest.mark.parametrize("old", (b"", b'{"format_version":1,"owner_pid":1,"acquired_at_utc":"2026-01-01T00:00:00Z"}\n'))
def test_a_record_beyond_the_file_size_limit(here: Path, old: bytes) -> None:
    Path("lock").write_bytes(old)
    end = run_cli("sh", "-c", f"ulimit -f 0; exec {SINGLE} --lock lock -- touch started", code=3)
    assert end.stderr == json_line(status="error", reason="lock_metadata_write_failed", lock="lock")
    assert not Path("started").exists()
    single("lock", "true", code=0)


@needs_namespaces
@pytest.mark.parametrize(
    ("before", "reason"),
    (
        ("head -c 1M /dev/zero >full 2>/dev/null", "lock_metadata_write_failed"),
        ("mount -o remount,ro .", "lock_open_failed"),
        (": >lock; mount -o remount,ro .", "lock_open_failed"),
    ),
)
def test_a_full_or_read_only_file_system(here: Path, before: str, reason: str) -> None:
    script = f'mount -t tmpfs -o size=64k none "$PWD" && cd "$PWD" || exit\n{before}\n{SINGLE} --lock lock -- echo started'
    end = run_cli("unshare", "--mount", "sh", "-c", script, code=3)
    assert (end.stdout, json.loads(end.stderr)) == (b"", {"status": "error", "reason": reason, "lock": "lock"})


@needs_namespaces
@pytest.mark.parametrize("owner", (0, 65534))
def test_another_users_file_in_a_sticky_folder(here: Path, fifo: Fifo, owner: int) -> None:
    """fs.protected_regular=2 forbids to open it by O_CREAT, root too. The lock holds; no record is written."""
    Path("sticky").mkdir()
    os.chmod("sticky", 0o1777)
    Path("sticky/lock").touch()
    os.chown("sticky/lock", owner, owner)
    setting = Path("/proc/sys/fs/protected_regular")
    before = setting.read_text()
    setting.write_text("2")
    try:
        run = started(SINGLE, "--lock", "sticky/lock", "--", *PROBE, fifo.path, "on:USR1=0", "say:{pid}", "wait")
        job = int(fifo.line())
        single("sticky/lock", "true", code=75)
        assert (Path("sticky/lock").read_bytes() == b"") == (owner != 0)
        send(job, signal.SIGUSR1)
        ended(run, 0)
    finally:
        setting.write_text(before)
