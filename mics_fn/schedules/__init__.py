"""When each bucket is fetched, used, dropped and reduced: values and plans, without torch."""

from mics_fn.schedules.desync import Control, together
from mics_fn.schedules.planning import plan
from mics_fn.schedules.policy import Known, OnDemand, keep_all, on_demand
from mics_fn.schedules.run import Player
from mics_fn.schedules.schedule import Action, Schedule, first_difference
from mics_fn.schedules.stalled import Stuck

__all__ = [
    "Action",
    "Control",
    "Known",
    "OnDemand",
    "Player",
    "Schedule",
    "Stuck",
    "first_difference",
    "keep_all",
    "on_demand",
    "plan",
    "together",
]
