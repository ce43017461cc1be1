"""The campaign's traffic is reproducible and hostile, and its judge is strict."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from anabranch.core import faults
from anabranch.engine.tripwire import tripwire_answer, tripwire_info
from anabranch.testing.chaos.faults import STEPS, CampaignFaults
from anabranch.testing.chaos.judge import Outcome, judge
from anabranch.testing.chaos.report import Kill, Report, summary, unsettled
from anabranch.testing.chaos.workload import Ask, Workload

INFO = tripwire_info(layers=1)


def test_one_seed_gives_one_sequence_and_the_prompts_are_hostile() -> None:
    first, second, other = (Workload(INFO, seed) for seed in (5, 5, 6))
    asks = [first.next() for _ in range(150)]
    assert asks == [second.next() for _ in range(150)]
    assert asks[:20] != [other.next() for _ in range(20)]
    ends = Counter(len(ask.tokens) % 16 for ask in asks)
    assert min(ends[15], ends[0], ends[1]) > 15
    assert {ask.n for ask in asks} == {1, 2, 3, 4}
    assert {ask.fate for ask in asks} == {"finish", "leave", "deadline"}
    starts = Counter(tuple(ask.tokens[:32]) for ask in asks)
    assert len(starts) <= 6, "prompts do not share their beginnings"
    prompts = [tuple(ask.tokens) for ask in asks]
    assert len(set(prompts)) < len(prompts), "no bursts of siblings"


@pytest.fixture(scope="module")
def ask() -> Ask:
    workload = Workload(INFO, 1)
    return next(a for a in iter(workload.next, None) if a.n == 2 and len(a.expected[0][0]) > 3)


def _perfect(ask: Ask) -> Outcome:
    return Outcome(
        choices=[list(tokens) for tokens, _ in ask.expected],
        finishes=[reason for _, reason in ask.expected],
        prompt_tokens=len(ask.tokens),
    )


def test_the_expected_answer_is_the_oracles(ask: Ask) -> None:
    assert ask.expected == tripwire_answer(INFO, ask.tokens, ask.sampling, n=ask.n)
    assert judge(ask, _perfect(ask)).verdict == "right"


def test_a_wrong_token_is_wrong_whatever_else_happened(ask: Ask) -> None:
    seen = _perfect(ask)
    seen.choices[1][2] ^= 1
    for change in ({}, {"left": True}, {"error": "unavailable"}, {"cut": True}):
        judgement = judge(ask, msgspec.structs.replace(seen, **change))
        assert judgement.verdict == "wrong"
        assert "choice 1, token 2" in judgement.reason


def test_too_much_too_little_and_another_end_are_wrong(ask: Ask) -> None:
    longer = _perfect(ask)
    longer.choices[0].append(7)
    assert judge(ask, longer).verdict == "wrong"
    shorter = _perfect(ask)
    shorter.choices[0].pop()
    assert judge(ask, shorter).verdict == "wrong"
    silent = _perfect(ask)
    silent.finishes[0] = ""
    assert judge(ask, silent).verdict == "wrong"
    miscounted = _perfect(ask)
    miscounted.prompt_tokens = len(ask.tokens) - 1
    assert judge(ask, miscounted).verdict == "wrong"


def test_what_came_before_an_error_counts_for_nothing(ask: Ask) -> None:
    seen = Outcome.empty(ask)
    seen.choices[0] = ask.expected[0][0][:2]
    assert judge(ask, msgspec.structs.replace(seen, error="unavailable")).verdict == "refused"
    assert judge(ask, msgspec.structs.replace(seen, left=True)).verdict == "left"
    assert judge(ask, msgspec.structs.replace(seen, cut=True)).verdict == "lost"


def test_the_campaign_knows_every_named_step() -> None:
    """Those that the code asks at, those that `core.faults` lists, and those with faults in a campaign are the same."""
    name = re.compile(r"\b(?:ssd|peer|push|directory)(?:\.[a-z]+)+\b")
    source = Path(faults.__file__).parents[1]
    asked = {
        step
        for folder in ("store", "transfer")
        for file in (source / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        for step in re.findall(r'"((?:ssd|peer|push|directory)\.[a-z.]+)"', line)
    }
    listed = set(name.findall((faults.__doc__ or "").partition("Steps:")[2]))
    ours = {step for step in STEPS if not step.startswith(("control.", "port."))}
    assert asked == listed == ours


def test_faults_are_seeded_counted_and_end() -> None:
    one, two = CampaignFaults(3, scale=50.0), CampaignFaults(3, scale=50.0)
    steps = [step for step in STEPS if "hang" not in STEPS[step][1] and "delay" not in STEPS[step][1]]
    assert [one.at(step) for step in steps * 20] == [two.at(step) for step in steps * 20]
    assert sum(one.fired.values()) > 0
    assert one.at("no.such.step") == ""
    one.off()
    assert {one.at(step) for step in steps * 20} == {""}


def test_a_report_passes_only_when_nothing_is_wrong_or_left() -> None:
    def kill(process: str, recovery_s: float | None) -> Kill:
        return Kill(process=process, signal="SIGKILL", at_s=0.0, recovery_s=recovery_s, back_s=1.0)

    report = Report(mode="processes", seed=1, kills=[kill("directory", 0.5), kill("gateway", 3.0), kill("node", 0.1)])
    assert report.passed
    assert report.recoveries() == [0.1, 0.5]
    assert summary(report)["recovery_s"] == {"p50": 0.3, "max": 0.5, "gateway_max": 3.0}
    assert Report(mode="processes", seed=1).verdicts is not report.verdicts
    report.verdicts["wrong"] += 1
    assert not report.passed
    assert len(report.unseen()) == len(STEPS)


def test_census_names_what_should_not_be_held() -> None:
    rest = {"free_slots": 3, "cached_slots": 5, "evictable_slots": 5, "sessions": 1, "loads": 0}
    assert unsettled("n", rest) == {}
    assert unsettled("n", {**rest, "loads": 2, "evictable_slots": 4}) == {"n.loads": 2, "n.pinned_slots": 1}
