"""``python -m zerosim`` is the command line."""

from zerosim.cli import main

main(prog_name="zerosim")
