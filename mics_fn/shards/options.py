"""The options of `shard`: as other verbs hand them on, and as they were checked."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

from mics_fn import checks
from mics_fn.offload import Where, where_of
from mics_fn.shards.bucket import BUCKET_BYTES
from mics_fn.shards.precision import Precision, precision_of


class LayoutOptions(TypedDict, total=False):
    """Options of `shard` that say how leaves become buckets; other verbs take them, too."""

    frozen: Callable[[str], bool] | None
    precision: Precision | str | None
    bucket_bytes: float | str
    order: Callable[[str], object] | None
    bucket: Callable[[str], object] | None
    where: Where | str | None


class ShardOptions(LayoutOptions, total=False):
    """All options of `shard`."""

    replicas: Literal["check", "broadcast"]
    source_rank: int | None


class Chosen(NamedTuple):
    """The options of `shard` that say how leaves become buckets."""

    frozen: Callable[[str], bool] | None = None
    precision: Precision = Precision()
    bucket_bytes: int = BUCKET_BYTES
    order: Callable[[str], object] | None = None
    bucket: Callable[[str], object] | None = None
    where: Where = Where()

    @classmethod
    def checked(
        cls,
        verb: str,
        frozen: Any,
        precision: Any,
        bucket_bytes: Any,
        order: Any,
        bucket: Any,
        where: Any,
    ) -> "Chosen":
        """The options as they were given, if each of them is what it should be."""
        fix = "pass a function such as lambda path: 'bias' in path"
        checks.function(verb, "frozen", frozen, "from the path of a leaf to a bool", fix)
        checks.call(verb, frozen, "frozen(path)", fix)
        fix = "pass a function such as lambda path: names.index(path)"
        checks.function(verb, "order", order, "from the path of a leaf to a sort key", fix)
        checks.call(verb, order, "order(path)", fix)
        fix = "pass a function such as lambda path: path.split('.')[1]"
        checks.function(verb, "bucket", bucket, "from the path of a leaf to a key", fix)
        checks.call(verb, bucket, "bucket(path)", fix)
        nbytes = checks.nbytes(verb, "bucket_bytes", bucket_bytes, 1)
        return cls(frozen, precision_of(precision), nbytes, order, bucket, where_of(where))
