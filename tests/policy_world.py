"""A simulated clock for the policy: scripted acceptance, known costs, and every fixed k on the same text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oxidize.runtime.costs import CostCurve
from oxidize.runtime.policy import Offer, PassCost, Plan, Policy, PolicyConfig, Source, State

MACHINES = {
    "int4": CostCurve(((1, 1.0), (2, 1.27), (4, 1.73), (8, 3.2), (16, 5.8))),
    "fp32": CostCurve(((1, 1.0), (2, 1.22), (4, 1.29), (8, 1.62), (16, 1.96))),
    "gpu": CostCurve(((1, 1.0), (2, 1.0), (4, 1.02), (8, 1.05), (16, 1.1))),
}


def linear(per_token: float) -> CostCurve:
    """A draft model: so many plain steps a token."""
    return CostCurve(((1, per_token), (2, 2 * per_token)))


def flat(cost: float) -> CostCurve:
    """A block draft: the same for any k."""
    return CostCurve(((1, cost),))


@dataclass(frozen=True)
class Script:
    """A source and what the text does to it, by position in the text.

    runs: how many tokens of a proposal made there the target would keep.
    matches: for a free source, the match length of its offer there; 0 for an offer that is no lookup, -1 for none.
    """

    source: Source
    runs: list[int]
    matches: list[int] | None = None

    def draft_ms(self, k: int) -> float:
        """Time to propose k tokens."""
        return self.source.draft.at(k) if self.source.draft is not None and k else 0.0


@dataclass
class World:
    """A text of `length` tokens on a machine."""

    machine: CostCurve
    scripts: list[Script]
    length: int
    max_k: int = 8
    slowness: list[float] | None = None  # factor on times, by position
    catch_up: float = 0.0  # milliseconds a draft pays for each token it has not read

    def offers(self, position: int, most: int) -> list[Offer]:
        return [
            Offer(script.source.name, most, script.matches[position])
            for script in self.scripts
            if script.matches is not None and script.matches[position] >= 0 and most > 0
        ]


def bits_to_runs(bits: Sequence[bool]) -> list[int]:
    """Length of the run of kept tokens that begins at each position."""
    runs = [0] * (len(bits) + 1)
    for position in range(len(bits) - 1, -1, -1):
        runs[position] = runs[position + 1] + 1 if bits[position] else 0
    return runs[:-1]


def bernoulli(length: int, chance: Callable[[int], float], seed: int) -> list[int]:
    generator = random.Random(seed)
    return bits_to_runs([generator.random() < chance(position) for position in range(length)])


def play_fixed(world: World, order: Sequence[str], k: int) -> float:
    """Time with the first source of `order` that can propose, always k tokens."""
    by_name = {script.source.name: script for script in world.scripts}
    scripts = [by_name[name] for name in order]
    passes = [world.machine.at(width) for width in range(1, k + 2)]
    drafts = [[script.draft_ms(most) for most in range(k + 1)] for script in scripts]
    position, total = 0, 0.0
    while position < world.length:
        most = min(k, world.length - position - 1)
        accepted, cost = 0, passes[0]
        for script, draft in zip(scripts, drafts, strict=True) if most else ():
            if script.matches is None or script.matches[position] >= 0:
                accepted, cost = min(most, script.runs[position]), passes[most] + draft[most]
                break
        total += cost * world.slowness[position] if world.slowness else cost
        position += accepted + 1
    return total


def best_fixed(world: World) -> tuple[float, str, int]:
    """Least time of any fixed k with any fixed preference among the sources."""
    names = [script.source.name for script in world.scripts]
    orders = [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])
    return min((play_fixed(world, order, k), "+".join(order), k) for order in orders for k in range(world.max_k + 1))


@dataclass
class Log:
    """What a play of the policy left behind."""

    total: float = 0.0
    states: list[tuple[int, State, str]] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)


def play(world: World, policy: Policy) -> Log:
    """The policy on the text; returns its time and its history."""
    scripts = {script.source.name: script for script in world.scripts}
    policy.start()
    log, position, read = Log(), 0, dict.fromkeys(scripts, 0)
    passes = [world.machine.at(width) for width in range(1, world.max_k + 2)]
    while position < world.length:
        most = min(world.max_k, world.length - position - 1)
        offers = world.offers(position, most)
        plan = policy.plan(most, offers)
        log.plans.append((position, plan))
        slow = world.slowness[position] if world.slowness else 1.0
        script = scripts.get(plan.source or "")
        accepted = 0
        if script is not None:
            if script.source.draft is not None:
                draft = slow * (script.draft_ms(plan.k) + world.catch_up * (position - read[script.source.name]))
                policy.record_draft_cost(script.source.name, plan.k, draft)
                log.total += draft
            accepted = min(plan.k, script.runs[position])
        cost = slow * passes[plan.k]
        policy.cost.observe(plan.k + 1, cost)
        log.total += cost
        for offer in offers:
            run = scripts[offer.source].runs[position]
            if offer.source != plan.source:
                policy.record_unused(offer.source, run > 0, offer.match_length)
        if script is not None:
            match = script.matches[position] if script.matches is not None else 0
            policy.record(script.source.name, plan.k, accepted, match)
            read[script.source.name] = position + accepted
        position += accepted + 1
        if not log.states or log.states[-1][1] != policy.state:
            log.states.append((position, policy.state, policy.reason))
    return log


def fresh(world: World, floor: float = 0.3, cost: PassCost | None = None, adaptive: bool = True) -> Policy:
    """A policy that knows this world's costs."""
    sources = [script.source for script in world.scripts]
    return Policy(PolicyConfig(world.max_k, floor, adaptive), cost or PassCost(world.machine), sources)


def lookup_text(length: int, copying: Callable[[int], float], seed: int) -> tuple[list[int], list[int]]:
    """Runs and match lengths of lookups in a text that copies stretches of itself.

    copying: chance that a copied stretch begins at a position. In it nearly every token agrees and the match grows;
    outside there is often no match or a short one that seldom agrees.
    """
    generator = random.Random(seed)
    bits, matches, match, copied = [], [], -1, False
    for position in range(length):
        if not copied and generator.random() < copying(position):
            match, copied = generator.randint(2, 4), True
        elif not copied and match < 0:
            match = generator.choice((-1, -1, -1, 2, 2, 3))
        agreed = match > 0 and generator.random() < (0.96 if copied else 0.25)
        bits.append(agreed)
        matches.append(match)
        match, copied = (match + 1, copied) if agreed else (-1, False)
    return bits_to_runs(bits), matches


def noise(length: int, seed: int) -> list[float]:
    """Factors on the time of a round: 10 % of scatter, and a spell in which everything takes twice as long."""
    generator = random.Random(seed)
    spell = range(length // 3, length // 3 + 300)
    return [generator.lognormvariate(0, 0.1) * (2 if position in spell else 1) for position in range(length)]
