"""Mistakes in schedules, calls and codecs; `planting.py` checks that tests catch them."""

PLANTED = [
    (
        "reductions before a fetch are not counted",
        "schedules/run.py",
        "            n = len(self._reduced)\n",
        "            n = 0\n",
        "schedules/test_run.py",
    ),
    (
        "a rank that leaves its habit does not say so",
        "schedules/calls.py",
        "leaves = number == self._due or (trusted and call != pattern.guess)",
        "leaves = number == self._due",
        "schedules/test_calls.py -k never_meet",
    ),
    (
        "the bucket that is needed next is dropped",
        "schedules/schedule.py",
        "heappush(heap, (-later[bucket][-1], bucket))",
        "heappush(heap, (later[bucket][-1], bucket))",
        "schedules/test_schedule.py -k plan",
    ),
    (
        "two ranks that wait for each other wait for ever",
        "schedules/messages.py",
        "own in ranks and issued.get(group, 0) < number for",
        "own in ranks and issued.get(group, 0) < number - 1 for",
        "schedules/test_stalled.py",
    ),
    (
        "the last, shorter block has the scale of the first",
        "collectives/pieces.py",
        "return self._cut(x[:, self.first :], 1)",
        "return self._cut(x[:, : self.blocks], 1)",
        "collectives/test_codec.py -k near_as_promised",
    ),
    (
        "one value that is not finite is lost",
        "collectives/pieces.py",
        '            scales.masked_fill_(bad, float("nan"))',
        "            scales.masked_fill_(bad, 0)",
        "collectives/test_codec.py -k not_finite",
    ),
    (
        "a rank that is past a call that others did not make goes on",
        "schedules/calls.py",
        "        if number < self.number:\n",
        "        if number < self.number - 1:\n",
        "schedules/test_calls.py -k never_meet",
    ),
    (
        "one bucket too many is fetched ahead",
        "schedules/schedule.py",
        "(len(waiting) >= prefetch and not kept)",
        "(len(waiting) > prefetch and not kept)",
        "schedules/test_schedule.py -k plan",
    ),
    (
        "the largest values of 16 bits become infinite",
        "collectives/pieces.py",
        "    if not bool(largest <= torch.finfo(out.dtype).max):",
        "    if False:",
        "collectives/test_codec.py -k largest_values",
    ),
]
