"""A process that records into a spool, and tries each step twice; see `main` for its arguments."""

import sys
import warnings

from tests.helpers.recorded import switched
from trajreplay import RecomputeConfig, SampleRecord, capture


def main(lake: str, spool: str, rank: str, ranks: str, steps: str, value: str) -> None:
    """Record steps, each with a recorder that gives it up and with one that does not.

    Args:
        lake: Where the spool's captures go.
        spool: Where it records to.
        rank: Of the process.
        ranks: Those that record, with commas.
        steps: How many.
        value: The log-prob of each token.
    """
    warnings.simplefilter("ignore")
    for step, tried_again in [(one, again) for one in range(int(steps)) for again in (False, True)]:
        recorder = capture.enable(
            switched(lake, spool=spool, strict=False),
            settings=RecomputeConfig(),
            step_stages=["sample"],
            rank=int(rank),
            expected_ranks=[int(one) for one in ranks.split(",")],
            attempt=0,
        )
        recorder.begin_step(step, 0)
        if not tried_again:
            recorder.drop("tried-again")
        samples = [SampleRecord(f"s-{rank}", 2, 3, [1, 1])]
        recorder.record_policy_loss(0, samples, {"loss": step}, [[float(value)] * 2])
        recorder.end_step()
        recorder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
