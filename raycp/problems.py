"""Collects what is wrong with a configuration: each problem names the field, the value found and those allowed."""

import math

from raycp.errors import Problem


class Problems:
    """Collects problems; each check names the field, the value found and the values allowed."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def add(self, message: str, fix: str) -> None:
        self.items.append(Problem(message, fix))

    def choice(self, name: str, value: object, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            self.add(f"{name}={value!r} is not a choice", f"set {name} to one of {', '.join(allowed)}")

    def integer(self, name: str, value: object, low: int, *, none: bool = False) -> None:
        if none and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.add(f"{name}={value!r} is not a whole number of at least {low}", f"set {name} to {low} or more")

    def number(
        self,
        name: str,
        value: object,
        *,
        above: float | None = None,
        low: float | None = None,
        below: float | None = None,
        none: bool = False,
    ) -> None:
        if none and value is None:
            return
        bound = f"above {above}" if above is not None else f"at least {low}"
        bound += f" and below {below}" if below is not None else ""
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if good and isinstance(value, int | float):
            good = (above is None or value > above) and (low is None or value >= low)
            good = good and (below is None or value < below)
        if not good:
            self.add(f"{name}={value!r} is not a number {bound}", f"set {name} to a number {bound}")
