"""`defer` and `GradSum`: parameters that are fetched where they are used, and their gradients.

[Note: join and fetch] The pieces of all buckets pass through one `_Join` node (unless a `GradSum`
takes the gradients), and then through one `_Fetch` node for each bucket, whose outputs are the
deferred parameters. In backward each `_Fetch` runs as soon as the gradients of its bucket are
complete, because its sequence number is the highest in the graph. It starts hop 1, and passes on
pieces that have no values yet. `_Join` runs after all of them: it reduces the buckets that got no
gradient, waits, and passes the pieces on. So nothing downstream ever sees a gradient without
values. These two halves are differentiable maps, so that second derivatives are those of the
reduce-scatter; see [Note: adjoint] in `shards.linear`.

[Note: a backward in backward] Reentrant checkpointing recomputes a block in backward and runs a
backward of its own through it. Then the gradients of a bucket come in several parts, of which none
is known to be the last; and autograd leaves out such a block where the graph has no other way from
it to the parameters. So it is refused: by a walk through the graph of the first pass, and of those
in which a bucket gets no gradient for the first time. Where a bucket does get a second part, that
is an error, too.

[Note: no gradient] The loss of a rank may use no parameter at all, for example if all its labels
are masked: its gradients are zeros. But if that is so on every rank, the step would train nothing.
Each such rank adds one to a count in the store before it ends the last pass. A rank's reductions
are done only after all other ranks have ended that pass, so it can read the final count then
without waiting for anyone.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, tree
from mics_fn import shards as sharding
from mics_fn.deferred.live import LiveBuckets, sizes_of
from mics_fn.deferred.reduction import LetGo, Reduction, places_of_sums
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.groups import Hierarchy, announce_all, require_replicas
from mics_fn.offload import Where
from mics_fn.schedules import Learned, OnDemand, Run, Schedule
from mics_fn.tree import Tree

# Losses: one number, which depends on parameters that were given.


def check_loss(verb: str, loss: Any) -> None:
    """Raise LeafError unless a loss is one number, as a tensor."""
    is_tensor = isinstance(loss, Tensor)
    if not is_tensor or loss.numel() != 1:
        got = f"has shape {tuple(loss.shape)}" if is_tensor else f"is {type(loss).__name__}"
        fix = "return a tensor: the mean() over samples, without item(), or the .loss of an output"
        raise LeafError(f"{verb}: the loss {got}, expected one number", fix=fix)


def strangers_of(loss: Tensor) -> list[nn.Parameter]:
    """Find Parameters of modules in the graph of a loss, which were not gathered.

    The walk takes a microsecond per node.

    Raises:
      LeafError: a block is recomputed by a backward of its own; see [Note: a backward in backward].
    """
    todo: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen, found = {None, *todo}, list[nn.Parameter]()
    while todo:
        node = todo.pop()
        # It is called `CheckpointFunction` in torch, DeepSpeed, Megatron and fairscale.
        if "Checkpoint" in node.name():
            text = "backward: a block is checkpointed with use_reentrant=True"
            raise LeafError(text, [f"its graph has a {node.name()}"], "use use_reentrant=False")
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found.append(variable)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def _depends_on(strangers: Sequence[Tensor]) -> str:
    """Describe what a loss depends on besides the parameters that it was given."""
    shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
    return f"depends on Parameters that it was not given, of shape {shapes}"


# `GradSum`: the gradients of a step.

_OTHER = message(
    "defer(into=): another backward went through it than that of its GradSum",
    fix="call total.backward(loss), not loss.backward()",
)


class GradSum(Reduction):
    """The gradients of a step: hop 1 of every pass, their mean over passes, then hop 2.

    Hop 1 of a bucket starts when its gradients are complete, and overlaps the rest of backward. In
    the last pass hop 2 of the bucket follows at once. Nothing waits before `grads` does.

    Args:
      micro_steps: the number of backward passes in the step.
      where: where the sum lies until it is stepped with, as `grads` of a `Where` says; see `where`.
        The gradients of a bucket lie together, where those of its largest leaf should.

    Memory: this rank's shards of the gradients, where `where` says, and a few buckets in full.

    Raises:
      PlanError: `micro_steps` is not a positive int, or `where` is not a place,
        or says nothing about `grads`.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> total = GradSum(micro_steps=2)
      >>> with defer(shards, groups, on_demand(), into=total) as full:
      ...     for x in (1.0, 3.0):
      ...         total.backward((full["w"] * x).sum())
      >>> total.grads()["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4.
    """

    def __init__(self, micro_steps: int = 1, *, where: Where | str | None = None) -> None:
        checks.integer("GradSum", "micro_steps", micro_steps)
        super().__init__(micro_steps)
        self._where = None if where is None else Where.parse(where)
        if self._where and self._where.moved and "grads" not in self._where.moved:
            text = f"GradSum: where='{self._where}' has no effect: it does not say where grads lie"
            raise PlanError(text, fix="write grads=, as in where='grads=host'")
        # Whether a pass counts nothing, so that its gradients are zeros whatever they are.
        self.void: bool | Tensor = False
        self.other_backward = _OTHER  # the error of a backward that is not that of this object
        self._opened: Any = None  # the tree, from `expect` on
        self._variables: list[Tensor] = []  # one per trained bucket, which have no data
        self._running = False  # whether `backward` is running
        self._reached = False  # whether a gradient arose on this rank
        self._cause = ""  # why none did
        self._ranks: Sequence[int] = ()  # that reduce together; none where nothing is trained

    def expect(self, opened: sharding.Opened, run: Run, let_go: LetGo) -> list[Tensor]:
        """Called by `defer`: prepare for the gradients of this tree, from this run.

        Returns:
          A leaf of autograd for each trained bucket, in whose place the gradients are taken.
        """
        sharding.refuse_derivative("defer(into=)", (), "leave into= out inside torch.func")
        if self._opened is not None:
            text = "defer: into= is in use by another run"
            raise LeafError(text, fix="make a new GradSum for each step")
        places = places_of_sums(self._where, opened) if self._where else None
        self.begin(opened.uses, run, let_go, places)
        for use in opened.uses:  # what was seen may be of a step that was not judged
            sharding.pack.observe(use.bucket, None)
            if use.bucket.trainable:
                self._variables.append(torch.empty(0, requires_grad=True))
            if use.bucket.trainable and use.bucket.numel:
                self._ranks = max(self._ranks, use.home.ranks, key=len)
        self._opened = opened
        return self._variables

    def backward(self, loss: Tensor) -> None:
        """Run one backward pass and add its gradients to the sum.

        Args:
          loss: one number, of this rank's samples of the micro-step.

        Communication: hop 1 of every bucket, those without a gradient as zeros; in the last pass
          hop 2 as well.

        Raises:
          LeafError: all passes are done, or no `defer(into=)` has named this value.
          LeafError: the loss is not one number; or a block is recomputed by a backward of its own.
        """
        sharding.refuse_derivative("GradSum.backward", (), "call it outside of torch.func")
        if self._opened is None or self.passes == self.micro_steps:
            fix = "defer(..., into=) first, and give micro_steps= as many passes as there are"
            text = f"GradSum.backward: {self.passes} of {self.micro_steps} passes are done"
            raise LeafError(text, fix=fix)
        check_loss("GradSum.backward", loss)
        learned = self.run.learned
        if loss.requires_grad and self._variables:
            self.run.note("backward")
            strangers = () if learned.examined else strangers_of(loss)
            learned.examined = self._running = True
            try:
                torch.autograd.grad(loss, self._variables, allow_unused=True)
            finally:
                self._running = False
            if strangers and self._reached:
                text = f"backward: the loss {_depends_on(strangers)}"
                lines = ["they get no gradient here; this is said once"]
                fix = "use the model that the loss function is given, or detach what is not trained"
                warnings.warn(message(text, lines, fix), stacklevel=2)
        if not self._reached:
            self._note_unreached(loss)
        missing = list(self.missing)
        if loss.requires_grad and not learned.missed.issuperset(missing):
            learned.missed.update(missing)
            strangers_of(loss)
        for index in missing:  # reduced as zeros
            super().add(index, [None] * len(self.uses[index].members))
        self.end_pass()

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Called in backward with a bucket's full gradients, one per member."""
        reached = any(grad is not None for grad in grads)
        if not self._running:
            if reached:
                raise LeafError(self.other_backward)
            return
        if (void := self.void) is not False:
            grads = [
                None if x is None else x.masked_fill(torch.as_tensor(void, device=x.device), 0)
                for x in grads
            ]
        self._reached = self._reached or reached
        super().add(index, grads)

    def grads(self) -> Tree:
        """The gradient of the loss averaged over passes and ranks, as a tree of shards.

        Returns:
          A tree for `opt_step`, valid until `release`. All of it is on the device: what lies
          elsewhere is brought. `opt_step` and `Guard.judge` take this value itself, too, and then
          bring one bucket at a time.

        Communication: it waits for the reductions that `backward` started.

        Raises:
          LeafError: fewer than `micro_steps` passes are done, or it was released.
          LeafError: no parameter got a gradient in any pass on any rank.
        """
        self._check()
        self.wait()
        return self._opened.rebuild({i: self.pieces(i) for i in self.order})

    def __grad_stream__(self) -> sharding.GradStream:
        """Return the gradients for `opt_step`, which takes each bucket once its hop 2 is done.

        Raises:
          LeafError: as `grads`.
        """
        self._check()
        opened, order = self._opened, self.order
        trained = (i for i, leaf in enumerate(opened.leaves) if isinstance(leaf, sharding.Sharded))
        number = {i: k for k, i in enumerate(trained)}

        def take(place: int) -> list[Tensor]:
            self.wait_for(order[place])
            return self.pieces(order[place])

        return sharding.GradStream(
            like=opened.rebuild({}),
            home=opened.homes[0],
            order=[[number[i] for i in opened.uses[index].members] for index in order],
            here=lambda k: order[k] not in self.placed and self.done(order[k]),
            take=take,
        )

    def _note_unreached(self, loss: Tensor) -> None:
        """Note why a pass gave no gradient here; in the last one, count it for all ranks."""
        if not loss.requires_grad:
            self._cause = "it requires no gradient: it was detached, or made under torch.no_grad()"
        elif strangers := strangers_of(loss):
            self._cause = f"it {_depends_on(strangers)}: it closes over another module"
        else:
            self._cause = "it requires a gradient, but depends on none of these parameters"
        if self.last and len(self._ranks) > 1:
            self.run.tally(f"no gradient/{min(self._ranks)}", 1)

    def _check(self) -> None:
        """Check that all passes are done, and that this step trains something.

        Without a gradient on this rank it waits for all reductions, to know about the others.

        Raises:
          LeafError: passes are missing, or the memory was given back.
          LeafError: on all ranks, if no parameter got a gradient on any of them.
        """
        if self.passes != self.micro_steps:
            text = f"GradSum.grads: {self.passes} of {self.micro_steps} passes are done"
            raise LeafError(text, fix="call backward for each micro-step first")
        if self._released:
            raise LeafError("GradSum.grads: its memory was given back", fix="call release() last")
        if self._reached or not self._ranks:
            return
        self.wait()
        _torch.finish(self._opened.uses[0].home.device)  # only its stream waits so far
        n = len(self._ranks)
        if n == 1 or self.run.tally(f"no gradient/{min(self._ranks)}", 0) == n:
            who = f", on any of {n} ranks" if n > 1 else ""
            text = f"backward: the loss gave no parameter a gradient{who}"
            fix = "compute it from the model, or the parameters, that the loss function is given"
            raise LeafError(text, [self._cause], fix)


# The autograd side of deferred parameters: made in forward, their gradients reduced in
# backward.

_FIRST = 2**62  # sequence numbers of ordinary nodes count up from 0


def _refuse_batch(info: Any, in_dims: tuple, *inputs: Any) -> Any:
    """The vmap rule of nodes that have none."""
    text = "defer: shards are batched by vmap, and a schedule fetches one model at a time"
    raise LeafError(text, fix="use gather under vmap over shards")


class _Join(torch.autograd.Function):
    """The identity on all pieces; its backward ends hop 1. See [Note: join and fetch]."""

    @staticmethod
    def forward(live: LiveBuckets, trained: Sequence[int], *pieces: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        found, dealt = [], sharding.deal([live.uses[i] for i in trained], pieces)
        for index, (use, values) in zip(trained, dealt, strict=True):
            live.buckets[index].load(values)  # here they are plain tensors, even inside torch.func
            found += [_standing_for(use, piece) for piece in values]
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.live, ctx.trained = inputs[:2]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[2:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore
        live: LiveBuckets = ctx.live
        live.derived = True
        reduction, live.reduction = _pass_of(live), None
        uses = [live.uses[i] for i in ctx.trained]
        dealt = dict(
            zip(ctx.trained, (list(g) for _, g in sharding.deal(uses, grads)), strict=True)
        )
        for i in list(reduction.missing):
            if all(grad is None for grad in dealt[i]):
                dealt[i] = _started(reduction, i, dealt[i])
        reduction.end_pass()
        pieces = [g for i in ctx.trained for g in dealt[i]]
        found = sharding.linear_map("own", uses, *pieces, by=reduction.waited)
        # A gradient lies where its piece does.
        return (None, None, *(g.to(to) for g, (_, _, to) in zip(found, ctx.like, strict=True)))

    @staticmethod
    def jvp(ctx: Any, _cache: None, _trained: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        uses = [ctx.live.uses[i] for i in ctx.trained]
        homes = [use.home for use in uses for _ in use.members]
        # All are seen together: see [Note: rows of ranks] in `shards.linear`.
        given = [  # torch fails inside where a tangent is None
            torch.zeros(shape, dtype=dtype, device=device) if x is None else x
            for x, (shape, dtype, device) in zip(tangents, ctx.like, strict=True)
        ]
        seen = sharding.linear_map("own", uses, *given, derived=True)
        return tuple(
            sharding.pack.fetched_to(t, home.device) for t, home in zip(seen, homes, strict=True)
        )

    vmap = staticmethod(_refuse_batch)


def _standing_for(use: sharding.BucketUse, piece: Tensor) -> Tensor:
    """Return a placeholder behind `_Join`, of which only the shape is read."""
    if not sharding.pack.must_fetch(piece, use.home.device):
        return piece.view_as(piece)
    how: Any = {"dtype": piece.dtype, "device": use.home.device}
    if _torch.inside_forward_ad():  # a tangent needs the same layout, and memory
        return torch.empty(piece.shape, **how)
    return torch.empty((), **how).expand(piece.shape)


def _pass_of(live: LiveBuckets) -> Reduction:
    """The reduction of the backward pass under way, of which gradients are the result."""
    if live.reduction is None:
        live.reduction = Reduction().begin(live.uses, live.run)
    return live.reduction


def _started(reduction: Reduction, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Start hop 1 of one bucket: full gradients become pieces that have no values yet."""
    use = reduction.uses[index]
    shapes = use.by_member(use.bucket.shapes)

    def start(grads: Sequence[Tensor | None]) -> list[Tensor]:
        if all(g is None or g.ndim == len(s) for g, s in zip(grads, shapes, strict=True)):
            return reduction.started(index, grads)
        reduction.skip(index)  # a batch under vmap, which fits in no memory that is kept
        return sharding.linear_map("scatter", [use], *grads)

    return sharding.linear_map("scatter", [use], *grads, by=start)


class _Fetch(torch.autograd.Function):
    """One bucket: its pieces become deferred parameters. See [Note: join and fetch]."""

    @staticmethod
    def forward(live: LiveBuckets, index: int, *pieces: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(live.parameters(index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.live, ctx.index = inputs[:2]
        ctx.set_materialize_grads(False)
        _torch.set_order(ctx, _FIRST)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore
        live: LiveBuckets = ctx.live
        live.run.note("reduce", ctx.index)
        if live.into is not None:
            live.into(ctx.index, grads)
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, *_started(_pass_of(live), ctx.index, grads))

    @staticmethod
    def jvp(ctx: Any, _cache: None, _index: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        # Tangents are rare and used once, so they are gathered now. Views of a dual tensor need
        # both of its parts in the same layout, so each tangent gets memory of its own.
        found = sharding.linear_map("gather", [ctx.live.uses[ctx.index].uncoded], *tangents)
        return tuple(tangent.clone() for tangent in found)

    vmap = staticmethod(_refuse_batch)


def fetch_all(
    live: LiveBuckets, data: list[Any], variables: Sequence[Tensor] | None = None
) -> None:
    """Make deferred parameters of all buckets, differentiable if a bucket is trained.

    Args:
      live: a new one, whose chunks are loaded here.
      data: the data of each leaf of the tree; that of members of buckets is replaced.
      variables: of each trained bucket what they are differentiated by, in the place of its pieces.

    Raises:
      LeafError: torch is recording ops in order to repeat them later.
    """
    sharding.refuse_tracing()
    pieces = list[Sequence[Any]]()
    for use in live.uses:
        pieces.append(list(map(data.__getitem__, use.members)))
    joined = list[int]()  # `into` takes gradients, and then there are none to join
    with _torch.without_torch_func(), torch.no_grad():  # else chunks would have no memory to send
        for index, use in enumerate(live.uses):
            if use.bucket.trainable and live.into is None:
                joined.append(index)
            else:
                live.buckets[index].load(pieces[index])
    if joined:
        given = (x for index in joined for x in pieces[index])
        dealt = iter(_torch.quick_apply(_Join)(live, joined, *given))
        for index in joined:
            pieces[index] = [next(dealt) for _ in pieces[index]]
    fetch, found = _torch.quick_apply(_Fetch), []
    own = None if variables is None else iter(variables)
    for index, use in enumerate(live.uses):
        if not use.bucket.trainable:
            found += live.parameters(index)
        else:
            found += fetch(live, index, *(pieces[index] if own is None else [next(own)]))
    sharding.put(data, live.uses, found)


class DeferredParams:
    """One run of a model over deferred parameters; made by `defer`.

    Args:
      params: the tree of deferred tensors.
      live: the buckets behind it.
      pending: whether a derivative is to be taken, perhaps after the `with` block.
    """

    def __init__(self, params: Tree, live: LiveBuckets, pending: bool) -> None:
        self.params = params
        self._live, self._pending = live, pending

    @property
    def following(self) -> bool:
        """Whether this run has followed its schedule so far."""
        return self._live.run.following

    @property
    def record(self) -> Schedule:
        """What this run has used and reduced so far, in order, as a schedule without fetches."""
        return self._live.run.marked.unmarked

    def close(self) -> None:
        """End the run: its buckets are dropped, and using its tensors is an error from then on.

        All ranks must close the same runs in the same order. A second call has no effect.

        Raises:
          DesyncError: another rank fetched other buckets in this run.
        """
        self._live.close()

    def __enter__(self) -> Tree:
        return self.params

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._live.leave(check=False)
            announce_all(error)
        elif not self._pending or self._live.derived:
            self._live.close()


def defer(
    shards: Tree, groups: Any, schedule: Schedule | OnDemand, *, into: GradSum | None = None
) -> DeferredParams:
    """Full parameters that are fetched at the ops that use them, in forward and in backward.

    They are tensors without data, unless nothing has to be fetched for them. Autograd saves them
    instead of the weights, so that nothing holds a gathered weight from one use to the next.

    Args:
      shards: tree of shards.
      groups: `Groups` or a `Hierarchy`, a prefix pytree of these, or a function from path to one;
        `into` needs `Groups`.
      schedule: a policy (`on_demand`, `keep_all`), which remembers the order of use, or a fixed
        `Schedule`.
      into: a `GradSum` that takes the gradients, which then are not in the result of backward.

    Returns:
      The run, a context manager whose value is the tree of deferred tensors: `with defer(shards,
      groups, policy) as full:`. The run ends with the block, and its tensors cannot be used any
      more. Without a block, `.params` is the tree and `close()` ends the run. If a derivative is
      still to be taken when the block ends, as inside a function that `torch.func.grad`
      differentiates, the run goes on until the graph of that derivative is gone.

    Communication: each bucket is gathered as often as the schedule fetches it, and its
      reduce-scatter starts when its gradients are complete. The ranks compare a tree or schedule
      that is new to the groups once (32 bytes). A fetch that is not in the schedule, or of the
      first run that follows it, sends a few messages of about a hundred bytes to the store of
      torch.distributed.

    Memory: the buckets that the schedule keeps live.

    Raises:
      PlanError: the groups are not those that the tree was sharded with, or the schedule does not
        fit the tree.
      DesyncError: ranks have different trees or schedules, or fetch buckets in different orders, or
        some reduce more than others before a fetch.
      LeafError: an op writes to a deferred parameter; `into` or `linearize` inside torch.func. On
        the CPU, under `keep_all` a parameter that this rank holds in full is a plain tensor, which
        keeps its value after the run: there a write is an error at the end of the run.
      GroupsError: a deferred parameter is used after the end of its run; `into` with a hierarchy.
      LeafError: `into` is in use by another run.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> total = GradSum()
      >>> with defer(shards, groups, on_demand(live_bytes=0), into=total) as full:
      ...     total.backward(full["w"].square().sum())
      >>> total.grads()["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, sections 3.3 and 4.
    """
    kinds, fix = Schedule | OnDemand, "pass a Schedule, on_demand(...) or keep_all()"
    checks.instance("defer", "schedule", schedule, kinds, "a schedule or a policy", fix)
    opened = sharding.open_shards("defer", shards, groups)
    if into is not None:  # a hierarchy would leave out hop 2
        require_replicas("defer(into=)", opened.homes)
    opened.agree(schedule.describe() if isinstance(schedule, OnDemand) else str(schedule))
    policy, learned = _memory_of(schedule, opened)
    pending = into is None and sharding.needs_derivative(opened.pieces)
    add = None if into is None else into.add
    live = LiveBuckets(opened, learned, policy, add)
    live.closes = policy.at_once and not pending and not _torch.inside_torch_func()
    full, variables = list(opened.data), None
    if into is not None:
        variables = into.expect(opened, live.run, WeakMethod(live.let_go))
    fetch_all(live, full, variables)
    live.start()
    return DeferredParams(opened.build(full), live, pending)


def bucket_sizes(shards: Tree, groups: Any) -> list[int]:
    """Bytes that each bucket of a tree takes while it is live, in the order of bucket numbers.

    Args:
      shards: tree of shards.
      groups: as for `defer`.

    Returns:
      One number per bucket; 0 if this rank holds it in full already, because the group has one rank
      or the placement keeps a copy.

    Raises:
      LeafError: there is no tree, or a leaf is not a shard.

    Example:
      >>> groups = make_groups(1)
      >>> bucket_sizes(shard([torch.ones(6)], groups), groups)
      [0]
    """
    return sizes_of(sharding.open_shards("bucket_sizes", shards, groups).uses)


def _memory_of(schedule: Schedule | OnDemand, opened: sharding.Opened) -> tuple[OnDemand, Learned]:
    """The policy for `schedule=`, and what it has learned about this tree.

    Raises:
      PlanError: a schedule names buckets that the tree lacks, or uses one that is not live.
    """
    uses = opened.uses
    key = tuple((x.bucket, x.missing, x.route.outer_params, x.placed) for x in uses)
    if isinstance(schedule, OnDemand):
        return schedule, schedule.learned.setdefault(key, Learned())
    given, fixed = schedule, uses[0].hierarchy.channel.fixed if uses else {}
    if (given, key) not in fixed:
        sizes = sizes_of(uses)
        schedule.check(sizes)
        schedule = schedule.unmarked
        # If the model uses other buckets, they are fetched on demand within the same memory.
        policy = OnDemand(schedule.peak_bytes(sizes), 0, lambda record, sizes: schedule)
        order = tuple(dict.fromkeys([*schedule.reduces, *reversed(range(len(uses)))]))
        fixed[given, key] = policy, Learned(schedule, order)
    return fixed[given, key]


# `record`: the order in which a loss uses buckets, found without data or in a real step.


def record(
    loss_fn: Callable[[Tree, Any], Tensor], shards: Tree, batch: Any, *, mark_backward: bool = False
) -> Schedule:
    """The order in which a loss and its backward use buckets, as a schedule without fetches.

    Args:
      loss_fn: called with full parameters, which are deferred, and the batch; gives one number.
      shards: tree of shards.
      batch: pytree. Its tensors are moved to meta.
      mark_backward: put the mark `backward` where the backward pass begins.

    Returns:
      Uses and reductions in order; `schedules.plan` makes a schedule for `defer` from it. Of a
      model whose control flow depends on values, take the `record` of a real run of `defer`.

    Raises:
      LeafError: there is no tree.

    Any error of the loss on tensors without data is raised, too.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2), "b": torch.ones(2)}, groups, bucket_bytes=8)
      >>> loss_fn = lambda full, x: (x * full["w"] + full["b"]).sum()
      >>> record(loss_fn, shards, torch.ones(3, 2)).uses
      ((1,), (0,))
    """
    leaves, spec = tree.flatten(shards, sharding.is_leaf)
    sharding.check_leaves("record", shards, leaves, "shards")
    device = torch.device("meta")
    home = Hierarchy.of_one(device)
    batch = tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
    with torch.enable_grad():
        empty = [_without_values(leaf, device) for leaf in leaves]
        layout = sharding.TreeLayout("record", sharding.places_of(empty), (home,) * len(empty))
        opened = sharding.Opened("record", None, "shards", empty, spec, layout, layout.uses)
        live = LiveBuckets(opened, Learned(), OnDemand(None, 0), lambda index, grads: None)
        full = list(opened.data)
        fetch_all(live, full)
        loss = loss_fn(opened.build(full), batch)
        check_loss("record", loss)
        if loss.requires_grad:
            live.run.note("backward")
            strangers_of(loss)  # which raises where a block runs a backward of its own
            torch.autograd.grad(loss, opened.pieces, allow_unused=True)
    found = live.run.marked
    return found if mark_backward else found.unmarked


def _without_values(leaf: sharding.Leaf, device: torch.device) -> sharding.Leaf:
    """A leaf without values, of the size that it has on the rank with the first chunk."""
    if isinstance(leaf, sharding.Tied) or leaf.data is None:
        return leaf
    if leaf.bucket is None:
        return sharding.Fixed(torch.empty(leaf.data.shape, dtype=leaf.dtype, device=device))
    length = sharding.pieces(leaf.bucket, 0)[leaf.slot].length
    data = torch.empty(length, dtype=leaf.dtype, device=device)
    return replace(leaf, data=data.requires_grad_(isinstance(leaf, sharding.Sharded)))
