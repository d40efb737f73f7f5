"""Between reduction and update: gradients are unscaled, judged and clipped.

[Note: which scale] A gradient must be divided by the scale that its loss was multiplied by. A
`LossScale` never changes: `adjust` gives another one for the next step. So the value that scaled
the loss also unscales the gradient, and a scale that has grown meanwhile cannot be taken for it.

[Note: where it arose] This is looked for only once the norm is known not to be finite, which all
ranks know alike. They agree on the first leaf, in the order of the tree, whose reduced gradient is
not finite. Then each says what its own gradient of that leaf was before hop 1 mixed them.

[Note: before hop 1] After hop 1 nobody can tell whose part of a mean was NaN. So each rank looks at
its own gradients where they are packed to be sent (`pack.observe`), and remembers by bucket what
it saw until a `Guard` has judged them. On the CPU it adds up what was just written, as fast as
memory is read, and only if the sum is not finite it looks leaf by leaf. An accelerator computes the
largest absolute value of each leaf, for which the host does not wait. All this begins with the
first guard of the process that refuses steps.

[Note: one message] At the end of a step each rank knows its loss, how many samples and tokens it
had, and the squares of its part of the gradient. Four float64 numbers go over the partition group
and then over the replication group, and what comes back says whether loss and gradient are finite
everywhere, the norm that a guard limits, the loss of the step, and whether batches were unlike.
Counts are whole numbers, so their fractions are free for more, such as a digest.
"""

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter, mul
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from mics_fn import _torch, checks, shards, tree
from mics_fn.collectives import collect_bytes, levels
from mics_fn.errors import LeafError, NonFiniteError, PlanError, by_value, message, name_ranks
from mics_fn.groups import Groups, Home, require_replicas
from mics_fn.optim import norms
from mics_fn.tree import Tree


class HostCopy:
    """Numbers of a device on their way to the host; see `_torch.Queued`."""

    def __init__(self, numbers: Tensor) -> None:
        buffer = _torch.host_buffer(numbers.nbytes, numbers.device).view(numbers.dtype)
        self._host = buffer.copy_(numbers, non_blocking=True)
        self.queued = _torch.Queued(numbers.device)

    @cached_property
    def numbers(self) -> list[float]:
        """The host waits for them, and for nothing that was queued later."""
        self.queued.wait()
        return self._host.tolist()


# The scale of a loss, as a value, so that small float16 gradients do not become 0.


@dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied by before backward, and its gradients are divided by after it.

    Made by `no_scale`, `static_scale` or `dynamic_scale`. It is a value: see [Note: which scale].

    Args:
      kind: which of the three functions made it.
      value: the scale.
      factor, interval: as for `dynamic_scale`.
      good_steps: finite steps in a row since the last overflow or growth.
      overflows: all steps with an overflow so far.

    Raises:
      PlanError: a number is out of its range.
    """

    CHANGING: ClassVar = ("value", "good_steps", "overflows")  # from step to step
    LEAST, MOST = 1.0, 2.0**24  # of a dynamic scale

    kind: Literal["none", "static", "dynamic"]
    value: float
    factor: float = 2.0
    interval: int = 2000
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        checks.number("LossScale", "value", self.value, above=0)
        if self.kind == "dynamic":
            checks.number("LossScale", "factor", self.factor, above=1)
            checks.number("LossScale", "value", self.value, least=self.LEAST, below=self.MOST + 1)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale; keep it in float32, since float16 has no number above 65504."""
        return loss if self.value == 1.0 else loss * self.value

    def adjust(self, finite: bool | Tensor) -> "LossScale":
        """The scale for the next step.

        Args:
          finite: whether the gradient was finite on all ranks: a bool, or a 0-dim bool tensor, for
            which the host waits.

        Raises:
          LeafError: `finite` is something else, such as a norm.
        """
        if isinstance(finite, Tensor) and finite.dtype == torch.bool:
            finite = bool(finite)
        if not isinstance(finite, bool):
            fix = "pass torch.isfinite(norm) or a bool, the same on all ranks"
            raise LeafError(f"adjust: finite is {finite!r}, not a bool", fix=fix)
        if self.kind == "none":
            return self
        overflows = self.overflows + (not finite)
        if self.kind == "static":
            return replace(self, overflows=overflows)
        value, good = self.value, self.good_steps + 1
        if not finite:
            value, good = max(value / self.factor, self.LEAST), 0
        elif good == self.interval:
            value, good = min(value * self.factor, self.MOST), 0
        return replace(self, value=value, good_steps=good, overflows=overflows)


