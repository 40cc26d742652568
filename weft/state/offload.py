"""What the user's options say about offloading optimizer state: which fragments, and to where."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.options import Options
from weft.state.fragments import Fragments
from weft.state.layout import Layout
from weft.state.tiers import default_folder, make_tier


def choose_fragments(layout: Layout, options: Options, device: torch.device, *, elementwise: bool) -> Layout:
    """The layout with the fragments that the user asks to be offloaded.

    Those of dormant buckets stay in memory: a step that does not reach one should not have to bring its state in.
    """
    possible = [bucket.index for bucket in layout.buckets if bucket.trained and not bucket.dormant] * elementwise
    if isinstance(options.offload, Path) and device.type != "cpu":
        raise ValueError(
            f"offload={str(options.offload)!r} and the model is on {device}: state on a GPU is offloaded to pinned "
            "host memory, not to files; use offload='auto'"
        )
    wanted = possible if options.fragments == "all" else options.fragments
    unknown = sorted(set(wanted) - set(possible))
    if unknown:
        raise ValueError(
            f"passes={{'offload': {{'fragments': {list(wanted)}}}}}: the optimizer state of buckets {unknown} cannot "
            f"be offloaded, only that of buckets {possible} (trained ones that the first loss reaches, with an "
            "optimizer that works elementwise)"
        )
    return layout.with_offload(wanted, options.offload_window)


def tier_folder(options: Options) -> Path:
    return options.offload if isinstance(options.offload, Path) else default_folder()


def make_fragments(layout: Layout, options: Options, device: torch.device, state_elements: float) -> Fragments | None:
    """The offloaded part of a rank's state, still empty; None if nothing is offloaded."""
    if not layout.offloaded:
        return None
    return Fragments(
        layout,
        make_tier(device, tier_folder(options)),
        device=device,
        state_elements=state_elements,
        timeout=options.timeout.total_seconds(),
    )
