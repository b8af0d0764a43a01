"""The command line of deepspark: owns arguments and what is printed; the work is the modules'."""

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def _vectors(arguments: argparse.Namespace) -> int:
    from deepspark.testing import run_vectors

    return 1 if run_vectors(arguments.folder).failed else 0


def _audit(arguments: argparse.Namespace) -> int:
    from deepspark.audit import admissibility_table, noise_key_table

    lines = [*admissibility_table(arguments.worlds), *noise_key_table()]
    print(f"{'cut':50} {'rule':8} {'total variation':>15}  {'should be':9}  verdict")
    for line in lines:
        verdict = "as expected" if line.as_expected else "NOT AS EXPECTED"
        print(
            f"{line.cut:50} {line.rule:8} {line.tv:15.1e}  {'exact' if line.should_be_exact else 'caught':9}  {verdict}"
        )
    return 0 if all(line.as_expected for line in lines) else 1


def _calibrate(arguments: argparse.Namespace) -> int:
    from deepspark.calibration import calibrate
    from deepspark.errors import DeepSparkError

    try:
        made = calibrate(arguments.rounds)
    except (DeepSparkError, OSError) as error:
        print(f"error: {error}")
        return 1
    made.save(arguments.out)
    print(f"{made.rounds} rounds at temperature {made.temperature:g}, drafter {made.model_hash}")
    print("position  temperature  held-out ECE before  after   noise floor")
    for k, temperature in enumerate(made.temperatures):
        print(
            f"{k + 1:8d}  {temperature:11.3f}  {made.ece_before[k]:19.4f}  {made.ece_after[k]:.4f}  {made.floor[k]:.4f}"
        )
    print(f"written to {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `deepspark COMMAND`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="deepspark", description="DSpark speculative decoding: checks and calibration."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    vectors = commands.add_parser("vectors", help="run golden vectors against this installation")
    vectors.add_argument("folder", type=Path)
    vectors.set_defaults(run=_vectors)
    audit = commands.add_parser("audit", help="enumerate which cuts keep the target's law, and which noise keys")
    audit.add_argument("--worlds", type=int, default=20, help="random worlds to enumerate (default 20)")
    audit.set_defaults(run=_audit)
    calibrate = commands.add_parser("calibrate", help="fit confidence temperatures from collected rounds")
    calibrate.add_argument("rounds", type=Path, help="an .npz written by deepspark.collect")
    calibrate.add_argument("--out", type=Path, default=Path("calibration.json"))
    calibrate.set_defaults(run=_calibrate)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status