def no_scale() -> LossScale:
    """A scale of 1 that never changes, and returns loss and gradients as they are.

    Returns:
      A `LossScale`.

    Example:
      >>> loss = torch.tensor(3.0)
      >>> no_scale().scale(loss) is loss
      True
    """
    return LossScale("none", 1.0)


def static_scale(scale: float) -> LossScale:
    """A scale that stays the same, and counts overflows.

    Args:
      scale: above 0; with powers of two nothing is rounded.

    Returns:
      A `LossScale`.

    Raises:
      PlanError: `scale` is not above 0, or not finite.

    Example:
      >>> static_scale(128.0).scale(torch.tensor(3.0))
      tensor(384.)
    """
    return LossScale("static", float(scale))


def dynamic_scale(init: float = 2.0**16, *, factor: float = 2.0, interval: int = 2000) -> LossScale:
    """A scale that falls at overflows and grows again after a run of finite steps.

    Each overflow divides the scale by `factor`. `interval` finite steps in a row multiply it by
    `factor`; an overflow starts that count again. It stays between 1 and 2**24.

    Args:
      init: the first scale. With powers of two, here and as `factor`, nothing is rounded.
      factor: above 1.
      interval: finite steps in a row before the scale grows.

    Returns:
      A `LossScale`.

    Raises:
      PlanError: a number is out of its range, or not finite.

    Example:
      >>> scale = dynamic_scale(8.0, interval=2)
      >>> for finite in (False, True, True):
      ...     scale = scale.adjust(finite)
      ...     print(scale.value, scale.good_steps)
      4.0 0
      4.0 1
      8.0 0

    References: Mixed Precision Training, Micikevicius et al., ICLR 2018, arXiv:1710.03740, section
      3.2.
    """
    return LossScale("dynamic", float(init), float(factor), interval)


# Which leaf of a gradient is not finite, and on which ranks that arose.


# Since the last verdict, by bucket: the largest absolute value by slot, NaN if there is one.
_seen: dict[shards.Bucket, Tensor] = {}


def note_nonfinite(bucket: shards.Bucket, full: Tensor | None) -> None:
    """Look at this rank's own gradients of a bucket, packed, before others are added."""
    if full is None:
        _seen.pop(bucket, None)
    elif full.numel() and not _torch.has_no_data(full):
        found = torch.zeros(len(bucket.shapes), dtype=full.dtype)
        # A sum in float16 may overflow although no element does.
        ends = full.aminmax if full.dtype == torch.float16 else lambda: (full.sum(),)
        if _torch.is_async(full.device) or not all(math.isfinite(x.item()) for x in ends()):
            found = _magnitudes(shards.pack.split_full(bucket, full))
        before = _seen.get(bucket)
        if before is not None and before.device == found.device:
            found = torch.maximum(before, found)
        _seen[bucket] = found


def kind_of(values: Tensor) -> str:
    """NaN, infinite or finite: the first of these that a value is."""
    return _kind(_magnitudes([values]).item())


def _magnitudes(leaves: list[Tensor]) -> Tensor:
    """The largest absolute value of each leaf; 0 of an empty one."""
    zero = leaves[0].new_zeros(())
    norms = iter(_torch.foreach_norm([x for x in leaves if x.numel()], math.inf))
    return torch.stack([next(norms) if x.numel() else zero for x in leaves])


def _kind(highest: float) -> str:
    return "NaN" if math.isnan(highest) else "infinite" if math.isinf(highest) else "finite"


