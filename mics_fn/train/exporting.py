"""What a `Trainer` gives to others: full parameters, and a state dict as plain torch has it."""

from typing import Any

from torch import Tensor

from mics_fn.optim import TrainState
from mics_fn.shards import unshard
from mics_fn.tree import Tree


class Exporting:
    """The methods of a `Trainer` that export what it has trained."""

    state: TrainState
    groups: Any
    program: Any

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank, for export.

        Returns:
          The tree that was sharded; for a module a dict from name to tensor. While replicas are
          apart they are those of this rank's replica.

        Communication: as for `unshard`.

        Memory: the full parameters, on the device.
        """
        return unshard(self.state.params, self.groups)

    def state_dict(self) -> dict[str, Tensor]:
        """What `model.load_state_dict` takes: full parameters and buffers, as in plain torch.

        It has the names that `model.state_dict()` has, in their order: tied weights under each of
        their names, and no buffer that is not persistent. So `strict=True` accepts it, here and in
        a program without this library. For a model that no rank can hold, write
        `checkpoint.save_pretrained(path, trainer.state.params, groups)` instead.

        Returns:
          A dict from name to tensor, in memory of its own, on every rank. While replicas are apart,
          parameters and buffers are those of this rank's replica: merge them first, or take the
          dict of one rank. Integer buffers, such as the number of batches that a BatchNorm has
          seen, are always those of this rank.

        Communication: as for `unshard`.

        Memory: the full parameters and the buffers, on the device.

        Raises:
          TreeError: this `Trainer` has a loss function instead of a module.
          LeafError: the module saves something that has no value here.

        Example:
          >>> loss = lambda model, x: model(x).sum()
          >>> model = torch.nn.BatchNorm1d(2)
          >>> trainer = Trainer(model, optim.sgd(0.1), make_groups(1), loss=loss)
          >>> list(trainer.state_dict())
          ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
          >>> model.load_state_dict(trainer.state_dict())
          <All keys matched successfully>
        """
        return self.program.state_dict(self.params, self.state.buffers)
