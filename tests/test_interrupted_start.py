"""While Python starts and loads: a Ctrl-C is never lost, though Python itself prints some and goes on; a failure is one line."""

import argparse
import importlib.util
from pathlib import Path

import pytest
from conftest import ISOLATED, RETRY, SINGLE, event, json_line, needs_strace, run_cli

STARTS = ((SINGLE, "--lock", "lock"), (RETRY, "--retry-code", "75"))


@needs_strace
@pytest.mark.parametrize("start", STARTS, ids=("single", "retry"))
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


@needs_strace
@pytest.mark.parametrize(
    ("start", "code", "stderr"),
    (
        (STARTS[0], 3, json_line(status="error", reason="unexpected_error")),
        (STARTS[1], 125, event("wrapper_error", kind="OSError")),
    ),
    ids=("single", "retry"),
)
def test_a_module_that_cannot_be_read(tmp_path: Path, start: tuple[object, ...], code: int, stderr: bytes) -> None:
    """For want of descriptors, say."""
    source = argparse.__file__
    trace = ("strace", "-qq", "-o", "/dev/null", "-P", source, "-P", importlib.util.cache_from_source(source))
    run = run_cli(*trace, "-e", "inject=openat:error=EMFILE", *ISOLATED, *start, "--", "echo", "x", cwd=tmp_path, code=code)
    assert (run.stdout, run.stderr) == (b"", stderr)
