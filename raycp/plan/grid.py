"""The shape of the world: dp x ring x ulysses ranks, and which rank sits where.

Guarantees: `rank = (dp_index * ring + ring_index) * ulysses + ulysses_index`, a bijection, so ranks of one Ulysses
group are neighbours, then those of one ring, then replicas. A context-parallel (cp) rank is the same without
the replica: `cp_rank = ring_index * ulysses + ulysses_index`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from raycp.errors import PlanError


class Coordinates(NamedTuple):
    """Where a rank sits."""

    dp_index: int
    ring_index: int
    ulysses_index: int


@dataclass(frozen=True)
class RankGrid:
    """World of `dp * ring * ulysses` ranks.

    Args:
        dp: data-parallel replicas.
        ring: ranks of one ring.
        ulysses: ranks of one Ulysses group; cp = ring * ulysses.
        window: length of the inner ring of a double ring; 1 is a single ring.

    Raises:
        PlanError: a size is not a whole number of at least 1, or `window` does not divide `ring`.
    """

    dp: int
    ring: int
    ulysses: int = 1
    window: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "ring", "ulysses", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(
                    f"RankGrid({name}={value!r}): not a whole number of at least 1", fix=f"set {name} to 1 or more"
                )
        if self.ring % self.window:
            raise PlanError(
                f"RankGrid(ring={self.ring}, window={self.window}): the inner ring does not divide the ring",
                fix=f"set window to a divisor of {self.ring}, or to 1 for a single ring",
            )

    @property
    def cp(self) -> int:
        """Ranks that share one pack."""
        return self.ring * self.ulysses

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    def rank(self, dp_index: int, ring_index: int, ulysses_index: int = 0) -> int:
        """Global rank at these coordinates.

        Raises:
            PlanError: a coordinate is outside the grid.
        """
        for name, value, size in (
            ("dp_index", dp_index, self.dp),
            ("ring_index", ring_index, self.ring),
            ("ulysses_index", ulysses_index, self.ulysses),
        ):
            _check_index(name, value, size)
        return (dp_index * self.ring + ring_index) * self.ulysses + ulysses_index

    def coordinates(self, rank: int) -> Coordinates:
        """Where global rank `rank` sits: the inverse of `rank`.

        Raises:
            PlanError: no such rank.
        """
        _check_index("rank", rank, self.world_size)
        rest, ulysses_index = divmod(rank, self.ulysses)
        dp_index, ring_index = divmod(rest, self.ring)
        return Coordinates(dp_index, ring_index, ulysses_index)

    def cp_rank(self, rank: int) -> int:
        """Context-parallel rank of global rank `rank`, in [0, cp)."""
        _check_index("rank", rank, self.world_size)
        return rank % self.cp

    def cp_ranks(self, dp_index: int) -> tuple[int, ...]:
        """Global ranks that share the packs of replica `dp_index`, in order of their cp rank."""
        _check_index("dp_index", dp_index, self.dp)
        return tuple(range(dp_index * self.cp, (dp_index + 1) * self.cp))

    def ring_ranks(self, dp_index: int, ulysses_index: int = 0) -> tuple[int, ...]:
        """Global ranks of one ring, in order of their ring index."""
        return tuple(self.rank(dp_index, i, ulysses_index) for i in range(self.ring))

    def ulysses_ranks(self, dp_index: int, ring_index: int) -> tuple[int, ...]:
        """Global ranks of one Ulysses group, in order of their Ulysses index."""
        return tuple(self.rank(dp_index, ring_index, u) for u in range(self.ulysses))


def _check_index(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise PlanError(f"{name}={value} is outside [0, {size})", fix=f"pass a {name} of 0 to {size - 1}")
