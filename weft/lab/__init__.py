"""A cluster on one machine: hosts with a network link, cores and memory of their own. `weft lab` and the benchmarks."""
