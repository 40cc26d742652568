"""`python -m weft`: the `weft` command, for instance as `torchrun --nproc-per-node 2 -m weft doctor`."""

from weft.cli.main import main

main()
