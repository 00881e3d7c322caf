"""A Ctrl-C while Python starts and loads is never lost, though Python itself prints some of them and goes on."""

import shutil
from pathlib import Path

import pytest
from conftest import ISOLATED, RETRY, SINGLE, run_cli


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("start", ((SINGLE, "--lock", "lock"), (RETRY, "--retry-code", "75")), ids=("single", "retry"))
def test_a_ctrl_c_at_a_read_before_the_job_starts_ends_the_run(tmp_path: Path, start: tuple[object, ...]) -> None:
    trace = ("strace", "-o", tmp_path / "trace", "-e", "trace=read,/^(clone|fork|vfork)")
    run = (*ISOLATED, *start, "--", "true")
    run_cli(*trace, *run, cwd=tmp_path, code=0)
    calls = [line.partition("(")[0] for line in (tmp_path / "trace").read_text().splitlines()]
    reads = next(count for count, call in enumerate(calls) if call != "read")
    assert reads > 10
    for number in range(1, reads + 1, 3):
        end = run_cli(*trace, "-e", f"inject=read:signal=INT:when={number}", *run, cwd=tmp_path)
        assert end.returncode != 0, f"at read {number}: {end.stderr.decode()}"
