"""MiCS sharded data-parallel training as plain functions on values."""

from mics_fn.errors import (
    CollectiveError as CollectiveError,
    CollectiveTimeoutError as CollectiveTimeoutError,
    DesyncError as DesyncError,
    DonatedError as DonatedError,
    GroupsError as GroupsError,
    LeafError as LeafError,
    MicsError as MicsError,
    OptimizerError as OptimizerError,
    PlanError as PlanError,
    TreeError as TreeError,
)
from mics_fn.gather import gather as gather, unshard as unshard
from mics_fn.grads import (
    reduce_grads as reduce_grads,
    scatter_grads as scatter_grads,
    sync_replicas as sync_replicas,
)
from mics_fn.groups import (
    Groups as Groups,
    Hierarchy as Hierarchy,
    init_distributed as init_distributed,
    make_groups as make_groups,
)
from mics_fn.leaf import Fixed as Fixed, Sharded as Sharded, Tied as Tied
from mics_fn.optim import (
    TrainState as TrainState,
    Transform as Transform,
    chain as chain,
    clip_by_global_norm as clip_by_global_norm,
    clip_by_value as clip_by_value,
    global_norm as global_norm,
    init_state as init_state,
    opt_step as opt_step,
    warmup_cosine as warmup_cosine,
)
from mics_fn.sharded import shard as shard
from mics_fn.topology import Plan as Plan, Topology as Topology, plan_groups as plan_groups
from mics_fn.torch_optim import (
    adam as adam,
    adamw as adamw,
    from_torch as from_torch,
    lion as lion,
    sgd as sgd,
)
from mics_fn.trainer import StepMetrics as StepMetrics, Trainer as Trainer
from mics_fn.tree import node as node
