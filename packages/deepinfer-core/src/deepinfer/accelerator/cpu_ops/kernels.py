"""The bodies in `c/`: compiled at first use by the system's C compiler, kept in the user's cache folder.

Owns compiling, loading and signatures; which op calls what is each op's.  Where nothing compiles, ops are the
reference.
"""

import ctypes
import hashlib
import logging
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = sorted(Path(__file__).with_name("c").glob("*.[ch]"))

COMPILER = "cc"

FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=gnu11", "-shared", "-fPIC", "-Wl,--no-undefined"),
)

CACHE_FOLDER = Path("~/.cache/deepinfer/cpu")

_REALS = {torch.float32: "float", torch.float64: "double"}

_log = logging.getLogger(__name__)


class Kernels(ctypes.CDLL):
    """The functions of `c/*.c`, each taking the integers, floats and addresses that its C signature names."""

    def __init__(self, library: Path, source: str) -> None:
        super().__init__(str(library))
        for name, parameters in re.findall(r"^void (\w+)\(([^)]*)\)", source, re.MULTILINE):
            function = getattr(self, name)
            function.argtypes = [_argument(parameter) for parameter in parameters.split(",")]
            function.restype = None


def _argument(parameter: str) -> type[ctypes.c_void_p | ctypes.c_long | ctypes.c_double]:
    if "*" in parameter:
        return ctypes.c_void_p
    return ctypes.c_double if "double" in parameter else ctypes.c_long


@cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the bodies for one wide dtype, compiled in about a second if they are not yet; None where that fails."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    flags = (*FLAGS, f"-DREAL={_REALS[dtype]}")
    library = CACHE_FOLDER.expanduser() / f"{_digest(source, flags)}.so"
    try:
        if library.exists():
            try:
                return Kernels(library, source)
            except OSError:  # half a file, or of another machine: made anew
                _log.info("%s does not load and is compiled again", library)
        _compile(flags, library)
        return Kernels(library, source)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        _log.warning("the CPU's fast bodies are not used, the reference is (half as fast): %s", error)
        return None


def _digest(source: str, flags: tuple[str, ...]) -> str:
    """Name what a library depends on: the source, how it was compiled, and what this processor can do."""
    known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    features = re.search(r"^(?:flags|Features)\s*:.*", known, re.MULTILINE)
    text = "\0".join((source, *flags, features[0] if features else known))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _compile(flags: tuple[str, ...], library: Path) -> None:
    """Compile to `library` in one move, so that no process ever loads half a file."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise RuntimeError(f"no C compiler named {COMPILER!r} on the PATH: install one, for example gcc")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *flags, *(str(path) for path in SOURCES if path.suffix == ".c"), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
        built.replace(library)
