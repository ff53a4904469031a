"""Rewards, returns and advantages as plain loops over samples and tokens, in float64."""

import math
from collections.abc import Sequence
from fractions import Fraction

Rows = Sequence[Sequence[float]]


def rows_of(values: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """Split packed tokens into their samples."""
    rows, start = [], 0
    for length in lengths:
        rows.append(list(values[start : start + length]))
        start += length
    return rows


def flat(rows: Rows) -> list[float]:
    """Pack the tokens of samples."""
    return [value for row in rows for value in row]


def linear_scan(terms: Rows, decay: Rows, initial: Sequence[float]) -> list[list[float]]:
    """Run the recurrence of each sample backwards."""
    result = []
    for xs, rates, start in zip(terms, decay, initial, strict=True):
        state, row = start, []
        for x, a in zip(reversed(xs), reversed(rates), strict=True):
            state = x + a * state
            row.append(state)
        result.append(row[::-1])
    return result


def normalise_rewards(
    rewards: Sequence[float],
    group_index: Sequence[int],
    *,
    baseline: str = "mean",
    divisor: str = "none",
    divisor_index: Sequence[int] | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    epsilon_place: str = "added",
    lone: str = "zero",
    missing: str = "keep",
    lengths: Sequence[float] = (),
    greedy_rewards: Sequence[float] = (),
) -> list[float]:
    """Score rewards that are finite or, if excluded, NaN; in exact fractions up to the roots."""
    known = [i for i, one in enumerate(rewards) if not (missing == "exclude" and math.isnan(one))]
    exact = {i: Fraction(rewards[i]) for i in known}
    shared = group_index if divisor_index is None else divisor_index
    scored: dict[int, Fraction | float] = {}
    for i in known:
        members = [j for j in known if group_index[j] == group_index[i]]
        level: Fraction | None = Fraction(0)
        if baseline == "greedy":
            level = Fraction(greedy_rewards[i])
        elif len(members) == 1 and baseline != "none" and lone in ("zero", "keep"):
            level = Fraction(0) if lone == "keep" else exact[i]
        elif baseline == "mean":
            level = sum((exact[j] for j in members), Fraction(0)) / len(members)
        elif baseline == "length-weighted":
            total = sum((Fraction(lengths[j]) for j in members), Fraction(0))
            weighted = sum((Fraction(lengths[j]) * exact[j] for j in members), Fraction(0))
            level = weighted / total if total else None
        elif baseline == "leave-one-out":
            others = [exact[j] for j in members if j != i]
            level = sum(others, Fraction(0)) / len(others) if others else None
        scored[i] = math.nan if level is None else exact[i] - level
    result = [0.0] * len(rewards)
    for i in known:
        members = [j for j in known if shared[j] == shared[i]]
        result[i] = _divided(
            i,
            scored,
            exact,
            members,
            divisor=divisor,
            ddof=ddof,
            epsilon=epsilon,
            epsilon_place=epsilon_place,
            lone=lone,
        )
    return result


def _divided(
    i: int,
    scored: dict[int, Fraction | float],
    exact: dict[int, Fraction],
    members: list[int],
    *,
    divisor: str,
    ddof: int,
    epsilon: float,
    epsilon_place: str,
    lone: str,
) -> float:
    score = float(scored[i])
    if divisor == "none":
        return score
    if divisor == "baseline":
        if math.isnan(score):
            return math.nan
        level = exact[i] - scored[i]
        return 0.0 if level <= 0 else float(scored[i] / level)
    counted = [j for j in members if j != i] if divisor == "leave-one-out-std" else members
    if len(members) <= (1 if divisor == "leave-one-out-std" else ddof):
        return {"zero": 0.0, "keep": score / (1.0 + epsilon), "nan": math.nan}[lone]
    if divisor == "std-around-baseline":
        squares = sum(scored[j] ** 2 for j in counted)
    else:
        mean = sum((exact[j] for j in counted), Fraction(0)) / len(counted)
        squares = sum((exact[j] - mean) ** 2 for j in counted)
    variance = 0.0 if squares == 0 else float(squares / (len(counted) - ddof))
    if variance == 0.0 and (divisor == "leave-one-out-std" or epsilon == 0.0):
        return score
    if math.isnan(variance):
        return math.nan
    if epsilon_place == "inside":
        return score / math.sqrt(variance + epsilon)
    floor = epsilon if epsilon_place == "floored" else 0.0
    return score / (math.sqrt(max(variance, floor)) + epsilon)


def clamped(value: float, low: float | None, high: float | None) -> float:
    """Clip one number; a NaN stays."""
    if math.isnan(value):
        return value
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def scale_rewards(
    rewards: Sequence[float], *, source: tuple[float, float], target: tuple[float, float]
) -> list[float]:
    """Map one range onto another."""
    slope = (target[1] - target[0]) / (source[1] - source[0])
    return [target[0] + (clamped(reward, *source) - source[0]) * slope for reward in rewards]


def overlong_penalty(
    lengths: Sequence[float], *, max_length: float, buffer: float, penalty: float, floored: bool
) -> list[float]:
    """Punish every response that enters the buffer."""
    result = []
    for length in lengths:
        exceeded = length - (max_length - buffer)
        if floored:
            exceeded = min(exceeded, buffer)
        result.append(min(-exceeded / buffer * penalty, 0.0))
    return result


def truncation_rewards(
    rewards: Sequence[float], truncated: Sequence[int], *, coefficient: float, rule: str
) -> list[float]:
    """Punish every truncated response."""
    result = []
    for reward, cut in zip(rewards, truncated, strict=True):
        punished = reward * coefficient if rule == "multiply" else coefficient
        result.append(punished if cut else reward)
    return result


def cost_penalised_rewards(
    rewards: Sequence[float], costs: Rows, group_index: Sequence[int], weights: Sequence[float]
) -> list[float]:
    """Take off the share that each cost has in the largest of the group."""
    result = []
    for reward, own, group in zip(rewards, costs, group_index, strict=True):
        members = [j for j, other in enumerate(group_index) if other == group]
        mean = math.fsum(rewards[j] for j in members) / len(members)
        share = 0.0
        for k, weight in enumerate(weights):
            largest = max(costs[j][k] for j in members)
            share += weight * own[k] / largest if largest else 0.0
        result.append(reward - mean * share)
    return result


def summed_rewards(components: Rows, weights: Sequence[float], *, missing: str) -> list[float]:
    """Add up the components of every sample."""
    result = []
    for row in components:
        known = [
            weight * one
            for one, weight in zip(row, weights, strict=True)
            if not (missing == "exclude" and math.isnan(one))
        ]
        result.append(math.nan if row and not known else sum(known))
    return result


def decoupled_rewards(
    components: Rows,
    weights: Sequence[float],
    group_index: Sequence[int],
    *,
    batch_index: Sequence[int],
    batch_epsilon: float | None,
    missing: str,
    baseline: str,
    divisor: str,
    epsilon: float,
    ddof: int = 1,
    lone: str = "zero",
) -> list[float]:
    """Normalise every component, add up, normalise the sums of every batch."""
    scored = [
        normalise_rewards(
            [row[k] for row in components],
            group_index,
            baseline=baseline,
            divisor=divisor,
            ddof=ddof,
            epsilon=epsilon,
            lone=lone,
            missing=missing,
        )
        for k in range(len(weights))
    ]
    unknown = [missing == "exclude" and all(map(math.isnan, row)) for row in components]
    sums = [
        math.nan
        if unknown[i]
        else sum(
            w * column[i]
            for w, column in zip(weights, scored, strict=True)
            if missing == "keep" or not math.isnan(column[i])
        )
        for i in range(len(components))
    ]
    if batch_epsilon is None:
        return [0.0 if none else one for one, none in zip(sums, unknown, strict=True)]
    result = []
    for i, one in enumerate(sums):
        members = [
            j for j, batch in enumerate(batch_index) if batch == batch_index[i] and not unknown[j]
        ]
        if unknown[i] or len(members) < 2:
            result.append(0.0)
            continue
        mean = math.fsum(sums[j] for j in members) / len(members)
        squares = math.fsum((sums[j] - mean) ** 2 for j in members)
        std = math.sqrt(squares / (len(members) - ddof))
        result.append((one - mean) / (std + batch_epsilon or 1.0))
    return result


def token_rewards(
    rewards: Sequence[float],
    masks: Rows,
    kl: Rows,
    *,
    reward_at: str,
    kl_coef: float,
    kl_masked: bool,
) -> list[list[float]]:
    """Take the KL penalty off every token and put the reward on one."""
    result = []
    for reward, mask, divergence in zip(rewards, masks, kl, strict=True):
        row = [0.0] * len(mask)
        for t, (m, one) in enumerate(zip(mask, divergence, strict=True)):
            if kl_coef and (m or not kl_masked):
                row[t] = -kl_coef * one
        rewarded = [t for t, m in enumerate(mask) if m or reward_at == "last"]
        if rewarded:
            behind = reward_at == "after-last-unmasked" and rewarded[-1] + 1 < len(mask)
            row[rewarded[-1] + behind] += reward
        result.append(row)
    return result


def discounted_returns(
    rewards: Rows,
    masks: Rows,
    *,
    gamma: Sequence[float],
    masking: str,
) -> list[list[float]]:
    """Sum the rewards of every sample from its end."""
    result = []
    for xs, mask, discount in zip(rewards, masks, gamma, strict=True):
        row, carried = [0.0] * len(xs), 0.0
        for t in reversed(range(len(xs))):
            if mask[t] or masking == "through":
                row[t] = carried = xs[t] + discount * carried
            elif masking == "multiply":
                row[t] = carried = discount * carried
            elif masking == "reset":
                carried = 0.0
        result.append(row)
    return result


def gae(
    rewards: Rows,
    values: Rows,
    masks: Rows,
    *,
    gamma: Sequence[float],
    lam: Sequence[float],
    masking: str,
    bootstrap: Sequence[float],
) -> tuple[list[list[float]], list[list[float]]]:
    """Estimate the advantages and returns of every sample from its end."""
    advantages, returns = [], []
    for s, mask in enumerate(masks):
        xs, vs = list(rewards[s]), list(values[s])
        if masking == "multiply":
            xs = [x if m else 0.0 for x, m in zip(xs, mask, strict=True)]
            vs = [v if m else 0.0 for v, m in zip(vs, mask, strict=True)]
        row, following, carried = [0.0] * len(xs), bootstrap[s], 0.0
        for t in reversed(range(len(xs))):
            if mask[t] or masking != "carry":
                carried = xs[t] + gamma[s] * following - vs[t] + gamma[s] * lam[s] * carried
                following = vs[t]
            row[t] = carried
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, vs, strict=True)])
    return advantages, returns


