"""Rewrites of the step graph, one file each. A pass is a function of a StepGraph; any but `shard` can be switched off."""
