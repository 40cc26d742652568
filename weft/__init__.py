"""weft: a compiler for distributed training steps.

`weft.compile(model, optimizer, loss)` turns a plain PyTorch model, optimizer and loss into one program a step, in which
gathers, reductions and updates have their places among the compute. See docs/how-a-step-is-compiled.md.
"""

from weft._torch import check_version as _check_version

_check_version()

from weft.api import Step, compile  # noqa: E402  (an unsupported PyTorch is to be named before it breaks an import)
from weft.errors import CheckpointError, LossError, PeerError, SequenceError, ShardedError, TierError, TraceError  # noqa: E402
from weft.options import Precision  # noqa: E402
from weft.report.plan import Plan  # noqa: E402
from weft.saving.export import export  # noqa: E402
from weft.saving.load import load  # noqa: E402
from weft.saving.save import Saving, save  # noqa: E402
from weft.version import __version__  # noqa: E402

__all__ = [
    "CheckpointError",
    "LossError",
    "PeerError",
    "Plan",
    "Precision",
    "Saving",
    "SequenceError",
    "ShardedError",
    "Step",
    "TierError",
    "TraceError",
    "__version__",
    "compile",
    "export",
    "load",
    "save",
]