def find_nonfinite(found: norms.Measured, loss: Tensor | None) -> tuple[str, tuple, str]:
    """Find where a gradient is not finite, the same on all ranks.

    Args:
      found: gradients, both hops done, whose norm is not finite on some rank.
      loss: this rank's, if that is known.

    Returns:
      The path of the first such leaf, "" if only the norm is not finite; the ranks on which it
      arose, none if it was finite on all of them, or if that is not known; and this in words.

    Communication: over the ranks of all groups a number of each rank, then two words of each.
    """
    leaves, homes = found.found.trained, list(found.homes)
    pieces = found.found.whole().pieces
    odd = (i for i, x in enumerate(pieces) if x.numel() and kind_of(x) != "finite")
    paths = [tree.join("grads", path) for path in found.found.paths]
    mine = next(odd, None)
    (firsts,) = _said(homes, ["" if mine is None else json.dumps([mine, paths[mine]])])
    at, path = min(map(json.loads, filter(None, firsts.values())), default=(-1, ""))
    kind = ""  # of this rank's own gradient, before it was reduced
    if path in paths:  # in a pipeline it may be in another stage, or in each at another place
        at = paths.index(path)
        seen = _seen.get(leaves[at].bucket)
        kind = "" if seen is None else _kind(seen[leaves[at].slot].item())
        if any(at in index for home, index in found.homes.items() if len(home.ranks) == 1):
            kind = kind_of(pieces[at])  # it reduced nothing
    losses, kinds = _said(homes, ["" if loss is None else kind_of(loss), kind])
    at_loss, ranks = _odd(losses)
    if not path:
        why = f"the loss is {at_loss}; every gradient is finite"
        norm = "every gradient is finite, but their norm exceeds float32"
        return "", ranks, why if at_loss else norm
    where, own = _odd(kinds)
    if where:
        return path, own, f"{path} is {where}"
    if all(kinds.values()):
        return path, (), f"{path} is finite on each rank, but not after the reduction"
    if at_loss:
        return path, ranks, f"{path} is not finite; the loss is {at_loss}"
    why = "nobody looked at gradients before they were reduced; from the next step on a guard does"
    return path, (), f"{path} is not finite; it is not known on which rank, since {why}"


def _said(homes: list[Home], here: list[str]) -> list[dict[int, str]]:
    """Collect the texts of all ranks, by global rank."""
    said = {homes[0].state.rank: here}
    for each in homes:
        for text in collect_bytes(each, json.dumps(said).encode()).values():
            said |= {int(rank): texts for rank, texts in json.loads(text).items()}
    return [{rank: texts[i] for rank, texts in said.items()} for i in range(len(here))]


