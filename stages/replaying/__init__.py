"""A replay: from a selection to loaded cohorts, judged stage by stage, to a report."""
