"""Router-replay traces held against a transport contract."""

from trajreplay.query.routes.check import check_routes
from trajreplay.query.routes.findings import RouteFinding, RouteReport
from trajreplay.query.routes.policy import RoutePolicy, load_policy, policy_of
from trajreplay.query.routes.rules import CONTRACTS, RULES, RouteRule

__all__ = [
    "CONTRACTS",
    "RULES",
    "RouteFinding",
    "RoutePolicy",
    "RouteReport",
    "RouteRule",
    "check_routes",
    "load_policy",
    "policy_of",
]
