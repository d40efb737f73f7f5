"""Faults on purpose, for tests of jobs: `inject` makes one on a rank, at a step, in an operation.

Nothing in the library imports this wing. A script or a test wraps its training in a block:

  >>> groups = make_groups(1)
  >>> loss = lambda model, x: model(x).square().mean()
  >>> trainer = Trainer(torch.nn.Linear(2, 1), optim.sgd(0.1), groups, loss=loss)
  >>> with testing.inject(rank=0, step=2, operation="fetch", fault="slow", seconds=0.01) as fault:
  ...     metrics = trainer.fit([torch.ones(4, 2)], steps=3, progress=False)
  >>> fault.at
  'defer: fetch of bucket 0 (weight, bias; layout ...), 32 bytes'

Where a fault can be is in [Note: points] in `spans`; which faults there are is in `injector`, one
function each. `python -m tests.stress faults`, in a clone, injects hundreds and counts what came
of them.

Start reading at `inject` in `injector`; before it are `Injection` and the faults.

To add a fault, write a function of an `Injection` in `injector.py` and add it to `FAULTS`, with a
test in `tests/testing`.

`inject` gives an `Injection`, which knows whether it has happened. The fault "raise" raises an
`InjectedError`.
"""

from mics_fn.testing.injector import InjectedError, Injection, inject

__all__ = ["inject"]
