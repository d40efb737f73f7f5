"""What a `Trainer` gives to others: full parameters, and a state dict as plain torch has it."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mics_fn.errors import GroupsError, message
from mics_fn.optim import TrainState
from mics_fn.shards import unshard
from mics_fn.tree import Tree

_SAVE = (
    "Trainer(checkpoint=Checkpoints(folder, every=100)) saves, and goes on; for weights alone "
    "full = trainer.state_dict() on all ranks, and torch.save(full, path) on one"
)
_LOAD = (
    "Trainer(checkpoint=Checkpoints(folder)) goes on from the newest step; load weights into the "
    "model before, or by init_model(weights=path)"
)
_STEP = "trainer.step(batch) is one step, with backward and optimizer; trainer.fit(loader, steps)"
_EVAL = "trainer.eval(batch) is the loss of a batch in evaluation mode, over all ranks"
_MODEL = "model.load_state_dict(trainer.state_dict()); your model is read once, and not changed"
_RATE = "a rate is a function of the step: optim.adamw(optim.warmup_cosine(1e-3, 100, 1000))"
_PARAMS = "trainer.params() are full tensors by name, trainer.state.params the shards"
# What trainers of other libraries have, and what is there instead.
_INSTEAD = {
    **dict.fromkeys(("save", "save_checkpoint", "save_model", "save_state"), _SAVE),
    **dict.fromkeys(("load", "load_checkpoint", "load_state_dict", "resume"), _LOAD),
    **dict.fromkeys(("train", "train_step", "training_step", "backward", "zero_grad"), _STEP),
    **dict.fromkeys(("evaluate", "validate", "test", "predict", "forward"), _EVAL),
    **dict.fromkeys(("model", "module", "unwrap_model"), _MODEL),
    **dict.fromkeys(("lr", "scheduler", "lr_scheduler", "param_groups"), _RATE),
    **dict.fromkeys(("parameters", "named_parameters"), _PARAMS),
    "optimizer": "trainer.state.opt is its state; the optimizer itself is a function of values",
    "global_step": "trainer.state.step",
    "log": "trainer.step returns StepMetrics, for any logger",
    "to": "move the model before, to the device of groups",
}


class Exporting:
    """The methods of a `Trainer` that export what it has trained."""

    state: TrainState
    groups: Any
    program: Any

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:
            fix = _INSTEAD.get(name, "")
            raise AttributeError(message(f"Trainer has no attribute {name!r}", fix=fix))

    def __reduce__(self) -> tuple:
        text = "a Trainer belongs to this process: it cannot be in a pickle or a deep copy"
        fix = "take trainer.state_dict(), or save it with Trainer(checkpoint=Checkpoints(folder))"
        raise GroupsError(message(text, fix=fix))

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
