"""The periods of budgets. They follow the calendar in UTC, so that all gateways begin a new one at the same moment."""

import math
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

BudgetPeriod = Literal["hour", "day", "week", "month", "total"]
PERIODS: tuple[BudgetPeriod, ...] = get_args(BudgetPeriod)
BEGINS_ANEW = {
    "hour": "it begins anew with the next hour",
    "day": "it begins anew at midnight, UTC",
    "week": "it begins anew on Monday, UTC",
    "month": "it begins anew on the first of the month, UTC",
    "total": "it is for all time: raise it",
}
_LABELS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "week": "%Y-%m-%d", "month": "%Y-%m", "total": ""}


def period_label(period: BudgetPeriod, seconds: float) -> str:
    """The period that this moment is in. Later ones are greater, as text."""
    return _begin(period, seconds).strftime(_LABELS[period])


def period_end(period: BudgetPeriod, seconds: float) -> float:
    """When the next one begins: never, for all time."""
    begin = _begin(period, seconds)
    match period:
        case "hour":
            return (begin + timedelta(hours=1)).timestamp()
        case "day":
            return (begin + timedelta(days=1)).timestamp()
        case "week":
            return (begin + timedelta(weeks=1)).timestamp()
        case "month":
            return (begin + timedelta(days=31)).replace(day=1).timestamp()
        case "total":
            return math.inf


def _begin(period: BudgetPeriod, seconds: float) -> datetime:
    hour = datetime.fromtimestamp(seconds, UTC).replace(minute=0, second=0, microsecond=0)
    if period == "hour":
        return hour
    day = hour.replace(hour=0)
    if period == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if period == "month" else day
