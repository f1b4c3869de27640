"""``python -m zerosim`` is the command line."""

from zerosim.cli.main import main

main(prog_name="zerosim")
