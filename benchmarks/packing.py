"""How full packs are and what planning them costs: the mixes S, M and L, every policy, and a million documents.

Lengths are log-normal: S median 600, sigma 0.9, packs of 8 192; M median 4 000, sigma 1.4, and L median 40 000, sigma
0.7, packs of 131 072. The million is drawn like M and planned in a process of its own, whose peak memory is read from
the kernel. Integers only are compared, so the figures but times are the same on every machine. One core.
"""

import multiprocessing
import resource
import sys
import time
from statistics import mean

import numpy as np
import numpy.typing as npt

from benchmarks.report import Report, parser, table
from data_pipeline import assign_packs, attention_cost, plan_packs

MIXES = {"S": (600, 0.9, 8_192, 50_000), "M": (4_000, 1.4, 131_072, 50_000), "L": (40_000, 0.7, 131_072, 10_000)}
"""Name -> (median, sigma, seq_length, documents)."""
REPLICAS, GLOBAL_BATCH = 4, 32


def lengths_of(mix: str, count: int) -> npt.NDArray[np.int64]:
    """[count] document lengths of a mix, the same in every run."""
    median, sigma, cap, _ = MIXES[mix]
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(np.log(median), sigma, count), 1, cap).astype(np.int64)


def run_mixes(report: Report, share: float) -> None:
    """Efficiency and seconds of each policy on each mix; balance of a step's packs over replicas."""
    rows: list[tuple[object, ...]] = []
    for mix, (_, _, seq_length, count) in MIXES.items():
        lengths = lengths_of(mix, max(1000, int(count * share)))
        for policy in ("best_fit", "first_fit", "sequential", "none"):
            began = time.perf_counter()
            plan = plan_packs(lengths, seq_length=seq_length, policy=policy)
            seconds = time.perf_counter() - began
            rows.append((mix, policy, len(plan), f"{plan.report.efficiency:.2%}", seconds))
            if policy in ("best_fit", "first_fit"):
                full = plan.report.efficiency
                report.at_least(f"mix {mix}, {policy}, share of pack room that tokens fill", full, 0.995)
            if policy == "best_fit":
                even = _balance(plan.packs, lengths)
        report.at_most(f"mix {mix}, work of replicas in a step, largest / mean, taken as they come", even[0], None)
        report.at_most(f"mix {mix}, work of replicas in a step, largest / mean, as assigned", even[1], None)
    table(("mix", "policy", "packs", "full", "seconds"), rows)


def _balance(packs: tuple[tuple[int, ...], ...], lengths: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Largest over mean attention work of the replicas, mean over whole steps: in turn, and by `assign_packs`."""
    in_turn, assigned = [], []
    costs = [attention_cost(lengths[list(pack)].tolist()) for pack in packs]
    for start in range(0, len(costs) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
        step = costs[start : start + GLOBAL_BATCH]
        for found, parts in (
            (in_turn, [list(range(r, GLOBAL_BATCH, REPLICAS)) for r in range(REPLICAS)]),
            (assigned, assign_packs(step, REPLICAS)),
        ):
            loads = [sum(step[i] for i in part) for part in parts]
            found.append(max(loads) / mean(loads))
    return mean(in_turn or [1.0]), mean(assigned or [1.0])


def _plan_many(count: int, policy: str) -> tuple[float, float]:
    """(seconds, GB that the process had at most)."""
    lengths = lengths_of("M", count)
    began = time.perf_counter()
    plan_packs(lengths, seq_length=MIXES["M"][2], policy=policy)
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def run_many(report: Report, count: int) -> None:
    """A large corpus, each policy in a fresh process."""
    for policy in ("best_fit", "first_fit"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, gigabytes = pool.apply(_plan_many, (count, policy))
        report.at_most(f"{count} documents, {policy}, plan", seconds, 10.0, " s")
        report.at_most(f"{count} documents, {policy}, peak memory of the process", gigabytes, 1.0, " GB")


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report()
    report.header("packing")
    run_mixes(report, 0.02 if options.quick else 1.0)
    run_many(report, 20_000 if options.quick else 1_000_000)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
