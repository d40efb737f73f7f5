"""How far the demo's sharded run is from one process on the same batches, which is in float32."""

from typing import Any

import torch
from torch import Tensor

from mics_fn.lab.demo.run import CODED_LR, CODED_STEPS, AloneResult, RankResult
from mics_fn.lab.report import table

# Both runs do the same arithmetic in different orders, so they differ by rounding (1e-7), which
# training magnifies: two single processes that add up a batch in different orders end 4e-6 apart in
# either figure after 60 steps. At three times this learning rate, where losses begin to jump, they
# end 1e-2 apart. If one rank's samples get a weight that is 10 % wrong, the figures reach 2e-4 and
# 3e-3 within five steps.
LOSS_BOUND = 1e-4  # relative, at every step
PARAM_BOUND = 1e-3  # L2 norm of the difference over the norm of the parameters
LATE = 30  # the last losses whose mean is compared, or half of them if there are fewer than 60


def compare(
    run: RankResult, alone: AloneResult, *, bounded: bool = True, coded_bound: float | None = None
) -> dict[str, Any]:
    """How far the sharded run is from the single process, and whether that is within the bounds.

    Args:
        run, alone: the results of both.
        bounded: whether the bounds of float32 hold for such a run.
        coded_bound: the bound on the mean of the last losses, for a run that sends codes. Without
            any bound "ok" is None.
    """
    ours, theirs = torch.tensor(run.losses), torch.tensor(alone.losses)
    loss_gap = (ours - theirs).abs()
    gaps = {k: (run.params[k].double() - p.double()) for k, p in alone.params.items()}
    param_rel = _norm(gaps) / _norm(alone.params)
    loss_rel = (loss_gap / theirs).max().item()
    late = max(1, min(LATE, len(ours) // 2))
    means = [losses[-late:].double().mean().item() for losses in (ours, theirs)]
    late_rel = abs(means[0] / means[1] - 1)
    ok = None if coded_bound is None else late_rel <= coded_bound
    if bounded:
        ok = loss_rel <= LOSS_BOUND and param_rel <= PARAM_BOUND
    return {
        "loss_max_abs": loss_gap.max().item(),
        "loss_max_rel": loss_rel,
        "loss_first_rel": (loss_gap[0] / theirs[0]).item(),
        "late_steps": late,
        "late_losses": means,  # of this run, and of the single process
        "held_out_abs": abs(run.held_out[-1][1] - alone.held_out),
        "param_max_abs": max(gap.abs().max().item() for gap in gaps.values()),
        "param_rel": param_rel,
        "loss_bound": LOSS_BOUND if bounded else None,
        "param_bound": PARAM_BOUND if bounded else None,
        "late_bound": None if bounded else coded_bound,
        "ok": ok,
    }


def _norm(tensors: dict[str, Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors.values()) ** 0.5


def render_check(check: dict[str, Any]) -> str:
    """The figures of `compare` as a table."""
    rows = [("", "largest", "relative", "bound")]
    for title, name in (("train losses", "loss"), ("parameters at the end", "param")):
        bound = check[f"{name}_bound"]
        of_bound = "none" if bound is None else f"{bound:.0e}"
        largest = check[f"{name}_max_abs"]
        relative = check["loss_max_rel" if name == "loss" else "param_rel"]
        rows.append((title, f"{largest:.1e}", f"{relative:.1e}", of_bound))
    ours, theirs = check["late_losses"]
    verdicts = {
        True: "within the bounds: ok",
        False: "OUT OF BOUNDS: the runs are not the same",
        None: "no bounds: they are for float32 at the default lr and\n"
        f"  seed, and for codes up to lr {CODED_LR:g} and {CODED_STEPS} steps",
    }
    found = table("difference from one process on the same batches, in float32", rows)
    mean = f"  mean of the last {check['late_steps']} losses: {ours:.4f}, alone {theirs:.4f}"
    mean += f", {ours / theirs - 1:+.2%}"
    if check["late_bound"] is not None:
        mean += f"\n  bound on that for these codes: {check['late_bound']:.1%}"
    return f"{found}\n{mean}\n  {verdicts[check['ok']]}"
