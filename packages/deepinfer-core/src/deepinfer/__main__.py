"""`python -m deepinfer` is the command `deepinfer`."""

from deepinfer.cli import main

main()
