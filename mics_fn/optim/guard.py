"""Between reduction and update: gradients are unscaled, judged and clipped."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, tree
from mics_fn.collectives import collect
from mics_fn.errors import NonFiniteError, OptimizerError, message
from mics_fn.groups import Home, require_replicas
from mics_fn.optim.clip import (
    check_limit,
    clip_factor,
    counted_homes,
    norm_here,
    norm_problem,
    squares_here,
)
from mics_fn.optim.flat import by_leaf
from mics_fn.optim.limiting import limited
from mics_fn.optim.loss_scale import LossScale, no_scale
from mics_fn.optim.nonfinite import NonFinite, find_nonfinite
from mics_fn.optim.totals import StepTotals
from mics_fn.shards import (
    Arriving,
    Sharded,
    forget_origins,
    homes_of,
    is_leaf,
    refuse_derivative,
    watch_origins,
)
from mics_fn.shards import donate as mark_donated
from mics_fn.tree import Tree

# How many steps in a row may not be finite until that is an error, by `on_nonfinite`.
_IN_ROW = {"raise": 1, None: 3}


@dataclass(frozen=True)
class NormSpike:
    """A watch for gradients whose norm is far above earlier ones; made by `norm_spike`.

    Args:
      factor, window, warmup, action: as for `norm_spike`.
      norms: those of the last steps that were taken, oldest first.
    """

    factor: float
    window: int
    warmup: int
    action: Literal["skip", "report"]
    norms: tuple[float, ...] = field(default=(), repr=False)

    def look(self, norm: float) -> tuple[bool, "NormSpike"]:
        """Whether a norm is a spike, and the watch for the next step."""
        if not math.isfinite(norm):
            return False, self
        # If half of the norms were 0, every later one would be a spike.
        usual = median(self.norms) if len(self.norms) >= self.warmup else 0.0
        spike = 0.0 < usual * self.factor < norm
        if spike and self.action == "skip":
            return True, self
        return spike, replace(self, norms=(*self.norms, norm)[-self.window :])


def norm_spike(
    factor: float = 10.0,
    *,
    window: int = 100,
    warmup: int = 20,
    action: Literal["skip", "report"] = "skip",
) -> NormSpike:
    """A watch for `Guard`: a norm above `factor` times the median of the last ones is a spike.

    If norms stay that high, "skip" refuses every step: look at `Verdict.spike`, and go on with a
    new watch.

    Args:
      factor: above 1.
      window: how many norms are remembered, of steps that were taken.
      warmup: how many norms must be known before one can be a spike; at most `window`.
      action: "skip" refuses the step and does not remember its norm; "report" takes it and tells.

    Returns:
      A value with `look(norm) -> (is_spike, next)`.

    Raises:
      PlanError: a number is out of its range, or `action` is something else.

    Example:
      >>> watch = norm_spike(factor=3.0, warmup=2)
      >>> for norm in (1.0, 2.0, 9.0, 2.5):
      ...     spike, watch = watch.look(norm)
      ...     print(spike, watch.norms)
      False (1.0,)
      False (1.0, 2.0)
      True (1.0, 2.0)
      False (1.0, 2.0, 2.5)
    """
    checks.number("norm_spike", "factor", factor, above=1)
    for name, count in (("window", window), ("warmup", warmup)):
        checks.integer("norm_spike", name, count)
    if warmup > window:
        checks.refuse("norm_spike", "warmup", warmup, f"at most window={window}")
    checks.choice("norm_spike", "action", action, "skip", "report")
    return NormSpike(float(factor), window, warmup, action)


class Verdict(NamedTuple):
    """What `Guard.judge` found, and the gradients to step with.

    Args:
      grads: unscaled and clipped, for `opt_step`; as they were given if the step is refused.
      norm: 0-dim float64 tensor on the device: the L2 norm of the unscaled, unclipped gradient, as
        `global_norm` gives it. None if the guard has no use for it (no `max_norm`, and nothing to
        decide), or if it cannot be known, since leaves live on groups of different ranks.
      finite: whether the norm was finite on all ranks; None if nothing was decided.
      spike: whether the norm was a spike.
      accept: whether to take the step; the same on all ranks.
      next: the guard for the next step, whether this one was taken or refused.
      nonfinite: the first leaf that is not finite, and on which ranks that arose, in words, the
        same on all ranks; None if the norm is finite or nothing was decided.
      found_inf: of a verdict for which the host has not waited: 0-dim float32 tensor on the device,
        1 if the step is not to be taken; `accept` and `next` are then as if it were. Else None.
    """

    grads: Tree  # or `Arriving`, if that was judged
    norm: Tensor | None
    finite: bool | None
    spike: bool
    accept: bool
    next: "Guard"
    nonfinite: str | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class Guard:
    """What is done with gradients after both hops and before the update, as a value.

    Args:
      scale: the scale of the loss, by which gradients are divided.
      max_norm: gradients are multiplied so that their global norm is at most this.
      max_value: after that each element is clamped to [-max_value, max_value].
      spike: a watch made by `norm_spike`.
      on_nonfinite: what is done with a loss or a gradient that is not finite on some rank: "skip"
        refuses the step, "raise" raises NonFiniteError on all ranks, "ignore" takes the step. By
        default such steps are refused, and the third in a row raises NonFiniteError on all ranks;
        on groups that are a part of the world, whose ranks cannot decide for the others, they are
        taken unless there is a scale or a watch. While a dynamic scale can still fall nothing is
        raised, since its overflows are usual.
      in_row: how many steps in a row were refused so far since they were not finite; those of a
        dynamic scale that can fall do not count.
      skipped: how many steps were refused so far, for whatever reason.

    Raises:
      OptimizerError: a limit is not above 0; `scale`, `spike` or `on_nonfinite` is something else;
        or "ignore" with a dynamic scale, whose overflows are never taken.

    Example:
      >>> groups, guard = make_groups(1), Guard(optim.dynamic_scale(8.0), max_norm=1.0)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.5))
      >>> def loss_fn(shards):
      ...     return guard.scale.scale(gather(shards, groups)["w"].sum())
      >>> grads = reduce_grads(torch.func.grad(loss_fn)(state.params), groups)
      >>> verdict = guard.judge(grads, groups)
      >>> if verdict.accept:
      ...     state = opt_step(state, verdict.grads)
      >>> guard = verdict.next
      >>> verdict.norm, state.params["w"].data
      (tensor(1.4142, dtype=torch.float64), tensor([0.6464, 0.6464]))
    """

    scale: LossScale = no_scale()
    max_norm: float | None = None
    max_value: float | None = None
    spike: NormSpike | None = None
    on_nonfinite: Literal["skip", "raise", "ignore"] | None = None
    in_row: int = field(default=0, repr=False, compare=False)
    skipped: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, limit in (("max_norm", self.max_norm), ("max_value", self.max_value)):
            if limit is not None:
                check_limit("Guard", name, limit)
        if not isinstance(self.scale, LossScale):
            fix = "make one with no_scale, static_scale or dynamic_scale"
            text = f"Guard: scale={self.scale!r} is not a LossScale"
            raise OptimizerError(message(text, fix=fix))
        if not isinstance(self.spike, NormSpike | None):
            fix = "make one with norm_spike"
            raise OptimizerError(message(f"Guard: spike={self.spike!r} is not a watch", fix=fix))
        if self.on_nonfinite is not None:
            words = "skip", "raise", "ignore"
            checks.choice("Guard", "on_nonfinite", self.on_nonfinite, *words, kind=OptimizerError)
        what = f"Guard: on_nonfinite={self.on_nonfinite!r}"
        if self.on_nonfinite == "ignore" and self.scale.kind == "dynamic":
            fix = "pass 'skip' or 'raise', or static_scale"
            raise OptimizerError(message(f"{what} with a dynamic scale", fix=fix))
        if self.decides and (self.chosen or self.in_row):
            watch_origins()

    def __reduce__(self) -> Any:  # so that the process that unpickles it watches, too
        return Guard, tuple([getattr(self, each.name) for each in fields(self)])

    @property
    def decides(self) -> bool:
        """Whether it may refuse a step."""
        return self.chosen or self.on_nonfinite is None

    @property
    def chosen(self) -> bool:
        """Whether it may refuse a step because somebody asked for it, and not by default."""
        refuses = self.on_nonfinite in ("skip", "raise")
        return self.scale.checks or self.spike is not None or refuses

    def judge(
        self,
        grads: Tree | Arriving,
        groups: Any,
        donate: bool = False,
        *,
        totals: StepTotals | None = None,
        wait: bool = True,
    ) -> Verdict:
        """Unscale and clip gradients, and decide whether to step on them.

        Args:
          grads: tree of shards, both hops done, of a loss that this guard's `scale` multiplied; or
            a `GradSum`, limited once `opt_step` takes it.
          groups: as for `shard`. With `max_norm` or a watch, each of them must reach all ranks of
            the model, as for `global_norm`; to refuse what is not finite it is enough that one
            does.
          donate: write into the chunks of `grads`, which cannot be used afterwards if anything had
            to be written.
          totals: of a `Trainer`, whose message carries the norm as well.
          wait: whether the host waits for the verdict; see `Verdict.found_inf`. It does all the
            same if more is to be decided than by default, or if the last step was refused.

        Returns:
          A `Verdict`, with the same decision on all ranks even if replicas differ.

        Communication: that of `global_norm` if the norm is needed; to decide, also all-gathers of 8
          bytes over the replication groups, and with several groups over their partition
          groups. With `totals` that of these alone, if all groups have the same ranks. If the norm
          is not finite, also a few small all-gathers to learn where.

        Memory: a copy of the gradients' shards; none with `donate`, or where nothing is written.

        Raises:
          LeafError: a leaf is a full tensor; or a derivative is asked for, which a verdict does not
            have.
          PlanError: the groups do not reach all ranks that hold a part of the model.
          GroupsError: a hierarchy was given, which does not know the replicas.
          NonFiniteError: on all ranks, with "raise"; nothing was written.
        """
        fix = "judge outside, or in torch.no_grad(); global_norm can be differentiated"
        held = [] if isinstance(grads, Arriving) else tree.flatten(grads, is_leaf)[0]
        leaves = [getattr(leaf, "data", leaf) for leaf in held]
        refuse_derivative("Guard.judge", leaves, fix)
        with torch.no_grad():
            return self._judge(grads, groups, donate, totals, wait)

    def _judge(
        self, grads: Any, groups: Any, donate: bool, totals: StepTotals | None, wait: bool
    ) -> Verdict:
        like = grads.arrival().like if isinstance(grads, Arriving) else grads
        homes = dict.fromkeys(homes_of("Guard.judge", groups, like))
        exact = self.check_groups(like, groups)
        decides = self.chosen or (self.decides and any(home.life.whole for home in homes))
        if not decides and self.max_norm is None:
            if totals is not None:
                totals.exchange()
            return Verdict(self._limited(grads, 1.0, donate), None, None, False, True, self)
        if totals is not None and totals.reaches(homes):
            highest = here = _norm_by(totals, grads, groups) / self.scale.value
        else:
            here = norm_here(grads, groups) / self.scale.value
            highest = here if totals is None else totals.marked(here)
            highest = _highest(highest, homes) if decides else highest
            if totals is not None:
                totals.exchange()
        norm = here if exact else None
        factor = clip_factor(here, self.max_norm or math.inf)
        if not decides:
            return Verdict(self._limited(grads, factor, donate), norm, None, False, True, self)
        if not (wait or self.chosen or self.in_row) and totals is not None:
            bad = (highest + totals.loss).isfinite().logical_not().float()
            given = self._limited(grads, 1.0 if self.max_norm is None else factor, donate)
            return Verdict(given, norm, None, False, True, self, None, bad)
        # The host waits once for both numbers.
        times, highest = torch.stack([factor, highest]).tolist()
        finite, spike, watch = math.isfinite(highest), False, self.spike
        finite = finite and (totals is None or totals.finite)
        if watch is not None:
            spike, watch = watch.look(highest)
        where = None if finite else find_nonfinite(grads, groups, totals and totals.own_loss)
        leaves = tree.flatten(by_leaf(like), is_leaf)[0]
        forget_origins({leaf.bucket for leaf in leaves if isinstance(leaf, Sharded)})
        skips = not finite and self.on_nonfinite != "ignore"
        in_row = self.in_row + 1 if skips and not self._falls else 0
        if where and in_row >= _IN_ROW.get(self.on_nonfinite, math.inf):
            raise _error(where, in_row)
        why = where and where.text
        refused = skips or (spike and watch is not None and watch.action == "skip")
        after = replace(self, scale=self.scale.adjust(finite), spike=watch)
        after = replace(after, in_row=in_row, skipped=self.skipped + refused)
        if refused:
            return Verdict(grads, norm, finite, spike, False, after, why)
        out = self._limited(grads, times / self.scale.value, donate)
        return Verdict(out, norm, finite, spike, True, after, why)

    @property
    def _falls(self) -> bool:
        return self.scale.kind == "dynamic" and self.scale.value > self.scale.min

    def after_refusal(self) -> "Guard":
        """This guard after a step that was masked; see `Verdict.found_inf`."""
        return replace(self, in_row=self.in_row + 1, skipped=self.skipped + 1)

    def check_groups(self, like: Tree, groups: Any) -> bool:
        """Refuse groups on which this guard cannot know what it needs.

        Args:
          like: the tree of shards, of parameters or of gradients.
          groups: as for `judge`.

        Returns:
          Whether the norm of the whole tree can be known.

        Raises:
          PlanError: see [Note: parts of a model] in `clip`. To refuse gradients that are not
            finite, it is enough that some groups reach all ranks: every rank learns of them then.
        """
        homes = counted_homes("Guard.judge", like, groups)
        problem = norm_problem("Guard.judge", homes)
        needs_norm = self.max_norm is not None or self.spike is not None
        alone = self.chosen and not any(home.life.whole for home in homes)
        if problem is not None and (needs_norm or alone):
            raise problem
        return problem is None

    def _limited(self, grads: Any, factor: Tensor | float, donate: bool) -> Any:
        out = limited(grads, factor, self.max_value, donate=donate)
        if donate and out is not grads and not isinstance(grads, Arriving):
            mark_donated(grads, "grads", "Guard.judge", keep=out)
        return out


def _norm_by(totals: StepTotals, grads: Tree | Arriving, groups: Any) -> Tensor:
    """The norm of the whole gradient, by a message whose ranks are those of all groups."""
    # Of each of its groups there are p parts, and the message gives a mean over all ranks.
    parts = [x * home.partition_size for home, x in squares_here(grads, groups).items()]
    return totals.exchange(torch.stack(parts).sum() if parts else None).sqrt()


def _error(where: NonFinite, in_row: int) -> NonFiniteError:
    times = "" if in_row == 1 else f" in {in_row} steps in a row"
    what = f"Guard.judge: loss or gradient is not finite{times}, and the step was not taken"
    fix = (
        "look at the batch, the loss and the rate there; on_nonfinite='skip' leaves such steps out"
    )
    return NonFiniteError(message(what, [where.text], fix), where.leaf, where.ranks)


def _highest(norm: Tensor, homes: Iterable[Home]) -> Tensor:
    """The highest norm of any rank; infinite if one is not finite."""
    highest, homes = torch.where(norm.isfinite(), norm, math.inf), list(homes)
    require_replicas("Guard.judge", homes)
    for home in homes:
        # With one set of groups, all ranks of a partition group have the same norm already.
        comms = [home.partition, home.replicas] if len(homes) > 1 else [home.replicas]
        for comm in comms:
            highest = collect(comm, highest, "verdict of a guard").amax()
    return highest
