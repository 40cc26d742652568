"""Checkpoints on disk (`weft.save`, `weft.load`) and whole weights for others to read (`weft.export`).

`contents` knows what a step holds, `planner` and `storage` are what torch.distributed.checkpoint asks for, `values`
turns plain Python values into JSON and back. See docs/checkpoints.md.
"""
