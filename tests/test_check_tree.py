"""Each house rule of tools/check_tree.py finds what it is there to find, and nothing in a tidy tree."""

import subprocess
from pathlib import Path

import pytest
from check_tree import machine_paths, main, oversized_files, oversized_functions, strange_hosts

TIDY_LOCK = 'source = { registry = "https://pypi.org/simple" }\nurl = "https://files.pythonhosted.org/packages/a.whl"\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    source = tmp_path / "packages" / "deepspark" / "src" / "deepspark"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('"""Owns nothing."""\n')
    (tmp_path / "uv.lock").write_text(TIDY_LOCK)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def _write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    subprocess.run(["git", "add", "--", name], cwd=tree, check=True)


def test_a_tidy_tree_passes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tree) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("lines", "violations"), [(500, 0), (501, 1)])
def test_files_have_at_most_500_lines(tree: Path, lines: int, violations: int) -> None:
    _write(tree, "packages/deepspark/src/deepspark/long.py", "x = 1\n" * lines)
    assert len(list(oversized_files(tree))) == violations
    assert main(tree) == violations


@pytest.mark.parametrize(
    ("folder", "lines", "violations"),
    [
        ("packages/deepspark/src/deepspark", 40, 0),
        ("packages/deepspark/src/deepspark", 41, 1),
        ("packages/deepinfer-kernels-cuda/src/deepinfer_kernels_cuda", 60, 0),
        ("packages/deepinfer-kernels-cuda/src/deepinfer_kernels_cuda", 61, 1),
        ("packages/deepinfer-core/src/deepinfer/accelerator/ops", 60, 0),
    ],
)
def test_functions_have_a_limit_without_their_docstring(tree: Path, folder: str, lines: int, violations: int) -> None:
    docstring = '    """Say much.\n\n' + "    More.\n" * 30 + '    """\n'
    _write(tree, f"{folder}/long.py", "def work():\n" + docstring + "    x = 1\n" * (lines - 1))
    assert len(list(oversized_functions(tree))) == violations


@pytest.mark.parametrize(
    "line",
    ['url = "https://mirror.example/packages/a.whl"', 'source = { registry = "file:///srv/simple" }'],
)
def test_the_lock_file_names_the_public_index_only(tree: Path, line: str) -> None:
    _write(tree, "uv.lock", f"{TIDY_LOCK}{line}\n")
    assert len(list(strange_hosts(tree))) == 1


def test_paths_of_one_machine_are_found(tree: Path) -> None:
    # Put together here, so that this file passes the check itself.
    path = "/".join(["", "home", "someone", "weights"])
    _write(tree, "notes.md", f"Load {path} first.\n")
    _write(tree, "links.md", f"See https://example.org{path} and <folder>{path}.\n")
    _write(tree, "packages/deepspark/tests/data/prompt.txt", f"Load {path} first.\n")
    assert list(machine_paths(tree)) == [f"notes.md:1: names a path of one machine: {path[:6]}"]