def _odd(said: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Which ranks have something that is not finite, in words and as numbers."""
    odd = {rank: kind for rank, kind in said.items() if kind in ("NaN", "infinite")}
    text = ", ".join(f"{kind} on {name_ranks(ranks)}" for kind, ranks in by_value(odd))
    return text, tuple(sorted(odd))


# `StepTotals`: what all ranks exchange once in a step, in one message of 32 bytes.

TOTALS = "step totals"  # in the ledger
_warned: set[str] = set()  # in this process


class StepTotals:
    """The numbers of a step, of this rank and then of all; see [Note: one message].

    Args:
      home: its ranks exchange it.
      loss: this rank's loss, 0-dim and float64, on the device.
      samples, tokens: how many this rank had.
      weighted: whether losses have weights, so that unlike batches are meant.
    """

    flag: Any = None  # `abort_flag` as it was when the step began

    def __init__(
        self, home: Groups, loss: Tensor, samples: int, tokens: int, *, weighted: bool = False
    ) -> None:
        self.home, self.own_loss, self._counts = home, loss, (samples, tokens)
        self._weighted = weighted
        self._found = self.loss = torch.empty(0)  # what came back, and in it the mean of losses
        self._copy: HostCopy | None = None  # of what came back, on the host

    def exchange(self, squares: Tensor | None = None) -> Tensor:
        """Send it, once; the host does not wait on an accelerator.

        Args:
          squares: a number of this rank, 0-dim and float64.

        Returns:
          The mean of `squares` over ranks.
        """
        zero = self.own_loss.new_zeros(())
        counts = map(partial(torch.full_like, zero), self._counts)
        self._found = torch.stack([self.own_loss, zero if squares is None else squares, *counts])
        if len(self.home.stacked_ranks) > 1:
            self._found = levels.start_mean_over_ranks(self.home, self._found, TOTALS).wait()
        self.loss = self._found[0]
        return self._found[1]

    def fetch(self, found_inf: Tensor | None = None) -> None:
        """Begin to copy the result to the host, which waits where that is read.

        Args:
          found_inf: of a masked step, as `Verdict` has it. It is written to, behind the last
            collective: the step is masked, too, if collectives were aborted before that was done.
        """
        if found_inf is not None:
            flag = self.flag.to(found_inf.device, non_blocking=True)
            torch.maximum(found_inf, flag, out=found_inf)
            self._copy = HostCopy(torch.cat([self._found, torch.stack([found_inf, flag])]))
        elif _torch.is_async(self.home.device):
            self._copy = HostCopy(self._found)

    def outcome(self) -> tuple[bool, bool]:
        """Of a masked step, whether it was refused, and whether that was since it was aborted."""
        *_, refused, aborted = cast(HostCopy, self._copy).numbers
        return bool(refused), bool(aborted)

    @cached_property
    def of_all(self) -> tuple[bool, int, int]:
        """Whether all losses are finite, and how many samples and tokens all ranks had.

        The host waits for that, and for nothing that was queued later.
        """
        found = self._found.tolist() if self._copy is None else self._copy.numbers
        n = self.home.world_size
        # Behind a flag of 0 they are right, as no abort had begun.
        if self._copy is not None and self._copy.queued.lost and found[5:] != [0.0]:
            self.home.partition.check_open()  # which raises
        return math.isfinite(found[0]), round(found[2] * n), round(found[3] * n)

    def warn_of_unequal(self) -> None:
        """Warn once if ranks had unlike numbers of samples, whose mean of means is another one."""
        own, n, (_, samples, _) = self._counts[0], self.home.world_size, self.of_all
        if self._weighted or own * n == samples or "samples" in _warned:
            return
        _warned.add("samples")
        text = f"Trainer: rank {self.home.rank} has {own} samples in this step, and the {n} ranks"
        lines = ["each rank counts the same, so this is not the mean over samples; said once"]
        fix = "give all ranks equally many, or pass weight=, such as the number of samples"
        warnings.warn(message(f"{text} have {samples} together", lines, fix), stacklevel=6)


_RANKS, _PIECES = attrgetter("stacked_ranks"), attrgetter("num_pieces")
# How many steps in a row may not be finite until that is an error, by `on_nonfinite`.
_IN_ROW = {"raise": 1, None: 3}


@dataclass(frozen=True)
class NormSpike:
    """A watch for gradients whose norm is far above earlier ones; made by `norm_spike`.

    Args:
      factor, window, warmup: as for `norm_spike`.
      norms: those of the last steps that were taken, oldest first.
    """

    factor: float
    window: int
    warmup: int
    norms: tuple[float, ...] = field(default=(), repr=False)

    def observe(self, norm: float) -> tuple[bool, "NormSpike"]:
        """Whether a norm is a spike, and the watch for the next step."""
        if not math.isfinite(norm):
            return False, self
        # If half of the norms were 0, every later one would be a spike.
        usual = median(self.norms) if len(self.norms) >= self.warmup else 0.0
        if 0.0 < usual * self.factor < norm:
            return True, self
        return False, replace(self, norms=(*self.norms, norm)[-self.window :])


def norm_spike(factor: float = 10.0, *, window: int = 100, warmup: int = 20) -> NormSpike:
    """A watch for `Guard`: a norm above `factor` times the median of the last ones is a spike.

    Such a step is refused, and its norm is not remembered. If norms stay that high, every step is:
    look at `Verdict.spike`, and go on with a new watch.

    Args:
      factor: above 1.
      window: how many norms are remembered, of steps that were taken.
      warmup: how many norms must be known before one can be a spike; at most `window`.

    Returns:
      A value with `observe(norm) -> (is_spike, next)`.

    Raises:
      PlanError: `factor` is not above 1, or `warmup` is above `window`.

    Example:
      >>> watch = norm_spike(factor=3.0, warmup=2)
      >>> for norm in (1.0, 2.0, 9.0, 2.5):
      ...     spike, watch = watch.observe(norm)
      ...     print(spike, watch.norms)
      False (1.0,)
      False (1.0, 2.0)
      True (1.0, 2.0)
      False (1.0, 2.0, 2.5)
    """
    checks.number("norm_spike", "factor", factor, above=1)
    if warmup > window:
        checks.refuse("norm_spike", "warmup", warmup, f"at most window={window}")
    return NormSpike(float(factor), window, warmup)


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

    grads: Tree  # or a stream, if that was judged
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
      PlanError: a limit is not above 0; `on_nonfinite` is something else; or "ignore" with a
        dynamic scale, whose overflows are never taken.

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
    spike: NormSpike | None = None
    on_nonfinite: Literal["skip", "raise", "ignore"] | None = None
    in_row: int = field(default=0, repr=False, compare=False)
    skipped: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            checks.number("Guard", "max_norm", self.max_norm, above=0, finite=False)
        words = "skip", "raise", "ignore", None
        checks.choice("Guard", "on_nonfinite", self.on_nonfinite, *words)
        if self.on_nonfinite == "ignore" and self.scale.kind == "dynamic":
            fix = "pass 'skip' or 'raise', or static_scale"
            raise PlanError("Guard: on_nonfinite='ignore' with a dynamic scale", fix=fix)
        watching = note_nonfinite in shards.pack.watchers
        if self.decides and (self.chosen or self.in_row) and not watching:
            shards.pack.watchers.append(note_nonfinite)

    @cached_property
    def decides(self) -> bool:
        """Whether it may refuse a step."""
        return self.chosen or self.on_nonfinite is None

    @cached_property
    def chosen(self) -> bool:
        """Whether it may refuse a step because somebody asked for it, and not by default."""
        refuses = self.on_nonfinite in ("skip", "raise")
        return self.scale.kind != "none" or self.spike is not None or refuses

    def judge(
        self,
        grads: Tree,
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
        found = norms.measured("Guard.judge", grads, groups)
        if found.found.stream is None:
            fix = "judge outside, or in torch.no_grad(); global_norm can be differentiated"
            shards.refuse_derivative("Guard.judge", found.pieces, fix)
        with torch.no_grad():
            return self._judge(found, donate, totals, wait)

    def _judge(self, found: norms.Measured, donate: bool, totals: Any, wait: bool) -> Verdict:
        exact, whole = self._knows_norm(found)
        decides = self.chosen or (self.decides and whole)
        factor, norm, highest = 1.0, None, torch.zeros(())
        if decides or self.max_norm is not None:
            here, highest = self._norms(found, totals, decides)
            norm = here if exact else None
            factor = 1.0 if self.max_norm is None else norms.clip_factor(here, self.max_norm)
        elif totals is not None:
            totals.exchange()
        found_inf = None
        if decides and totals is not None and not (wait or self.chosen or self.in_row):
            found_inf = (highest + totals.loss).isfinite().logical_not().float()
        elif totals is not None:
            totals.fetch()
        if found_inf is not None or not decides:
            out = norms.clipped(found.given, factor, donate=donate)
            return Verdict(out, norm, None, False, True, self, None, found_inf)
        # The host waits once for both numbers.
        times, most = torch.stack([torch.ones_like(highest) * factor, highest]).tolist()
        for home in found.homes:
            home.partition.check_open()  # else these may be no values of any rank
        finite = math.isfinite(most) and (totals is None or totals.of_all[0])
        where = None if finite else find_nonfinite(found, totals and totals.own_loss)
        for leaf in found.found.trained:
            _seen.pop(leaf.bucket, None)
        refused, spike, after = self._after(most, finite)
        if where and after.in_row >= _IN_ROW.get(self.on_nonfinite, math.inf):
            raise _error(*where, after.in_row)
        out = found.given
        if not refused:
            out = norms.clipped(out, times / self.scale.value, donate=donate)
        return Verdict(out, norm, finite, spike, not refused, after, where and where[2])

    def _after(self, norm: float, finite: bool) -> tuple[bool, bool, "Guard"]:
        """Decide whether a step is refused, whether its norm is a spike, and the next guard."""
        if finite and self.spike is None and self.scale.kind == "none" and not self.in_row:
            return False, False, self
        spike, watch = (False, None) if self.spike is None else self.spike.observe(norm)
        skips = not finite and self.on_nonfinite != "ignore"
        refused = skips or spike
        falls = self.scale.kind == "dynamic" and self.scale.value > self.scale.LEAST
        in_row = self.in_row + 1 if skips and not falls else 0
        scale, skipped = self.scale.adjust(finite), self.skipped + refused
        after = replace(self, scale=scale, spike=watch, in_row=in_row, skipped=skipped)
        return refused, spike, after

    def _norms(self, found: norms.Measured, totals: Any, decides: bool) -> tuple[Tensor, Tensor]:
        """Compute the unscaled norm of this rank, and the highest of any rank if that is needed."""
        ranks = set(map(frozenset, map(_RANKS, found.homes)))
        if totals is not None and ranks <= {frozenset(totals.home.stacked_ranks)}:
            # The message gives a mean over all ranks, of which so many have pieces of one replica.
            sums = norms.squares_here(found)
            parts = list(map(mul, sums.values(), map(_PIECES, sums)))
            norm = totals.exchange(torch.stack(parts).sum() if parts else None).sqrt()
            norm = norm / self.scale.value
            return norm, norm
        norm = highest = norms.norm_here(found) / self.scale.value
        if totals is not None:
            totals.exchange()
            highest = torch.where(totals.own_loss.isfinite(), norm, math.inf)
        if decides:
            highest = _highest(highest, found.homes)
        return norm, highest

    def check_groups(self, like: Tree, groups: Any) -> None:
        """Refuse groups on which this guard cannot know what it needs.

        Args:
          like: the tree of shards, of parameters or of gradients.
          groups: as for `judge`.

        Raises:
          PlanError: see [Note: parts of a model] in `norms`. To refuse gradients that are not
            finite, it is enough that some groups reach all ranks: every rank learns of them then.
        """
        self._knows_norm(norms.measured("Guard.judge", like, groups))

    def _knows_norm(self, found: norms.Measured) -> tuple[bool, bool]:
        """Whether the norm of the whole tree can be known, and whether some groups reach all ranks.

        Raises:
          PlanError: as `check_groups`.
        """
        whole = any(map(norms.WHOLE, found.homes))
        problem = norms.norm_problem("Guard.judge", found.owners)
        needs_norm = self.max_norm is not None or self.spike is not None
        if problem is not None and (needs_norm or (self.chosen and not whole)):
            raise problem
        return problem is None, whole


def _error(leaf: str, ranks: tuple[int, ...], text: str, in_row: int) -> NonFiniteError:
    times = "" if in_row == 1 else f" in {in_row} steps in a row"
    what = f"Guard.judge: loss or gradient is not finite{times}, and the step was not taken"
    fix = "look at the batch, the loss and the rate there; on_nonfinite='skip' leaves them out"
    return NonFiniteError(message(what, [text], fix), leaf, ranks)


def _highest(norm: Tensor, homes: Iterable[Home]) -> Tensor:
    """The highest norm of any rank; infinite if one is not finite."""
    highest, homes = torch.where(norm.isfinite(), norm, math.inf), list(homes)
    require_replicas("Guard.judge", homes)
    for home in homes:
        # With one set of groups, all ranks of a partition group have the same norm already.
        for comm in home.axes[0 if len(homes) > 1 else 1 :]:
            highest = levels.collect(comm, highest, "verdict of a guard").amax()
    return highest
