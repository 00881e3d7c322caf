"""The two scripts share no module, so what both must carry is written twice: word for word, or it would drift apart."""

import ast
from pathlib import Path

import pytest
from conftest import RETRY, SINGLE, run_cli

OWN = {"Ending", "Parser", "Show", "main", "parse", "start"}  # the same name for the same thing, done otherwise


def pieces(source: str) -> dict[str, str]:
    """The source of a script's functions and classes by name, in order."""
    tree = ast.parse(source)
    named = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(source, node) or "" for node in named}


def test_what_both_have_is_the_same() -> None:
    retry, single = pieces(RETRY.read_text()), pieces(SINGLE.read_text())
    common = [name for name in single if name in retry]
    assert set(common) > OWN and len(common) > len(OWN) + 8
    for name in common:
        assert (retry[name] == single[name]) != (name in OWN), name


def test_they_stand_in_the_same_order() -> None:
    retry, single = RETRY.read_text(), SINGLE.read_text()
    common = pieces(single).keys() & pieces(retry).keys()
    assert [name for name in pieces(single) if name in common] == [name for name in pieces(retry) if name in common]
    banners = [[line for line in script.splitlines() if line.startswith("# ----")] for script in (retry, single)]
    own = {"# ---- the run", "# ---- holders", "# ---- records: files that outlive a run", "# ---- in-process use"}
    assert [line for line in banners[0] if line not in own] == [line for line in banners[1] if line not in own]


def test_they_begin_alike() -> None:
    """From the first import to the last that is not their own: the isolation, the mask, the silent Ctrl-C."""

    def head(source: str, name: str) -> list[str]:
        lines = source[source.index("import sys") : source.index("TYPE_CHECKING")].replace(name, "SCRIPT").splitlines()
        own = ("    import ", "    from ", "    sys.stderr.write(", "    sys.exit(", "except Exception")
        return [line for line in lines if not line.startswith(own) or "import signal" in line]

    assert head(RETRY.read_text(), RETRY.name) == head(SINGLE.read_text(), SINGLE.name)


@pytest.mark.parametrize("options", ((RETRY, "--retry-code", "75"), (SINGLE, "--lock", "lock")))
@pytest.mark.parametrize(
    ("words", "message"),
    (
        (("true", "a b"), b"unrecognized arguments: true a b; -- COMMAND is missing"),
        (("--wait", "--", "true"), b"unrecognized arguments: --wait"),
        ((), b"-- COMMAND is missing"),
    ),
)
def test_forgotten_dashes(here: Path, options: tuple[Path | str, ...], words: tuple[str, ...], message: bytes) -> None:
    assert run_cli(*options, *words, code=2).stderr.rstrip(b'"}\n').endswith(message)
