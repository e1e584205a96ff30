"""Ends, limits, interruptions and re-use, with drafts that are right now and then, on real graphs in exact mode.

Every text has to be the plain one. Every proposal has to be the one that a drafter makes to whom nothing else ever
happened, because a drafter in disorder would show in nothing but its acceptance.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from school import DFLASH, LENGTH, Graduate, School, fixed, found_school, teach_dflash, teach_dflash2, teach_eagle
from school_dspark import teach_dspark
from school_mtp import teach_mtp

from oxidize.runtime.decoder import SpeculativeConfig, SpeculativeDecoder
from oxidize.runtime.drafters.base import DraftContext, Drafter, Proposal
from oxidize.runtime.engine import Engine
from oxidize.runtime.request import Request
from oxidize.runtime.target import Target

HALFWAY = (60,)  # steps of training after which some tokens are accepted and some are not
K = 4


class Recorder:
    """A drafter whose proposals are kept by the length of the text they follow; `fail` makes its next one an error."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.made: dict[int, tuple[int, ...]] = {}
        self.fail = False

    def propose(self, committed: Sequence[int], k: int, context: DraftContext) -> Proposal:
        proposal = self._drafter.propose(committed, k, context)
        if self.fail:
            self.fail = False
            raise RuntimeError("propose")
        self.made[len(committed)] = proposal.tokens
        return proposal

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)


@dataclass
class Bench:
    """A target with one drafter, and decoders over them."""

    engine: Engine
    prompts: list[list[int]]
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        (drafter,) = self.engine.decoder.drafters
        self.recorder = Recorder(drafter)

    @property
    def target(self) -> Target:
        return self.engine.target

    def decoder(self, config: SpeculativeConfig | None = None) -> SpeculativeDecoder:
        """One that starts from nothing."""
        self.target.cache.rewind_to(0, 0)
        self.recorder.reset()
        self.recorder.made.clear()
        return SpeculativeDecoder(self.target, self.recorder, config or fixed(K, 24))

    def plain(self, prompt: Sequence[int], count: int = 24, eos: Collection[int] = ()) -> list[int]:
        self.target.cache.rewind_to(0, 0)
        return SpeculativeDecoder(self.target, None, fixed(0, count)).generate(prompt, eos=eos)

    def expect(self, prompt: Sequence[int]) -> "Expected":
        """The plain text, and the proposals on the way of a drafter that starts from nothing."""
        text = self.plain(prompt)
        assert self.decoder().generate(prompt) == text
        return Expected(list(prompt), text, dict(self.recorder.made))

    def check(self, decoder: SpeculativeDecoder, *expected: "Expected") -> None:
        """Play the prompts on this decoder."""
        for each in expected:
            self.recorder.made.clear()
            assert decoder.generate(each.prompt) == each.text
            assert self.recorder.made == each.made


@dataclass(frozen=True)
class Expected:
    """What a prompt must lead to."""

    prompt: list[int]
    text: list[int]
    made: dict[int, tuple[int, ...]]


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> School:
    return found_school(tmp_path_factory.mktemp("school"))


@pytest.fixture(scope="module")
def dflash(school: School) -> Graduate:
    return teach_dflash(school, HALFWAY)


@pytest.fixture(scope="module")
def dflash2(school: School) -> Graduate:
    return teach_dflash2(school, HALFWAY)


@pytest.fixture(scope="module")
def dspark(school: School) -> Graduate:
    return teach_dspark(school, HALFWAY)


@pytest.fixture(scope="module")
def eagle(school: School) -> Graduate:
    return teach_eagle(school, HALFWAY)


@pytest.fixture(scope="module")
def mtp(school: School) -> Graduate:
    return teach_mtp(school, (35,))  # it learns faster than the others


@pytest.fixture(scope="module", params=["dflash", "dflash2", "dspark", "eagle", "mtp"])
def bench(request: pytest.FixtureRequest, school: School) -> Bench:
    graduate: Graduate = request.getfixturevalue(request.param)
    return Bench(graduate.engine("edges"), school.prompts)


