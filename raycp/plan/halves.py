"""Cuts a rank's own block in two, so that backward has something to compute while the last gradients travel.

Guarantees: the two parts together are the slices of step 0, each visible pair once. A document is cut only if no bound
between documents is near the middle of the work; then a causal kernel call becomes three, which is less than 1 % of
whole documents of some thousand tokens. Nothing is cut where the last gradients are hidden by another step, or where
none travel.
"""

from collections.abc import Sequence
from dataclasses import replace

from raycp.plan.program import OwnPart, Step
from raycp.plan.ranges import Range, Slice

LEAST = 0.4
"""Of the own block's work, in each part."""


def own_parts(steps: Sequence[Step]) -> tuple[OwnPart, ...]:
    """The two parts of the own block; () where it is better computed at once."""
    last = max((s.index for s in steps if s.returns or s.collects), default=0)
    if not last or any(s.slices for s in steps[last + 1 :]):
        return ()
    early, late = _halves(steps[0].slices)
    return (_part(early), _part(late)) if early and late else ()


def _halves(slices: tuple[Slice, ...]) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    half, done = sum(s.area for s in slices) / 2, 0
    for n, s in enumerate(slices):
        if done + s.area < half:
            done += s.area
            continue
        bounds = {n: done, n + 1: done + s.area}
        nearest = min(bounds, key=lambda bound: abs(bounds[bound] - half))
        if abs(bounds[nearest] - half) <= (0.5 - LEAST) * 2 * half:
            return slices[:nearest], slices[nearest:]
        first, second = _cut(s, half - done)
        return (*slices[:n], *first), (*second, *slices[n + 1 :])
    return slices, ()


def _cut(s: Slice, area: float) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """A slice, cut where its first queries have about `area` entries."""
    low, high = 0, s.q_stop - s.q_start
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if s.cut(middle)[0].area <= area else (low, middle)
    if not low:
        return (s,), ()
    first, second = s.cut(low)
    return (first,), (second,)


def _part(slices: tuple[Slice, ...]) -> OwnPart:
    keys = Range(min(s.k_start for s in slices), max(s.k_stop for s in slices))
    moved = [replace(s, k_start=s.k_start - keys.start, k_stop=s.k_stop - keys.start) for s in slices]
    return OwnPart(keys, tuple(sorted(moved, key=lambda s: s.q_start)))  # a slice that was cut may begin after the next
