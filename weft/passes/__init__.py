"""Rewrites of the step graph, one file each: functions of a StepGraph. Any but `shard` can be switched off."""
