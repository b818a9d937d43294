"""`Tariff`: the prices that an owner publishes, written as `tariff.yaml`; the server keeps it and charges by it.

A price holds for chips of a node group, for storage of a cluster, or for reserved bandwidth of a link. It may differ by
the job's priority (`class`) and by the hours of the day, and it holds from a time on, until a later one replaces it.
All times are UTC, by the server's clock.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority
from isthmus.core.units import MILLIONTHS, Price

DAY_MIN = 24 * 60
"""Minutes of a day."""
MAX_PRICES = 1_024
"""Most prices of a tariff."""
PRIORITIES: tuple[Priority, ...] = ("low", "middle", "high")


Hours = Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d-(([01]\d|2[0-3]):[0-5]\d|24:00)$")]
"""A window of the day, such as `08:00-20:00`; an end that is not after the begin falls on the next day."""


def _to_utc(given: Any) -> Any:
    """Return a date or a time without a zone as one in UTC; a date is its first moment."""
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given)
        except ValueError as error:
            raise ValueError(f"'{given[:40]}' is no date; an example: 2027-01-01, or 2027-01-01T08:00") from error
    if isinstance(given, date) and not isinstance(given, datetime):
        given = datetime.combine(given, time.min)
    return given.replace(tzinfo=UTC) if isinstance(given, datetime) and given.tzinfo is None else given


class TariffPrice(FrozenModel):
    """One price: exactly one of `per_chip_hour`, `per_tb_hour` (1e12 bytes of storage) and `per_gbps_hour` (1e9 bit/s).

    `class` is the priority of the jobs (none: of all priorities), `hours` the time of the day (none: all of it), `from`
    the first moment (none: as soon as the server has accepted the tariff).
    """

    cluster: Name | None = None
    node_group: Name | None = None
    link: Annotated[str, Field(max_length=130)] | None = None
    job_class: Annotated[Priority | None, Field(alias="class")] = None
    hours: Hours | None = None
    begins: Annotated[datetime | None, Field(alias="from"), BeforeValidator(_to_utc)] = None
    per_chip_hour: Price | None = None
    per_tb_hour: Price | None = None
    per_gbps_hour: Price | None = None

    @model_validator(mode="after")
    def _check_resource(self) -> TariffPrice:
        given = [one for one in (self.per_chip_hour, self.per_tb_hour, self.per_gbps_hour) if one is not None]
        if len(given) != 1:
            raise ValueError("state one of per_chip_hour, per_tb_hour and per_gbps_hour")
        wanted = {
            "per_chip_hour": (self.per_chip_hour, "cluster and node_group", (True, True, False)),
            "per_tb_hour": (self.per_tb_hour, "cluster", (True, False, False)),
            "per_gbps_hour": (self.per_gbps_hour, "link", (False, False, True)),
        }
        named = tuple(one is not None for one in (self.cluster, self.node_group, self.link))
        for field, (price, names, expected) in wanted.items():
            if price is not None and named != expected:
                raise ValueError(f"{field} needs {names}, and nothing else that it is the price of")
        source, separator, target = (self.link or "a>b").partition(">")
        if not (source and separator and target) or ">" in target:
            raise ValueError(f"link is FROM>TO, not '{self.link}'")
        return self

    @property
    def resource(self) -> PoolResource:
        """What it is the price of."""
        if self.link is not None:
            source, _, target = self.link.partition(">")
            return PoolResource.link(source, target)
        cluster = self.cluster or ""
        return PoolResource.chips(cluster, self.node_group) if self.node_group else PoolResource.storage(cluster)

    @property
    def price_millionths(self) -> int:
        """The price of a chip, a terabyte or a Gbit/s for one hour, in millionths of the currency's unit."""
        price = self.per_chip_hour if self.per_chip_hour is not None else self.per_tb_hour
        return int((price if price is not None else self.per_gbps_hour or Decimal(0)) * MILLIONTHS)

    @property
    def classes(self) -> tuple[Priority, ...]:
        """The priorities of the jobs that it holds for."""
        return (self.job_class,) if self.job_class else PRIORITIES

    @property
    def windows_min(self) -> tuple[tuple[int, int], ...]:
        """The windows of the day in minutes after midnight UTC, [begin, end), in order."""
        if self.hours is None:
            return ((0, DAY_MIN),)
        begin, end = (int(one[:2]) * 60 + int(one[3:]) for one in self.hours.split("-"))
        if begin < end:
            return ((begin, end),)
        return tuple(one for one in ((0, end), (begin, DAY_MIN)) if one[0] < one[1])


class Tariff(FrozenModel):
    """The prices of an owner, of clusters that are its own; the operator's may name any cluster, and links.

    `currency` is that of the pool. The prices of a resource from one time on cover every class and the whole day, each
    moment once.
    """

    version: Literal[1] = 1
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    prices: Annotated[tuple[TariffPrice, ...], Field(min_length=1, max_length=MAX_PRICES)]
