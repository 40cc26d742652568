"""The time of an op: measured where it was, estimated where not."""

from __future__ import annotations

from typing import Literal

from torch import fx

from weft.measure.keys import op_key
from weft.measure.store import Store
from weft.measure.values import is_op
from weft.predict.roofline import Roofline


class OpTimes:
    """Seconds of op nodes; step nodes are not ops and take none here."""

    def __init__(self, store: Store, roofline: Roofline) -> None:
        self.store, self.roofline = store, roofline

    def seconds(self, node: fx.Node) -> float:
        """On a GPU: of the kernels alone; the host issues them ahead, see `dispatch`."""
        if not is_op(node):
            return 0.0
        known = self.store.get("ops", op_key(node))
        return self.roofline.seconds(node) if known is None else float(known)

    def dispatch(self, node: fx.Node) -> float:
        """What the host takes to issue an op; on a CPU that is part of `seconds`, and nothing beside it."""
        if not is_op(node):
            return 0.0
        known = self.store.get("dispatch", op_key(node))
        return 0.0 if known is None else float(known)

    def source(self, node: fx.Node) -> Literal["measured", "roofline"]:
        return "measured" if is_op(node) and self.store.get("ops", op_key(node)) is not None else "roofline"
