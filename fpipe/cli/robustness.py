"""Say how fragile schedules are: what they take when costs are not what they were said to be."""

from __future__ import annotations

import typer

from fpipe.cli import options
from fpipe.cli.output import number, table, write_pictures
from fpipe.timing.noise import Noise
from fpipe.timing.robustness import robustness as robustness_of


def robustness(
    typed: typer.Context,
    what: options.Some,
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    costs: options.Costs = "",
    cluster: options.OnCluster = None,
    jitter: options.Jitter = 0.1,
    slow_rank: options.SlowRank = 1.0,
    slow_link: options.SlowLink = 1.0,
    samples: options.Samples = 200,
    seed: options.Seed = 0,
    svg: options.Svg = None,
    png: options.Png = None,
) -> None:
    """Simulate schedules when costs vary (fpipe.robustness).

    \b
    nominal  makespan with the costs as given, in seconds
    median   half of the draws take no longer
    p95      95 of 100 draws take no longer
    fragile  how far p95 is above nominal
    \b
    Examples:
      python -m fpipe robustness one_f_one_b zb_h1 zb_h2 --jitter 0.1 --slow-rank 1.3
      python -m fpipe robustness gpipe zb_h2 -p 4 -m 8 --costs F=10,B=12,W=8,c=0.5 --slow-link 3 --svg spread.svg
    """
    options.only_of_names(typed, what)
    costs = costs.on(cluster)
    programs = {one: options.program_of(one, ranks, microbatches, None, None, costs) for one in what}
    found = robustness_of(programs, costs.of, noise=Noise(jitter, slow_rank, slow_link), samples=samples, seed=seed)
    table(
        ("schedule", "nominal", "median", "p95", "fragile"),
        [(row.name, *map(number, (row.nominal, row.median, row.p95)), f"{row.fragile:.1%}") for row in found],
    )
    print(f"shortest at the median {found.best('median').name}, at the 95th percentile {found.best('p95').name}")
    write_pictures((svg, png), found)
