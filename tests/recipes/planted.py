"""Mistakes in what recipes are made of; `tests/support/planting.py` checks that tests fail."""

_T, _TRANSFORM = "recipes/test_recipes.py", "optim/optimizers.py"
_KEEPS, _LOSES = "return hop2(grads, outer, groups)", "return hop2(grads, outer, groups)[0], outer"
_SENT, _LOST = "gather_level(comm, out, raw)", "gather_level(comm, out.clone(), raw)"
_MEAN = 'apply("mean", uses, opened.data)'
_MINE = "[opened.data[i] for use in uses for i in use.members]"
_OWNERS, _LAST = (
    "return _owners(tuple(params.paths), patterns, default is not None)",
    "return [len(parts) - 1 for _ in params.paths]",
)
_HELD, _FREE = "groups.hierarchy, **found", 'groups.hierarchy, **found | {"outer_params": 0}'
_USES, _LESS = 'self.actions if action.kind == "use"', 'self.actions[2:] if action.kind == "use"'
_OTHER, _FIRST = "*(other[i] for other in", "*(other[min(trained)] for other in"

PLANTED = [
    (
        "AdamW decays as Adam",
        "optim/optimizers.py",
        "_torch.fused_adamw if decoupled else",
        "_torch.fused_adam if decoupled else",
        _T,
    ),
    ("a record lacks its first use", "schedules/schedule.py", _USES, _LESS, _T),
    ("updates are taken away", _TRANSFORM, "p.add_(u)", "p.sub_(u)", _T),
    (
        "norms of leaves have no root",
        "optim/norms.py",
        "here = _roots(_total(home.stage, _squares(pieces, found.live), found.live))",
        "here = _total(home.stage, _squares(pieces, found.live), found.live)",
        _T,
    ),
    ("one optimizer takes all leaves", _TRANSFORM, _OWNERS, _LAST, _T),
    ("hop 2 of one's own forgets its state", "train/replicas.py", _KEEPS, _LOSES, _T),
    ("a gather gives memory that nobody wrote", "collectives/levels.py", _SENT, _LOST, _T),
    ("each replica keeps its own gradients", "shards/verbs.py", _MEAN, _MINE, _T),
    ("a placement keeps nothing", "groups/placement.py", _HELD, _FREE, _T),
    ("all leaves are mapped with the first", "shards/verbs.py", _OTHER, _FIRST, _T),
]
