"""The errors of weft that are not plain ValueErrors: each says what was seen and what to do."""

from __future__ import annotations


class TraceError(RuntimeError):
    """A training step that cannot be captured as a graph without changing what it computes."""


class UnlocatedTraceError(TraceError):
    """One that is noticed only after the fact: the trace is run again to find the line."""


class PeerError(RuntimeError):
    """A wait on another rank that failed or ran out of time; names who waited, for what."""


class SequenceError(PeerError):
    """Two ranks started different collectives at the same place of their sequence (found with `debug=True`)."""


class LossError(ArithmeticError):
    """A step whose loss is not a number on some rank; no rank has updated anything."""


class ShardedError(RuntimeError):
    """A parameter was used while only shards of it exist on this rank."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or not be loaded into this step; every rank raises it."""


class PlanError(ValueError):
    """A plan on disk that is not whole, or for another step."""


class StoreError(RuntimeError):
    """A file of measurements that cannot be used: damaged, or of another machine or version."""


class TierError(RuntimeError):
    """The next tier of memory cannot be used: names the folder, what the system said and what to do."""
