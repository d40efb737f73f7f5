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
        "the scales of a band are those of the first one",
        "collectives/blocks.py",
        "rows.scales[own, self.start // block : -(-self.stop // block)]",
        "rows.scales[own, : -(-(self.stop - self.start) // block)]",
        "collectives/test_codec.py -k bands",
    ),
    (
        "one value that is not finite is lost",
        "collectives/blocks.py",
        '        scale = torch.where(finite, scale, float("nan"))\n',
        "        scale = torch.where(finite, scale, 0)\n",
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
        "an odd number of codes of four bits leaves half a byte as it comes",
        "collectives/blocks.py",
        "            into[:, -1].bitwise_and_(15)  # half a byte of padding\n",
        "            pass\n",
        "collectives/test_codec.py",
    ),
    (
        "the largest values of 16 bits become infinite",
        "collectives/blocks.py",
        "    if dtype.itemsize != 2 or (",
        "    if True or (",
        "collectives/test_codec.py -k largest_values",
    ),
]
