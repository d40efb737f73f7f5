"""Mistakes of a run that is merged, cut, saved or reset; `planting.py` checks that tests fail."""

_L = "train/loop.py"
_C = "train/resuming.py"
_S = "train/stepping.py"

PLANTED = [
    (
        "replicas are merged one step late",
        "train/replicas.py",
        "return (state.step + 1) % self.every == 0",
        "return state.step % self.every == 0",
        "train/test_replica_sync.py -k twin",
    ),
    (
        "a pass is gone on with one batch early",
        _L,
        "while used < at.samples:",
        "while used < at.samples - ranks:",
        "train/test_data.py -k cut_anywhere",
    ),
    (
        "ranks of a mesh share samples by their places in the world",
        _L,
        "ranks, groups.position, shuffle",
        "ranks, groups.rank % ranks, shuffle",
        "train/test_data.py -k tensor_parallel",
    ),
    (
        "what the guard has counted is not taken back",
        _C,
        'with_numbers(trainer.guard, extra["guard"])',
        "trainer.guard",
        "train/test_carried.py -k alone",
    ),
    (
        "a step that was not saved before a reset stays without a save",
        _C,
        "            return True\n        return False",
        "            return False\n        return False",
        "train/test_checkpoints.py -k before_a_reset",
    ),
    (
        "a run that did not go on from a folder replaces the steps in it",
        _C,
        '"newer" if self._ours else "never"',
        '"newer"',
        "train/test_checkpoints.py -k replaces_nothing",
    ),
    (
        "a step that some ranks have written is not written by the others",
        _C,
        "trainer._put(write(trainer.options, trainer.run, member.ready)[0])",
        "pass",
        "train/test_trainer_reset.py -k written_by_all",
    ),
    (
        "a write that is cut leaves what looks like a state",
        _S,
        "    with shards.Writing():\n        grads, kept",
        "    if True:\n        grads, kept",
        "train/test_interrupted.py -k the_old_state_the_new",
    ),
    (
        "signals are not held while a step by hand is written",
        "threads.py",
        "                    set_handler(number, self._keep)",
        "                    pass",
        "train/test_interrupted.py -k by_hand",
    ),
    (
        "no step compares what was put in the place of a lost state",
        _C,
        "member.compared, member.begun = False, None",
        "member.compared, member.begun = True, None",
        "train/test_trainer_reset.py -k told",
    ),
    (
        "a copy of a leaf lives on the groups of one part",
        "shards/verbs.py",
        "homes = [x.copies if dim is None else x for",
        "homes = [x for",
        "train/test_mesh.py -k one_process",
    ),
    (
        "the norm of a model in parts is that of this part",
        "collectives/levels.py",
        "comms = groups.axes if name else",
        "comms = groups.axes[:2] if name else",
        "train/test_mesh.py -k one_process",
    ),
    (
        "a part of another shape is taken for that of the model",
        "shards/verbs.py",
        "if leaves[i].shape != part:",
        "if False:",
        "train/test_mesh.py -k refused",
    ),
    (
        "a buffer may be a DTensor",
        _S,
        "_torch.is_dtensor(buffers[name])",
        "False",
        "train/test_mesh.py -k refused",
    ),
    (
        "the mean over replicas of a copy is over one part",
        "groups/groups.py",
        "replicas=model.copies,",
        "replicas=self.replicas,",
        "train/test_mesh.py -k fsdp2",
    ),
    (
        "buffers are compared between the parts of a model",
        "faults/comparing.py",
        "(x.home is None and not home.of)",
        "x.home is None",
        "train/test_reset_parts.py -k buffer_may",
    ),
    (
        "a reset leaves calls undone in the groups of a mesh",
        "groups/lent.py",
        "lent.group = renewed.process_group()",
        "pass",
        "train/test_reset_parts.py -k anew",
    ),
]
