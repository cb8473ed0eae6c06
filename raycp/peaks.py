"""What a user writes about the speed of devices: `FitConfig.peak_flops` as a table. Imports nothing of raycp."""

import math


def peak_table(text: str) -> dict[str, float]:
    """{part of a device's name: FLOP/s} of `FitConfig.peak_flops`; "" stands for any device; empty for "auto".

    Raises:
        ValueError: a piece that is neither a number above 0 nor a name with one.
    """
    if not isinstance(text, str):
        raise ValueError(f"it is a {type(text).__name__}, not a string")
    found: dict[str, float] = {}
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if piece == "auto":
            continue
        name, _, word = (part.strip() for part in piece.rpartition("="))
        try:
            value = float(word)
        except ValueError:
            raise ValueError(f"{piece!r} is no number, and no name with one") from None
        if not 0 < value < math.inf:
            raise ValueError(f"{value} FLOP/s are not above 0")
        found[name] = value
    return found
