"""The life of requests over simulated engines: every order of events, without a process."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import expected_tokens
from tests.orchestrator.simulation import Simulation, known_tokens, request
from twinjet.core.types import TokenLogprobs
from twinjet.orchestrator.dispatch import EngineFault
from twinjet.orchestrator.journal import Entry, ReplayLimits
from twinjet.wire.messages import Abort, Logprobs, PagesExported, PagesHandle, StepTokens, Submit

PROMPT = (5, 6, 7)


def drain(entry: Entry) -> tuple[list[int], str | None, str | None]:
    """(tokens, finish reason, error) of everything not read so far."""
    event = entry.output.take()
    return ([], None, None) if event is None else (list(event.token_ids), event.finish_reason, event.error)


def test_tokens_go_out_as_they_come():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 3))
    oracle = expected_tokens(PROMPT, 3)
    for token in oracle[:2]:
        simulation.step(0)
        assert drain(entry) == ([token], None, None)
    simulation.step(0)
    assert drain(entry) == ([oracle[2]], "length", None)
    assert simulation.dispatcher.num_requests == 0


def test_a_stop_token_is_emitted_and_ends():
    simulation = Simulation(("both",))
    oracle = expected_tokens(PROMPT, 5)
    entry = simulation.dispatcher.submit(request("a", PROMPT, 5, stop_token_ids=frozenset({oracle[1]})))
    simulation.step(0)
    simulation.step(0)
    assert drain(entry) == (oracle[:2], "stop", None)


def test_cached_tokens_are_those_of_the_first_attempt():
    simulation = Simulation(("both", "both"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 6, cache_salt="me", use_cache=False))
    (submit,) = simulation.engines[0].sequences.values()
    assert (submit.cache_salt, submit.use_cache) == ("me", False)
    engine, token = simulation.pool[0], expected_tokens(PROMPT, 1)[0]
    news = StepTokens(1, [submit.sequence_id], [token], [""], num_cached={submit.sequence_id: 2, 99: 7})
    simulation.dispatcher.step_tokens(engine, news)
    event = entry.output.take()
    assert event is not None
    assert event.num_cached == 2
    simulation.kill(0)
    (again,) = simulation.engines[1].sequences.values()
    token = expected_tokens(PROMPT, 2)[1]
    news = StepTokens(1, [again.sequence_id], [token], [""], num_cached={again.sequence_id: 3})
    simulation.dispatcher.step_tokens(simulation.pool[1], news)
    event = entry.output.take()
    assert event is not None
    assert (event.token_ids, event.num_cached) == ((token,), 0)


def test_requests_spread_by_load():
    simulation = Simulation(("both", "both"))
    simulation.dispatcher.submit(request("long", tuple(range(1, 200)), 100))
    for i in range(4):
        simulation.dispatcher.submit(request(f"short{i}", (1, 2), 3))
    assert [len(engine.sequences) for engine in simulation.engines] == [1, 4]


def test_a_lost_engine_is_replayed_on_another_from_the_token_it_died_at():
    simulation = Simulation(("both", "both"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 6))
    simulation.step(0)
    simulation.step(0)
    simulation.kill(0)
    (submit,) = simulation.engines[1].sequences.values()
    assert known_tokens(submit) == [*PROMPT, *expected_tokens(PROMPT, 2)]
    assert submit.max_new_tokens == 4
    for _ in range(4):
        simulation.step(1)
    assert drain(entry) == (expected_tokens(PROMPT, 6), "length", None)
    assert simulation.dispatcher.counters.replays == 1


def test_a_replay_waits_for_the_restart_and_goes_before_later_requests():
    simulation = Simulation(("both",))
    simulation.dispatcher.submit(request("a", PROMPT, 6))
    simulation.kill(0)
    simulation.dispatcher.submit(request("b", (1,), 6))
    assert not simulation.engines[0].sequences
    simulation.revive(0)
    assert [known_tokens(s) for s in simulation.engines[0].sequences.values()] == [list(PROMPT), [1]]


def test_late_news_of_a_lost_attempt_is_dropped():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 6))
    (old,) = simulation.engines[0].sequences
    simulation.kill(0)
    simulation.revive(0)
    simulation.dispatcher.step_tokens(simulation.pool[0], StepTokens(1, [old], [3], [""]))
    assert drain(entry) == ([], None, None)


def test_news_of_a_sequence_that_runs_on_another_engine_is_dropped():
    simulation = Simulation(("both", "both"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 6))
    (sequence,) = simulation.engines[0].sequences
    simulation.dispatcher.step_tokens(simulation.pool[1], StepTokens(1, [sequence], [3], [""]))
    assert drain(entry) == ([], None, None)


def test_abort_ends_at_once_and_tells_the_engine():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 6))
    simulation.step(0)
    simulation.dispatcher.abort("a")
    simulation.dispatcher.abort("a")
    simulation.dispatcher.abort_entry(entry)
    assert drain(entry) == (expected_tokens(PROMPT, 1), "cancelled", None)
    assert [type(m) for m in simulation.engines[0].sent] == [Submit, Abort]
    assert simulation.dispatcher.num_requests == 0


def test_an_engine_error_ends_its_request_with_the_text():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a"))
    (sequence,) = simulation.engines[0].sequences
    simulation.fail(0, sequence, "error", "the step raised")
    assert drain(entry) == ([], "error", "the step raised")
    assert simulation.dispatcher.counters.sequence_errors == 1


def test_a_sequence_that_the_engine_drops_unasked_is_replayed_within_limits():
    simulation = Simulation(("both",), ReplayLimits(max_replays=3))
    entry = simulation.dispatcher.submit(request("a"))
    for _ in range(3):
        (sequence,) = simulation.engines[0].sequences
        simulation.fail(0, sequence, "cancelled")
    tokens, reason, error = drain(entry)
    assert (tokens, reason) == ([], "error")
    assert error is not None
    assert "3 attempts" in error
    assert "dropped" in error
    assert simulation.dispatcher.num_requests == 0


def test_an_engine_that_goes_past_max_tokens_is_stopped():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 1))
    (sequence,) = simulation.engines[0].sequences
    simulation.dispatcher.step_tokens(simulation.pool[0], StepTokens(1, [sequence], [3], [""]))
    assert drain(entry) == ([3], "length", None)
    assert simulation.engines[0].sent[-1] == Abort(sequence)


def test_logprobs_reach_those_who_asked():
    simulation = Simulation(("both",))
    asked = simulation.dispatcher.submit(request("a", num_logprobs=2))
    other = simulation.dispatcher.submit(request("b"))
    first, second = simulation.engines[0].sequences
    news = StepTokens(1, [first, second], [3, 4], ["", ""], [Logprobs(-1.0, [3, 9], [-1.0, -2.0]), None])
    simulation.dispatcher.step_tokens(simulation.pool[0], news)
    event = asked.output.take()
    assert event is not None
    assert event.logprobs == (TokenLogprobs(-1.0, (3, 9), (-1.0, -2.0)),)
    event = other.output.take()
    assert event is not None
    assert event.logprobs is None


@pytest.mark.parametrize(
    "news",
    [
        {"token_ids": [3, 4]},
        {"finish": []},
        {"logprobs": []},
        {"token_ids": [10**9]},
        {"token_ids": [-1]},
        {"finish": ["exported"]},
    ],
)
def test_what_no_sound_engine_says_is_a_fault(news):
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a"))
    (sequence,) = simulation.engines[0].sequences
    message = {"step_id": 1, "sequence_ids": [sequence], "token_ids": [3], "finish": [""], "logprobs": None} | news
    with pytest.raises(EngineFault):
        simulation.dispatcher.step_tokens(simulation.pool[0], StepTokens(**message))
    assert drain(entry) == ([], None, None)


def test_missing_logprobs_are_a_fault():
    simulation = Simulation(("both",))
    simulation.dispatcher.submit(request("a", num_logprobs=0))
    with pytest.raises(EngineFault, match="log-probabilities"):
        simulation.step(0)


# --- two engines, one request -------------------------------------------------------------------


def handed_over(max_tokens: int = 5) -> tuple[Simulation, Entry]:
    """A request whose first token came from the prefill engine 0, and that is now at the decode engine 1."""
    simulation = Simulation(("prefill", "decode"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, max_tokens))
    simulation.step(0)
    return simulation, entry


def test_pages_go_from_prefill_to_decode():
    simulation, entry = handed_over()
    assert drain(entry) == (expected_tokens(PROMPT, 1), None, None)
    (submit,) = simulation.engines[1].sequences.values()
    assert known_tokens(submit) == [*PROMPT, *expected_tokens(PROMPT, 1)]
    assert [handle.name for handle in submit.pages] == ["segment-1"]
    assert not submit.export_pages
    assert simulation.engines[0].segments == {"segment-1"}
    simulation.step(1)
    assert simulation.engines[0].segments == set()
    for _ in range(3):
        simulation.step(1)
    assert drain(entry) == (expected_tokens(PROMPT, 5)[1:], "length", None)
    counters = simulation.dispatcher.counters
    assert (counters.transfers, counters.transfer_bytes, counters.transfer_failures) == (1, 2 * 3 * 4, 0)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_nothing_is_moved_when_the_first_token_is_the_last(max_tokens):
    simulation = Simulation(("prefill", "decode"))
    stops = frozenset(expected_tokens(PROMPT, 1)) if max_tokens > 1 else frozenset()
    entry = simulation.dispatcher.submit(request("a", PROMPT, max_tokens, stop_token_ids=stops))
    simulation.step(0)
    assert drain(entry) == (expected_tokens(PROMPT, 1), "stop" if stops else "length", None)
    assert not simulation.engines[1].sent


def test_abort_during_the_export_releases_the_pages_when_they_come():
    simulation = Simulation(("prefill", "decode"))
    simulation.dispatcher.submit(request("a"))
    (sequence,) = simulation.engines[0].sequences
    simulation.dispatcher.abort("a")
    simulation.engines[0].segments.add("late")
    handle = PagesHandle("late", 0, (1, 2, 3, 1, 1), "float32", 0)
    simulation.dispatcher.pages_exported(simulation.pool[0], PagesExported(sequence, [handle]))
    assert simulation.engines[0].segments == set()
    assert not simulation.engines[1].sent


def test_abort_before_the_import_releases_the_pages_and_stops_the_importer():
    simulation, _ = handed_over()
    simulation.dispatcher.abort("a")
    assert simulation.engines[0].segments == set()
    assert simulation.engines[1].sequences == {}


def test_the_exporter_dies_before_the_import():
    simulation, entry = handed_over()
    simulation.kill(0)
    for _ in range(4):
        simulation.step(1)
    assert drain(entry) == (expected_tokens(PROMPT, 5), "length", None)
    assert simulation.dispatcher.counters.transfer_failures == 1
    assert simulation.dispatcher.counters.replays == 0


def test_both_sides_die_before_the_import_and_all_is_done_again():
    simulation, entry = handed_over()
    simulation.kill(0)
    simulation.kill(1)
    simulation.revive(1)
    simulation.kill(1)
    simulation.revive(0)
    simulation.revive(1)
    (submit,) = simulation.engines[0].sequences.values()
    assert submit.pages == []
    for _ in range(4):
        simulation.step(0)
    assert drain(entry) == (expected_tokens(PROMPT, 5), "length", None)


def test_the_importer_dies_before_the_import_and_nobody_else_decodes():
    simulation, entry = handed_over()
    simulation.kill(1)
    for _ in range(4):
        simulation.step(0)
    assert drain(entry) == (expected_tokens(PROMPT, 5), "length", None)
    assert simulation.engines[0].segments == set()


def test_the_importer_dies_after_the_import():
    simulation, entry = handed_over()
    simulation.step(1)
    simulation.kill(1)
    for _ in range(3):
        simulation.step(0)
    assert drain(entry) == (expected_tokens(PROMPT, 5), "length", None)


def test_the_exporter_dies_between_its_token_and_its_pages():
    simulation = Simulation(("prefill", "decode"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 3))
    (sequence,) = simulation.engines[0].sequences
    token = expected_tokens(PROMPT, 1)
    simulation.dispatcher.step_tokens(simulation.pool[0], StepTokens(1, [sequence], token, ["exported"]))
    simulation.kill(0)
    simulation.step(1)
    simulation.step(1)
    assert drain(entry) == (expected_tokens(PROMPT, 3), "length", None)


def test_a_failed_export_is_computed_again():
    simulation = Simulation(("prefill", "decode"))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 3))
    (sequence,) = simulation.engines[0].sequences
    del simulation.engines[0].sequences[sequence]
    token = expected_tokens(PROMPT, 1)
    simulation.dispatcher.step_tokens(simulation.pool[0], StepTokens(1, [sequence], token, ["exported"]))
    simulation.dispatcher.pages_exported(simulation.pool[0], PagesExported(sequence, []))
    for engine_id in (0, 1):
        simulation.step(engine_id)
    assert drain(entry) == (expected_tokens(PROMPT, 3), "length", None)
    assert simulation.dispatcher.counters.transfer_failures == 1


def test_pages_that_nobody_asked_for_are_a_fault():
    simulation = Simulation(("both",))
    simulation.dispatcher.submit(request("a"))
    (sequence,) = simulation.engines[0].sequences
    with pytest.raises(EngineFault):
        simulation.dispatcher.pages_exported(simulation.pool[0], PagesExported(sequence, []))


# --- requests that kill engines -----------------------------------------------------------------


def run_with_poison(simulation: Simulation, poison: int, num_rounds: int = 200) -> None:
    """Step until all is over; an engine that is to compute the token id `poison` dies instead."""
    for _ in range(num_rounds):
        for engine_id, engine in enumerate(simulation.engines):
            running = sorted(engine.sequences)[:4]
            if any(poison in known_tokens(engine.sequences[s]) for s in running):
                simulation.kill(engine_id)
                simulation.revive(engine_id)
            elif running:
                simulation.step(engine_id, running)
        if simulation.dispatcher.num_requests == 0:
            return
    pytest.fail(f"{simulation.dispatcher.num_requests} requests have not ended")


@pytest.mark.parametrize("roles", [("both",), ("both", "both"), ("prefill", "decode")])
@pytest.mark.parametrize("place", [0, 5, 19])
def test_poison_is_given_up_and_its_neighbours_are_not(roles, place):
    poison = 1008
    simulation = Simulation(roles)
    prompts = [(i + 1, 1) for i in range(20)]
    prompts[place] = (poison, 1)
    entries = [simulation.dispatcher.submit(request(f"r{i}", p, 3)) for i, p in enumerate(prompts)]
    run_with_poison(simulation, poison)
    for i, entry in enumerate(entries):
        tokens, reason, error = drain(entry)
        if i == place:
            assert (tokens, reason) == ([], "error")
            assert error is not None
            assert "taken for the cause" in error
        else:
            assert (tokens, reason) == (expected_tokens(prompts[i], 3), "length")
    assert simulation.dispatcher.counters.given_up == 1


def test_a_suspect_runs_only_beside_what_has_proven_itself():
    simulation = Simulation(("both", "both"))
    suspect = simulation.dispatcher.submit(request("suspect", (9,)))
    simulation.dispatcher.submit(request("proven", (1, 1)))
    simulation.kill(0)
    simulation.revive(0)
    simulation.dispatcher.submit(request("new", (2,)))
    proven = next(s for s, submit in simulation.engines[1].sequences.items() if known_tokens(submit) == [1, 1])
    simulation.step(1, [proven])
    simulation.kill(1)

    def prompts(engine_id: int) -> list[int]:
        return [known_tokens(submit)[0] for submit in simulation.engines[engine_id].sequences.values()]

    assert suspect.is_suspect(ReplayLimits())
    assert prompts(0) == [2], "what has just come may be to blame for the next death"
    simulation.step(0)
    assert prompts(0) == [2, 9], "the suspect's turn; nobody else's until it has given a token"
    simulation.revive(1)
    assert prompts(1) == [1]
    simulation.dispatcher.submit(request("later", (3,)))
    assert prompts(0) == [2, 9]
    simulation.step(0)
    simulation.dispatcher.submit(request("last", (4,)))
    assert prompts(0) == [2, 9, 4]


def test_engines_killed_from_outside_again_and_again_cost_no_request():
    simulation = Simulation(("both",), ReplayLimits(max_fruitless=2, max_replays=16))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 15))
    for _ in range(14):
        simulation.step(0)
        simulation.kill(0)
        simulation.revive(0)
    simulation.step(0)
    assert drain(entry) == (expected_tokens(PROMPT, 15), "length", None)


def test_poison_that_lets_a_token_out_each_time_is_given_up_too():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a", PROMPT, 500))
    for _ in range(16):
        simulation.step(0)
        simulation.kill(0)
        simulation.revive(0)
    assert drain(entry)[1] == "error"
    assert simulation.dispatcher.num_requests == 0


def test_all_that_waits_ends_when_no_engine_will_come():
    simulation = Simulation(("both",))
    entry = simulation.dispatcher.submit(request("a"))
    simulation.kill(0)
    simulation.dispatcher.end_pending("no engine is left")
    assert drain(entry) == ([], "error", "no engine is left")


# --- anything, in any order ---------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    roles=st.sampled_from([("both",), ("both", "both"), ("prefill", "decode"), ("prefill", "prefill", "decode")]),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_every_request_ends_once_with_its_own_tokens(roles, seed):
    rng = random.Random(seed)
    # Deaths here come at random, also before a first token, and prove nothing against a request.
    simulation = Simulation(roles, ReplayLimits(max_fruitless=1000, max_replays=10_000))
    entries: list[tuple[Entry, tuple[int, ...], int]] = []
    aborted: set[str] = set()
    dead: set[int] = set()
    for turn in range(80):
        engine_id = rng.randrange(len(roles))
        sequences = list(simulation.engines[engine_id].sequences)
        action = rng.choices(["submit", "step", "abort", "kill", "revive"], [3, 8, 1, 1, 2])[0]
        if action == "submit":
            prompt = tuple(rng.randrange(1, 1000) for _ in range(rng.randint(1, 6)))
            max_tokens = rng.randint(1, 6)
            entries.append((simulation.dispatcher.submit(request(f"r{turn}", prompt, max_tokens)), prompt, max_tokens))
        elif action == "step" and sequences:
            simulation.step(engine_id, rng.sample(sequences, rng.randint(1, len(sequences))))
        elif action == "abort" and entries:
            victim = rng.choice(entries)[0]
            if not victim.ended:
                aborted.add(victim.request.request_id)
                simulation.dispatcher.abort_entry(victim)
        elif action == "kill" and engine_id not in dead:
            dead.add(engine_id)
            simulation.kill(engine_id)
        elif action == "revive" and engine_id in dead:
            dead.remove(engine_id)
            simulation.revive(engine_id)
    for engine_id in dead:
        simulation.revive(engine_id)
    while any(engine.sequences for engine in simulation.engines):
        for engine_id in range(len(roles)):
            simulation.step(engine_id)
    for entry, prompt, max_tokens in entries:
        tokens, reason, error = drain(entry)
        oracle = expected_tokens(prompt, max_tokens)
        if entry.request.request_id in aborted:
            assert reason == "cancelled"
            assert tokens == oracle[: len(tokens)]
        else:
            assert (tokens, reason, error) == (oracle, "length", None)
    assert simulation.dispatcher.num_requests == 0
    assert not any(engine.segments for engine in simulation.engines)
