"""How far context-parallel attention is from one device in fp64: every algorithm, layout and mask, on random packs.

out, dQ, dK and dV of all ranks together are compared with the dense fp64 answer by the measure of docs/architecture.md,
norm(x - ref) / max(norm(ref), 1e-3 norm(dout)). Ranks are threads that run the executors of a real run. The cases are
those of tests/unit/attention/test_exactness.py, with other packs and numbers.
"""

import random
import sys

import torch

from benchmarks.report import Report, parser, table
from tests.unit.attention.cases import NAMES, TOLERANCE, Case, errors, run_in_memory
from tests.unit.attention.test_exactness import HEADS, MASKS, SCHEDULES, pack_lengths

LAYOUTS = ("zigzag", "contiguous", "balanced", "auto")


def largest_errors(name: str, *, cases: int, seed: int, dtype: torch.dtype) -> dict[str, float]:
    """Of each of `NAMES`, the largest over `cases` random packs for each layout, kind of heads and mask."""
    rng = random.Random(f"{seed} {name}")
    largest = dict.fromkeys(NAMES, 0.0)
    for layout in LAYOUTS:
        for heads, kv_heads in HEADS.values():
            for mask in MASKS:
                for _ in range(cases):
                    case = Case(
                        pack_lengths(rng),
                        num_heads=heads,
                        num_kv_heads=kv_heads,
                        head_dim=rng.choice([8, 16]),
                        value_dim=rng.choice([8, 12]),
                        layout=layout,
                        seed=rng.randrange(1 << 30),
                        dtype=dtype,
                        **mask,
                        **SCHEDULES[name],
                    )
                    found = errors(case, run_in_memory(case))
                    largest = {x: max(largest[x], found[x]) for x in NAMES}
    return largest


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=2, help="packs for each layout, kind of heads and mask")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    torch.set_num_threads(1)
    report = Report()
    report.header("exactness")
    names = ("ring 1", "ring 3", "allgather 2") if given.quick else tuple(SCHEDULES)
    rows, worst = [], 0.0
    for name in names:
        found = largest_errors(name, cases=given.cases, seed=given.seed, dtype=torch.float32)
        rows.append([name, *(f"{found[x]:.1e}" for x in NAMES)])
        worst = max(worst, *found.values())
    table(["algorithm and ranks", *NAMES], rows)
    packs = len(names) * len(LAYOUTS) * len(HEADS) * len(MASKS) * given.cases
    report.at_most(f"largest error of {packs} packs, fp32", worst, TOLERANCE)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
