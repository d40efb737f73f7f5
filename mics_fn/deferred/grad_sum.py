"""`GradSum`: the gradients of a whole step, micro-step by micro-step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mics_fn.deferred.graph import Passes, Run
from mics_fn.deferred.reduction import Reduction, alone
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.shards import refuse_derivative, split_chunk
from mics_fn.tree import Tree


class GradSum(Reduction):
    """The gradients of a step: hop 1 of every pass, their mean over passes, then hop 2.

    Hop 1 of a bucket starts when its gradients are complete and overlaps the rest of backward; in
    the last pass hop 2 of the bucket follows at once. Nothing waits before `grads`.

    Args:
      micro_steps: passes of the step.
      dtype: of the sum over passes; default the bucket's `accumulate`, at least float32.

    Communication: none here; see `backward`.

    Memory: this rank's shards of the gradients, and a few buckets in full.

    Raises:
      ValueError: `micro_steps` is no positive int.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> total = GradSum(micro_steps=2)
      >>> full = gather(shards, groups, schedule=on_demand(), into=total)
      >>> for x in (1.0, 3.0):
      ...     total.backward((full["w"] * x).sum())
      >>> total.grads()["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4.
    """

    def __init__(self, micro_steps: int = 1, *, dtype: torch.dtype | None = None) -> None:
        if not isinstance(micro_steps, int) or micro_steps < 1:
            raise ValueError(f"GradSum: micro_steps={micro_steps}, expected an int of at least 1")
        self.micro_steps, self.dtype = micro_steps, dtype
        self._variables: list[Tensor] | None = None
        self._running = False  # a backward
        self._pass = 0

    def expect(
        self, pieces: list[Tensor], build: Callable[[dict[int, list]], Tree], run: Run
    ) -> list[Tensor]:
        """Called by `gather`: what to differentiate, how pieces become a tree, of which run.

        Returns:
          The pieces as leaves of autograd.
        """
        refuse_derivative("gather(into=)", (), "leave into= out inside torch.func")
        if self._variables is not None:
            text = "gather: into= is in use by another gather"
            raise TreeError(message(text, fix="make a new GradSum for each step"))
        self._variables = [piece.detach().requires_grad_() for piece in pieces]
        self._build, self._run = build, run
        self._passes = Passes(self._variables, self.uses, run)
        return self._variables

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run one pass of backward; its gradients are added to the sum.

        Args:
          loss: one number, of this rank's samples of the micro-step.
          retain_graph: keep what autograd saved, for another backward through the same loss.

        Communication: hop 1 of every bucket, those without a gradient as zeros; in the last pass
          hop 2 as well.

        Raises:
          TreeError: all passes are done, or there was no `gather` into this.
          LeafError: gradients came in a way that only a first pass can learn of.
        """
        refuse_derivative("GradSum.backward", (), "call it outside of torch.func")
        if self._variables is None or self._pass == self.micro_steps:
            passes = f"{self._pass} of {self.micro_steps} passes are done"
            fix = "gather(..., into=) first, and give micro_steps= as many passes as there are"
            raise TreeError(message(f"GradSum.backward: {passes}", fix=fix))
        if loss.requires_grad and self._variables:
            self._differentiate(loss, retain_graph)
        self._passes.end(loss, self.missing(), last=self.last)
        self._run.end_pass(self.last)
        self.end()

    def _differentiate(self, loss: Tensor, retain_graph: bool) -> None:
        self._running = True
        try:
            for index, grads in self._passes.differentiate(loss, retain_graph).items():
                self.add(index, grads)
        except RuntimeError as error:
            if "backward through the graph a second time" not in f"{error}":
                raise
            text = "GradSum.backward: an earlier backward let go of what this loss needs"
            raise TreeError(message(text, fix="pass retain_graph=True to that one")) from error
        finally:
            self._running = False

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """As `Reduction.add`, in a pass that `backward` began.

        See [Note: a backward in backward] in `deferred.graph`.
        """
        if not (self._running or all(grad is None for grad in grads)):
            text = "gather(into=): another backward went through it than that of its GradSum"
            raise TreeError(message(text, fix="call total.backward(loss), not loss.backward()"))
        if index in self._ready:
            text = "backward: a bucket got gradients in two parts in one pass"
            fix = "use torch.utils.checkpoint, instead of a backward that runs in backward"
            raise LeafError(message(text, [f"bucket {index}"], fix))
        return [] if self._passes.keeps(index, grads) else super().add(index, grads)

    def grads(self) -> Tree:
        """The gradient of the mean loss over passes and ranks, as a tree of shards.

        Returns:
          A tree for `opt_step`; valid until `release`.

        Communication: waits for what `backward` started.

        Raises:
          TreeError: passes are missing.
          LeafError: no parameter got a gradient in any of them, on any rank.
        """
        if self._variables is None or self._pass != self.micro_steps:
            text = f"GradSum.grads: {self._pass} of {self.micro_steps} passes are done"
            raise TreeError(message(text, fix="call backward for each micro-step first"))
        self.wait()
        self._passes.check()
        return self._build({index: self._pieces(index) for index in self._totals})

    def _pieces(self, index: int) -> list[Tensor]:
        use, dtype = self.uses[index], self.uses[index].bucket.dtype
        total = [t if t.dtype is dtype else t.to(dtype) for t in self._totals[index]]
        if alone(use):
            return total
        return use.by_member(split_chunk(use.bucket, use.hierarchy.chunk, total[0]))

    def release(self) -> None:
        """Nobody reads the gradients any more: their memory serves the next step."""
        for buffers, tensor in self._given:
            buffers.give(tensor)
        self._given, self._totals = [], {}