def whiten(
    values: Sequence[float],
    loss_mask: Sequence[float],
    set_index: Sequence[int],
    *,
    centre_index: Sequence[int] | None = None,
    centre: str = "mean",
    scale: bool,
    form: str,
    ddof: int,
    epsilon: float,
    short: str,
) -> list[float]:
    """Whiten the tokens of every set; `short` is `biased`, `keep` or `nan`."""
    with_ = set_index if centre_index is None else centre_index
    levels = [_level(values, loss_mask, with_, at, centre) for at in range(len(values))]
    result = []
    for value, own, level in zip(values, set_index, levels, strict=True):
        counted = [
            other - its_level
            for other, its, index, its_level in zip(
                values, loss_mask, set_index, levels, strict=True
            )
            if its and index == own
        ]
        if not counted and short == "keep":
            result.append(value)
            continue
        if not counted:
            result.append(math.nan)
            continue
        whitened = value - level
        if scale:
            free = len(counted) - ddof
            squares = math.fsum(one**2 for one in counted)
            variance = squares / (free if free > 0 else len(counted))
            if free < 1:
                variance = {"nan": math.nan, "keep": 1.0}.get(short, variance)
            whitened /= _deviation(variance, epsilon, form)
        result.append(whitened)
    return result


def _level(
    values: Sequence[float], mask: Sequence[float], sets: Sequence[int], at: int, centre: str
) -> float:
    """What is taken off the token at a place."""
    others = [
        value
        for place, (value, m, one) in enumerate(zip(values, mask, sets, strict=True))
        if m and one == sets[at] and not (centre == "leave-one-out" and place == at)
    ]
    return 0.0 if centre == "none" or not others else math.fsum(others) / len(others)


