"""When each bucket is fetched, used, dropped and reduced: values and plans, without torch."""

from mics_fn.schedules.desync import Channel, joined
from mics_fn.schedules.planning import plan
from mics_fn.schedules.policy import Learned, OnDemand, keep_all, on_demand
from mics_fn.schedules.run import Run
from mics_fn.schedules.schedule import Action, Schedule, first_difference
from mics_fn.schedules.stalled import Stuck

__all__ = [
    "Action",
    "Channel",
    "Learned",
    "OnDemand",
    "Run",
    "Schedule",
    "Stuck",
    "first_difference",
    "keep_all",
    "on_demand",
    "plan",
    "joined",
]