def test_an_end_drafted_and_rejected_and_one_accepted_inside_a_proposal(bench: Bench) -> None:
    """Each token of the plain text as the only end: drafts name it where it is not due, and where it is."""
    rejected = inside = 0
    prompt = bench.prompts[0]
    for end in sorted(set(bench.plain(prompt, LENGTH))):
        plain = bench.plain(prompt, LENGTH, {end})
        decoder = bench.decoder(fixed(K, LENGTH))
        emissions = list(decoder.stream(prompt, eos={end}))
        assert [token for emission in emissions for token in emission.tokens] == plain
        assert plain[-1] == end and emissions[-1].finish_reason == "stop"
        inside += 0 < emissions[-1].accepted == len(emissions[-1].tokens) < K
        whole = prompt + plain
        rejected += any(
            end in tokens and tokens != tuple(whole[start : start + len(tokens)])
            for start, tokens in bench.recorder.made.items()
        )
    assert rejected > 0 and inside > 0


@pytest.mark.parametrize("mask", [2, None], ids=["of the checkpoint", "of the text"])
def test_the_mask_is_an_end(dflash: Graduate, mask: int | None) -> None:
    """An id of generation_config.json, and a token that the text does end with."""
    prompt = dflash.school.prompts[1]
    chosen = dflash.school.plain[1][20] if mask is None else mask
    config = {"dflash_config": {**DFLASH["dflash_config"], "mask_token_id": chosen}}
    bench = Bench(dflash.engine(f"mask-{chosen}-is-an-end", config=config), [prompt])
    ends = bench.engine.eos | {chosen}
    plain = bench.plain(prompt, LENGTH, ends)
    for k in range(1, K + 1):
        assert bench.decoder(fixed(k, LENGTH)).generate(prompt, eos=ends) == plain
    assert bench.recorder.made


def test_the_mask_is_an_end_of_the_engine(dflash: Graduate) -> None:
    config = {"dflash_config": {**DFLASH["dflash_config"], "mask_token_id": 2}}
    engine = dflash.engine("mask-of-the-engine", config=config)
    texts = []
    for k in (0, K):
        deltas = list(engine.stream(dflash.school.prompts[2], Request(fixed(k))))
        texts.append(([token for delta in deltas for token in delta.tokens], deltas[-1].finish_reason))
    assert texts[0] == texts[1] and engine.stats.draft_tokens > 0


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "eagle"])
def test_a_draft_of_fewer_positions_than_the_target(request: pytest.FixtureRequest, kind: str) -> None:
    """It drafts up to its last position and no further; behind that, and in the next text, all goes on."""
    graduate: Graduate = request.getfixturevalue(kind)
    bench = Bench(graduate.engine("short", config={"max_position_embeddings": 40}), graduate.school.prompts)
    short, long = bench.prompts[0], (bench.prompts[1] * 20)[:60]
    prompts = [short, long, short, long[:20], long, long[:39], short]
    texts = [bench.plain(prompt, LENGTH) for prompt in prompts]
    decoder = bench.decoder(fixed(K, LENGTH))
    for prompt, text in zip(prompts, texts, strict=True):
        assert decoder.generate(prompt) == text
        proposed = [length for length, tokens in bench.recorder.made.items() if tokens]
        if len(prompt) < 30:
            assert 40 - 2 * K <= max(proposed) <= 41  # the next round began where no block fits
        else:
            assert max(proposed, default=0) <= 41
        bench.recorder.made.clear()


def test_room_smaller_than_a_draft(bench: Bench) -> None:
    prompt = bench.prompts[0]
    text = bench.plain(prompt, K + 3)
    for count in range(1, K + 3):
        assert bench.decoder(fixed(K, count)).generate(prompt) == text[:count]
    assert max(map(len, bench.recorder.made.values())) <= K


def test_a_prompt_that_all_but_fills_the_context(bench: Bench) -> None:
    for room in (1, 2, K, K + 2):
        prompt = (bench.prompts[2] * 200)[: bench.target.context - room]
        assert bench.decoder(fixed(K, room)).generate(prompt) == bench.plain(prompt, room)


def test_a_prompt_of_one_token(bench: Bench) -> None:
    one, other = ([prompt[0]] for prompt in bench.prompts[:2])
    expected = [bench.expect(prompt) for prompt in (one, other, one)]
    bench.check(bench.decoder(), *expected)


