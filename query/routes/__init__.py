"""Router-replay traces held against a transport contract."""

from trajreplay.query.routes.check import check_routes, count_records
from trajreplay.query.routes.findings import RouteFinding, RouteReport
from trajreplay.query.routes.policy import RoutePolicy, load_policy, policy_of
from trajreplay.query.routes.rules import CONTRACTS, RULES, RouteRule
from trajreplay.query.routes.whose import AttemptFacts

__all__ = [
    "CONTRACTS",
    "RULES",
    "AttemptFacts",
    "RouteFinding",
    "RoutePolicy",
    "RouteReport",
    "RouteRule",
    "check_routes",
    "count_records",
    "load_policy",
    "policy_of",
]