def _deviation(variance: float, epsilon: float, form: str) -> float:
    if form == "std":
        return math.sqrt(variance) + epsilon
    if form == "floored":
        return math.sqrt(variance if math.isnan(variance) else max(variance, epsilon))
    return math.sqrt(variance + epsilon)


def gpg_rewards(
    rewards: Sequence[float], group_index: Sequence[int], batch_index: Sequence[int], f_norm: float
) -> list[float]:
    """Centre every reward and scale it by the share of its batch that scores."""
    centred = normalise_rewards(rewards, group_index, lone="keep")
    result = []
    for one, batch in zip(centred, batch_index, strict=True):
        whole = [r for r, other in zip(rewards, batch_index, strict=True) if other == batch]
        scoring = sum(reward != 0 for reward in whole)
        result.append(len(whole) / max(scoring, 1) * one / f_norm)
    return result


def pass_at_k_rewards(
    rewards: Sequence[float], group_index: Sequence[int], *, divide_by_std: bool, epsilon: float
) -> list[float]:
    """Score the best of every group by its lead."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, group_index, strict=True)):
        members = [j for j, other in enumerate(group_index) if other == group]
        ranked = sorted((rewards[j] for j in members), reverse=True)
        best = max(members, key=lambda j: rewards[j])
        score = ranked[0] - ranked[1] if i == best else 0.0
        if score and divide_by_std:
            mean = math.fsum(ranked) / len(ranked)
            squares = math.fsum((one - mean) ** 2 for one in ranked)
            score /= math.sqrt(squares / (len(ranked) - 1)) + epsilon
        result.append(score + 0.0 * reward)
    return result


def optimal_token_advantages(
    rewards: Rows,
    log_probs: Rows,
    sum_pi_squared: Rows,
    weights: Rows,
    masks: Rows,
    group_index: Sequence[int],
    *,
    zero_tail: bool,
    epsilon: float = 1e-8,
) -> list[list[float]]:
    """Take the weighted return of its group off every return."""
    returns = discounted_returns(rewards, masks, gamma=[1.0] * len(masks), masking="multiply")
    paths = []
    for logs, squares, rhos, mask in zip(log_probs, sum_pi_squared, weights, masks, strict=True):
        path, row = 0.0, []
        for log_prob, square, rho, m in zip(logs, squares, rhos, mask, strict=True):
            path += (1 - 2 * math.exp(log_prob) + square) * rho**2 if m else 0.0
            row.append(path)
        paths.append(row)
    counts = [sum(1 for m in mask if m) for mask in masks]
    result = []
    for s, mask in enumerate(masks):
        members = [j for j, other in enumerate(group_index) if other == group_index[s]]
        others = [counts[j] for j in members if j != s]
        end = len(mask) if others else 0
        if zero_tail and others and counts[s] > max(others):
            end = max(others)
        row = []
        for t, m in enumerate(mask):
            having = [j for j in members if t < len(masks[j]) and masks[j][t]]
            numerator = math.fsum(returns[j][t] * paths[j][t] for j in having)
            denominator = math.fsum(paths[j][t] for j in having) + epsilon
            baseline = numerator / denominator if t < end else 0.0
            row.append(returns[s][t] - baseline if m else 0.0)
        result.append(row)
    return result