@pytest.fixture(scope="module")
def prompts_of_a_kind(school: School) -> list[list[int]]:
    """Ones that continue, shorten, share a beginning with, or have nothing in common with the one before."""
    first, second = school.texts[0][:30], school.texts[1][:20]
    return [first, [*first, *second], first[:9], [*first[:9], *second], second, first, first]


def test_prompts_one_after_the_other(bench: Bench, prompts_of_a_kind: list[list[int]]) -> None:
    expected = [bench.expect(prompt) for prompt in prompts_of_a_kind]
    decoder = bench.decoder()
    bench.check(decoder, *expected)
    assert decoder.stats.cached_tokens > 0
    conversation = expected[0].prompt + expected[0].text + bench.prompts[3]
    decoder, again = bench.decoder(), bench.expect(conversation)
    bench.check(decoder, expected[0], again)


@pytest.mark.parametrize("chunk", [1, 2, 7, 29])
def test_a_prompt_in_chunks(bench: Bench, chunk: int, prompts_of_a_kind: list[list[int]]) -> None:
    """Where the last chunk is a single token, the first round drafts already, and rounds begin elsewhere."""
    expected = [bench.expect(prompt) for prompt in prompts_of_a_kind[:4]]
    decoder, same = bench.decoder(), 0
    for each in expected:
        bench.recorder.made.clear()
        found = decoder.stream(each.prompt, chunk=chunk)
        assert [token for emission in found for token in emission.tokens] == each.text
        shared = [length for length, tokens in bench.recorder.made.items() if tokens and each.made.get(length)]
        assert [bench.recorder.made[length] for length in shared] == [each.made[length] for length in shared]
        same += len(shared)
    assert same > 8


def test_a_cache_filled_behind_the_drafters_back(bench: Bench, prompts_of_a_kind: list[list[int]]) -> None:
    """By plain decoding on the same decoder, and by another decoder of the same target."""
    expected = [bench.expect(prompt) for prompt in prompts_of_a_kind[:5]]
    decoder = bench.decoder()
    for each in expected:
        quiet = decoder.stream(each.prompt, config=fixed(0, 24))
        assert [token for emission in quiet for token in emission.tokens] == each.text
        bench.check(decoder, each)
        assert SpeculativeDecoder(bench.target, None, fixed(0, 24)).generate(each.prompt[:5] + each.text)
        bench.check(decoder, each)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_an_abandoned_stream(bench: Bench, rounds: int, prompts_of_a_kind: list[list[int]]) -> None:
    expected = [bench.expect(prompt) for prompt in prompts_of_a_kind[:4]]
    decoder = bench.decoder()
    for each in expected:
        for prompt in (each.prompt, [*each.prompt[: len(each.prompt) // 2], 3]):
            stream = decoder.stream(prompt)
            for _ in range(rounds):
                next(stream)
            stream.close()
        bench.check(decoder, each)


@pytest.mark.parametrize("where", ["propose", "forward", "watch", "observe"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_an_error_in_the_middle(
    bench: Bench, where: str, rounds: int, monkeypatch: pytest.MonkeyPatch, prompts_of_a_kind: list[list[int]]
) -> None:
    expected = [bench.expect(prompt) for prompt in prompts_of_a_kind[:3]]
    decoder = bench.decoder()
    for each in expected:
        stream = decoder.stream(each.prompt)
        for _ in range(rounds):
            next(stream)
        with monkeypatch.context() as broken:
            break_once(broken, bench, where)
            with pytest.raises(RuntimeError, match=where):
                list(stream)
        bench.check(decoder, each)


def break_once(broken: pytest.MonkeyPatch, bench: Bench, where: str) -> None:
    """Let the next call of a part end in an error, after it has done its work."""
    if where == "propose":
        bench.recorder.fail = True
        return
    owner = bench.target if where == "forward" else bench.recorder._drafter
    original = getattr(owner, where)

    def failing(*arguments):
        original(*arguments)
        raise RuntimeError(where)

    broken.setattr(owner, where, failing)
