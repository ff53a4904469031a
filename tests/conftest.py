"""Hypothesis profiles: `dev` for a quick look, `ci` for the same 200 examples every time."""

import os

from hypothesis import settings

# No deadlines: torch's first call is slow.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
