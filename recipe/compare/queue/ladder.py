"""A ladder as a Hydra sweeper: the sizes that are fitted, the prediction, and then the predicted size.

A sweep that is started again in the same folder goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from recipe.compare.arena.config import ArenaConfig
from recipe.compare.arena.plan import now
from recipe.compare.ladder.config import LadderConfig, rule
from recipe.compare.ladder.plan import LadderPlan, LadderRun, read_ladder, same_ladder, write_ladder
from recipe.compare.queue.arena import ROOT, ArenaSweeper, arms_of, common_overrides, final_loss, merged
from recipe.compare.queue.jobs import Job, SweepError
from recipe.compare.queue.launcher import quoted
from recipe.run.summary import git_state


def register() -> None:
    """Make the sweeper of conf/hydra/sweeper/ladder.yaml known to Hydra in this process."""
    Plugins.instance().register(LadderSweeper)


class LadderSweeper(ArenaSweeper):
    """Runs a ladder; its options are those of LadderConfig."""

    __module__ = "hydra_plugins.ladder_sweeper"  # Hydra takes sweepers from this package only

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch the runs of the plan that have no result yet in the sweep's folder. Raises PlanError, SweepError."""
        wanted, folder = self.wanted_ladder(arguments), Path(self.settings.hydra.sweep.dir)
        earlier = read_ladder(folder)
        plan = wanted if earlier is None else same_ladder(earlier, wanted, folder)
        write_ladder(plan, folder)
        OmegaConf.save(self.settings, folder / "multirun.yaml")
        last = plan.runs([plan.next])
        returned = [self.climb(plan, plan.runs(plan.depths), ahead=len(last))]
        if not plan.predicted:
            plan = replace(plan, predicted=predictions(plan, folder), predicted_at=now())
            write_ladder(plan, folder)
            for arm, (loss, low, high, _) in plan.predicted.items():
                print(f"predicted  {arm} at depth {plan.next}: {loss:.4f} ({low:.4f} to {high:.4f})")
        returned.append(self.climb(plan, last, ahead=0))
        return returned

    def wanted_ladder(self, arguments: Sequence[str]) -> LadderPlan:
        """The plan that the command line asks for."""
        arena: ArenaConfig = OmegaConf.to_object(self.settings.arena)  # type: ignore[assignment]
        ladder: LadderConfig = OmegaConf.to_object(self.settings.ladder)  # type: ignore[assignment]
        arms, common = arms_of(arena), common_overrides(arguments)
        sizes = dict[str, list[str]]()
        for name, overrides in arms.items():
            cfg = self.loader.load_sweep_config(self.settings, merged(common, overrides))
            sizes_of_arm = cfg.training.batch_size, cfg.seq_len, float(cfg.optimizer.lr), cfg.model.n_embd
            sizes |= {f"{name} {depth}": rule(ladder, depth, *sizes_of_arm) for depth in [*ladder.depths, ladder.next]}
        return LadderPlan(
            arms, arena.baseline or next(iter(arms)), common, self.command_line, arena.first_seed, arena.seeds,
            ladder.depths, ladder.next, sizes, git_state(ROOT)["commit"], now(), {},
        )  # fmt: skip

    def climb(self, plan: LadderPlan, runs: Sequence[LadderRun], ahead: int) -> Sequence[JobReturn]:
        """Run the jobs of a stage. Exits where one failed or a signal came."""
        self.jobs.ahead = ahead  # which the process launcher shows
        jobs = [
            merged(
                *plan.overrides(run),
                [f"seed={run.seed}", f"arena.arm={quoted(run.arm)}", f"ladder.depth={run.depth}"],
            )
            for run in runs
        ]
        return self.jobs.launch(jobs, initial_job_idx=runs[0].number)


def predictions(plan: LadderPlan, folder: Path) -> dict[str, list[float]]:
    """The loss of each arm at the next size: [loss, low, high, compute]. Raises SweepError without whole results."""
    from recipe.compare.ladder.fit import predict  # needs scipy, which takes a second to import

    predictions = {}
    for arm in plan.arms:
        flops, tokens, losses = list[float](), list[float](), list[list[float]]()
        for depth in plan.depths:
            runs = [run for run in plan.runs(plan.depths) if (run.arm, run.depth) == (arm, depth)]
            summaries = [Job(run.number, (), folder / str(run.number), 0).summary() for run in runs]
            if any(final_loss(summary) == float("inf") for summary in summaries):
                raise SweepError(
                    f"{arm} at depth {depth} has a run without a finite loss, so nothing can be predicted; start the "
                    "sweep again, or lower optimizer.lr in another folder."
                )
            flops.append(summaries[0]["flops_per_token"])
            tokens.append(summaries[0]["tokens"])
            losses.append([final_loss(summary) for summary in summaries])
        compute = flops_at_depth(plan.next, plan.depths, flops) * tokens[0] * plan.next / plan.depths[0]
        predictions[arm] = [*predict([f * t for f, t in zip(flops, tokens, strict=True)], losses, compute), compute]
    return predictions


def flops_at_depth(depth: int, depths: Sequence[int], flops: Sequence[float]) -> float:
    """The operations of a token at another depth. By the rule, matrices take the third power of the depth, attention
    the second, and the vocabulary's head the first."""
    return float(np.polyval(np.polyfit(depths, flops, 3), depth))
