"""The checks of this repository, each a session; `uv run nox` runs those that a change must pass.

What a check looks for stands in `pyproject.toml` (ruff, mypy, import-linter, pytest), in `tools/` and in the tests.
"""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "build", "install"]

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PACKAGES = {"deepinfer": ROOT / "tests", **{path.name: path / "tests" for path in sorted(ROOT.glob("packages/*"))}}
MEMBERS = [name for name in PACKAGES if name != "deepinfer"]
INSTALLS = ("recipe", "deepspark", "meta", "nvidia", "ascend")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, import borders, sizes, hosts of the lock file; runs in the environment that runs nox."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", silent=True)
    session.run("python", "tools/check_tree.py")
    session.run("uv", "lock", "--check", silent=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check all sources with mypy --strict; runs in the environment that runs nox."""
    session.run("mypy")


@nox.session
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
def tests(session: nox.Session, package: str) -> None:
    """Test one package with nothing installed but what it declares; arguments after `--` go to pytest."""
    location = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    sync = ("uv", "sync", "--quiet", "--locked", "--no-default-groups", "--package", package, "--group", "test")
    session.run_install(*sync, env=location)
    one = {"OMP_NUM_THREADS": "1"}  # models are tiny: threads of torch would only wait for one another
    session.run("pytest", str(PACKAGES[package].relative_to(ROOT)), *session.posargs, env=one)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Build wheel and sdist of every package into dist/, and check what they hold and say."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--all-packages", "--out-dir", str(DIST))
    files = sorted(str(path) for path in DIST.glob("deep*"))
    session.run("twine", "check", "--strict", *files)
    code = [str(path) for path in sorted(DIST.glob("*.whl")) if not path.name.startswith("deepinfer-")]
    session.run("check-wheel-contents", *code)  # not the meta wheel: it is empty on purpose


@nox.session(reuse_venv=False)
@nox.parametrize("what", INSTALLS, ids=list(INSTALLS))
def install(session: nox.Session, what: str) -> None:
    """Install built wheels into a fresh environment, as a user does; `-- latest` ignores the lock file."""
    constraints = _constraints(session, to_lock="latest" not in session.posargs)
    if what == "ascend":  # its torch_npu needs a machine with CANN: find versions that fit, install nothing
        _resolve_ascend(session, constraints)
        return
    name = {"recipe": "deepseek-recipe", "deepspark": "deepspark", "meta": "deepinfer", "nvidia": "deepinfer[nvidia]"}
    session.install("--quiet", *constraints, name[what])
    session.run("python", "tools/check_install.py", what)


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """Test everything with the oldest direct dependencies that the ranges admit."""
    _test_all(session, "lowest-direct")


@nox.session(default=False)
def latest(session: nox.Session) -> None:
    """Test everything with the newest dependencies that the ranges admit."""
    _test_all(session, "highest")


@nox.session(venv_backend="none", default=False)
def soak(session: nox.Session) -> None:
    """Run every test with many examples, and the soak tests for SECONDS each (`-- SECONDS`, one hour by default)."""
    session.run("pytest", "--soak", *(session.posargs or ["3600"]))


def _test_all(session: nox.Session, resolution: str) -> None:
    members = [argument for name in MEMBERS for argument in ("--editable", f"packages/{name}")]
    extras = ["deepinfer-core[metrics,plot,structured]", "deepseek-recipe[fetch,images]"]
    groups = ["--group", "pyproject.toml:test"]
    session.install("--quiet", "--resolution", resolution, "--upgrade", *members, *extras, *groups)
    session.run("pytest", *session.posargs)


def _constraints(session: nox.Session, *, to_lock: bool) -> list[str]:
    """Return the arguments that hold our names to the built files: the public index has strangers of these names."""
    folder = Path(session.create_tmp())
    lines = []
    for name in PACKAGES:
        found = list(DIST.glob(f"{name.replace('-', '_')}-*.whl"))
        if len(found) != 1:
            session.error(f"dist/ must hold one wheel of {name}, holds {len(found)}: run `uv run nox -s build` first")
        lines.append(f"{name} @ {found[0].as_uri()}\n")
    built = folder / "built.txt"
    built.write_text("".join(lines))
    if not to_lock:
        return ["--constraints", str(built)]
    locked = folder / "locked.txt"
    export = ("uv", "export", "--quiet", "--locked", "--all-packages", "--all-extras", "--no-hashes", "--no-annotate")
    session.run_install(*export, "--no-emit-workspace", "--output-file", str(locked), silent=True)
    return ["--constraints", str(built), "--constraints", str(locked)]


def _resolve_ascend(session: nox.Session, constraints: list[str]) -> None:
    wanted = Path(session.create_tmp()) / "ascend.in"
    wanted.write_text("deepinfer[ascend]\n")
    found = session.run_install("uv", "pip", "compile", "--quiet", *constraints, str(wanted), silent=True)
    if not isinstance(found, str) or "deepinfer-kernels-ascend @ file:" not in found or "torch-npu==" not in found:
        session.error(f"deepinfer[ascend] must resolve to the built wheel and a torch_npu, got:\n{found}")
