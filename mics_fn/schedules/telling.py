"""`Job`: what all ranks of the groups, those of every replica, tell each other through the store.

[Note: told to all] An error that some ranks find is raised by all of them, since the others would
wait for these sooner or later. A rank that cannot go on writes its error as the trouble of the
groups, which are finished then. But ranks that compare something by collectives raise together, and
may go on if their program catches the error. If they are only a part of the groups, they tell the
others what they refused, and withdraw it with their next call. Until then the others raise it when
they look, except those that refuse something themselves at that time.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mics_fn.errors import DesyncError, disagreement
from mics_fn.schedules.news import News
from mics_fn.store import Store


class Job:
    """Messages between all ranks of the groups; without a store, those of a single rank.

    Args:
      store: shared by all ranks.
      key: prefix of its keys, which no other groups of this job use.
      rank: this rank.
    """

    def __init__(self, store: Store | None = None, key: str = "", rank: int = 0) -> None:
        self.store, self.key, self.rank = store, key, rank
        self.news = None if store is None else News(store)
        self.calls: list[Any] = []  # the `Calls` of each communicator that this rank is in
        # `refusing`: this rank raised an error together with others, and has made no call since.
        # `raised`: the same, or an error of its own.
        self.refusing = self.raised = False
        self.withdraw: Callable[[], None] = lambda: None  # takes back an error of its own
        # Raises if a rank has failed without which a wait cannot end; the error of a wait that took
        # too long; and notes why groups failed: all three of the groups' `Life`.
        self.check: Callable[..., None] = lambda *args, **kwargs: None
        self.late: Callable[..., Exception] = lambda error, stuck=(): error
        self.fail: Callable[[BaseException], None] = lambda error: None
        # `Departures.closed` and `Departures.check`, about ranks that closed their groups without
        # their part in a call.
        self.gone: Callable[[Any], Exception | None] = lambda call: None
        self.await_call: Callable[[Any], None] = lambda call: None
        # What to raise instead, if some rank has failed and that was the cause.
        self.explain: Callable[..., Exception] = lambda error, *, wait: error
        self._trouble, self._refused = f"{key}/all/trouble", f"{key}/all/refused"

    def tell(self) -> None:
        """Say that this rank has written something."""
        if self.news is not None:
            self.news.tell()

    def report(self, text: str) -> None:
        """Make all ranks of the groups raise this error when they look."""
        if self.store is not None:
            self.store.compare_set(self._trouble, "", text)
            self.tell()

    def refuse(self, text: str) -> None:
        """Make the other ranks raise an error that this rank and some others raise now."""
        if self.store is not None:
            self.refusing = self.raised = True
            self.store.compare_set(self._refused, "", text)
            self.tell()

    def go_on(self) -> None:
        """Withdraw what this rank refused, or told of an error of its own."""
        if self.store is not None and self.refusing:
            self.refusing = False
            self.store.set(self._refused, "")
        self.withdraw()
        self.raised = False

    def raise_reported(self) -> None:
        """Raise the error that another rank reported, in this replica or another."""
        for key in (self._trouble, *([] if self.refusing else [self._refused])):
            if self.store is not None and self.store.check([key]):
                text = self.store.get(key).decode()
                if text:
                    error = DesyncError(text)
                    if key == self._trouble:
                        self.fail(error)
                    raise error

    def raise_everywhere(self, what: str, texts: Mapping[int, str], fix: str) -> NoReturn:
        """Raise, here and on the other ranks, that ranks did different things."""
        error = disagreement(what, texts, fix)
        self.report(str(error))
        self.raise_reported()
        raise error
