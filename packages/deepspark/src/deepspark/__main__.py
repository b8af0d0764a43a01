"""Runs the command line as `python -m deepspark`."""

import sys

from deepspark.cli import main

sys.exit(main())
