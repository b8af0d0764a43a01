"""House rules that no linter knows: sizes of files and functions, hosts in the lock file, paths of one machine.

Style, types and import borders belong to ruff, mypy and import-linter. Run as `python tools/check_tree.py`; every
violation is one line, and any violation makes the exit status 1.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 40
KERNEL_LINES = 60
KERNEL_FOLDERS = ("packages/deepinfer-kernels-", "packages/deepinfer-core/src/deepinfer/accelerator/ops/")
LOCK_HOSTS = {"pypi.org", "files.pythonhosted.org"}
# Folders that exist on one person's or one service's machine; a path of a user's own machine never starts so.
MACHINE_PATH = re.compile(r"(?<![\w.$}~)>/-])/(?:home|root|Users|work|private|mnt|workspace)/|[A-Z]:\\\\?Users\\")


def source_files(root: Path) -> list[Path]:
    """Return every Python file that a wheel ships."""
    return sorted(root.glob("packages/*/src/**/*.py"))


def oversized_files(root: Path) -> Iterator[str]:
    """Yield a line for each source file over the limit."""
    for path in [*source_files(root), *sorted(root.glob("packages/*/src/**/*.[ch]"))]:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > FILE_LINES:
            yield f"{path.relative_to(root)}: {count} lines, at most {FILE_LINES}: split it by what each part owns"


def oversized_functions(root: Path) -> Iterator[str]:
    """Yield a line for each function whose signature and body, without its docstring, pass the limit."""
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        limit = KERNEL_LINES if name.startswith(KERNEL_FOLDERS) else FUNCTION_LINES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (count := _function_lines(node)) > limit:
                yield f"{name}:{node.lineno}: {node.name} has {count} lines, at most {limit}"


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def strange_hosts(root: Path) -> Iterator[str]:
    """Yield a line for each host in `uv.lock` other than those of the public index."""
    hosts = set(re.findall(r"https?://([^/\"]+)", (root / "uv.lock").read_text(encoding="utf-8")))
    for host in sorted(hosts - LOCK_HOSTS):
        yield f"uv.lock: names the host {host}: run `uv lock` with the public index only"
    if re.search(r"file://|path = \"/", (root / "uv.lock").read_text(encoding="utf-8")):
        yield "uv.lock: names files of one machine: run `uv lock` with the public index only"


def machine_paths(root: Path) -> Iterator[str]:
    """Yield a line for each place in a tracked text file, test data aside, that names a path of one machine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = root / name
        if name == "uv.lock" or "/tests/data/" in name or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
            if match := MACHINE_PATH.search(line):
                yield f"{name}:{number}: names a path of one machine: {match.group()}"


def main(root: Path) -> int:
    """Print every violation below `root` and return the exit status."""
    checks = (oversized_files, oversized_functions, strange_hosts, machine_paths)
    violations = [violation for check in checks for violation in check(root)]
    print(*violations, sep="\n", end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
