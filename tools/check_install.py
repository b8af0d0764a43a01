"""What a user gets from built wheels: imports, entry points, commands; run inside the environment to check.

Making that environment is the noxfile's part. Only the standard library is used, because nothing else need be there.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import distribution, distributions, entry_points
from pathlib import Path

RECIPE_IMPORT_S = 0.15
ENGINE_WHEELS = {"deepinfer", "deepinfer-core", "deepinfer-kernels-ascend", "deepinfer-kernels-cuda"}


def check_recipe() -> None:
    """Check that the recipe alone brings no torch, nothing else of ours, and imports fast."""
    _expect_absent({"torch", "numpy", "deepspark"} | ENGINE_WHEELS)
    seconds = _import_seconds("deepseek_recipe")
    _expect(seconds < RECIPE_IMPORT_S, f"deepseek_recipe imports in {seconds:.3f} s, at most {RECIPE_IMPORT_S} s")
    _expect_commands("deepseek-recipe")


def check_deepspark() -> None:
    """Check that deepspark needs nothing else of ours and is found as a drafter."""
    _expect_absent({"deepseek-recipe"} | ENGINE_WHEELS)
    _expect_entries("deepinfer.drafters", {"deepspark"})
    _expect_light("deepspark")


def check_meta() -> None:
    """Check that the meta wheel brings engine, recipe and drafter, and no kernel wheel, and that its command runs."""
    _expect_absent({"deepinfer-kernels-ascend", "deepinfer-kernels-cuda"})
    _expect_entries("deepinfer.accelerators", set())
    _expect_entries("deepinfer.drafters", {"deepspark"})
    listed = _run("deepinfer", "accelerators")
    _expect("cpu" in listed, f"`deepinfer accelerators` lists cpu, got:\n{listed}")
    _expect_commands("deepinfer-core")


def check_nvidia() -> None:
    """Check that the extra brings the CUDA wheel, found by entry point and listed with or without a device."""
    _expect_absent({"deepinfer-kernels-ascend"})
    _expect_entries("deepinfer.accelerators", {"nvidia"})
    _expect_light("deepinfer_kernels_cuda")
    listed = _run("deepinfer", "accelerators")
    _expect("nvidia" in listed, f"`deepinfer accelerators` lists nvidia, got:\n{listed}")


def _expect(truth: bool, text: str) -> None:
    if not truth:
        raise SystemExit(f"expected: {text}")
    print(f"ok: {text}")


def _expect_absent(names: set[str]) -> None:
    present = {found.metadata["Name"].lower().replace("_", "-") for found in distributions()}
    _expect(not names & present, f"none of {', '.join(sorted(names))} installed, found {sorted(names & present)}")


def _expect_entries(group: str, names: set[str]) -> None:
    found = sorted(point.name for point in entry_points(group=group))
    _expect(found == sorted(names), f"entry points of {group} are {sorted(names)}, found {found}")


def _expect_commands(wheel: str) -> None:
    for point in distribution(wheel).entry_points.select(group="console_scripts"):
        _expect(bool(_run(point.name, "--help")), f"`{point.name} --help` answers")


def _expect_light(module: str) -> None:
    loaded = _run("python", "-c", f"import sys, {module}; {module}.entry.probe(); print('torch' in sys.modules)")
    _expect(loaded.strip() == "False", f"loading and probing the entry of {module} leaves torch unloaded")


def _import_seconds(module: str) -> float:
    """Processor seconds of an import, the least of five: a busy machine must not fail a check."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    _run("python", "-c", code)  # the first import compiles; a user pays that once
    return min(float(_run("python", "-c", code)) for _ in range(5))


def _run(command: str, *arguments: str) -> str:
    start = time.perf_counter()
    program = Path(sys.executable).with_name(command)
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{command} {' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")
    if command == "deepinfer":
        print(f"{command} {' '.join(arguments)}: {time.perf_counter() - start:.2f} s")
    return result.stdout


CHECKS: dict[str, Callable[[], None]] = {
    "recipe": check_recipe,
    "deepspark": check_deepspark,
    "meta": check_meta,
    "nvidia": check_nvidia,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
