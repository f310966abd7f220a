"""Which tests are run, and what they need."""

import pytest

from tests.bench.made_up import engine_config
from tests.bench.watched import Watched, run_tests
from twinjet.bench.suite import BenchTest, check_room, choose_tests
from twinjet.core.errors import ConfigError


def test_every_length_meets_every_concurrency_once():
    tests = choose_tests([16, 512, 16], [128], [2, 1, 2])
    assert [(test.name, test.concurrency) for test in tests] == [
        ("pp 16", 2),
        ("pp 16", 1),
        ("pp 512", 2),
        ("pp 512", 1),
        ("tg 128", 2),
        ("tg 128", 1),
    ]


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ConfigError, match="-p or -g"):
        choose_tests([], [], [1])


def test_the_context_holds_what_the_engine_gives_as_well():
    # The token that follows the prompt; a prompt of one, the token from it, and 128 decoded.
    assert BenchTest("pp", 512, 4).context == 513
    assert BenchTest("tg", 128, 4).context == 130


def test_decoding_streams_must_fit_the_pool_together():
    config = engine_config(context=64, num_pages=7)
    check_room([BenchTest("tg", 30, 3), BenchTest("pp", 63, 100)], config)
    with pytest.raises(ConfigError, match=r"tg 31 of 3 streams needs a KV pool of 144 tokens, and it holds 112"):
        check_room([BenchTest("tg", 31, 3)], config)


def test_room_that_passes_is_room_enough():
    """Short streams, whose first pages are their last, run at once in the smallest pool that is let through."""
    config = engine_config(num_pages=8, max_streams=4)
    test = BenchTest("tg", 4, 4)
    check_room([test], config)
    (result,) = run_tests(Watched(config), test, repetitions=1)[0]
    assert result.samples[0].num_tokens == 16
    with pytest.raises(ConfigError, match="raise --kv-memory"):
        check_room([test], engine_config(num_pages=7, max_streams=4))


def test_a_warm_up_is_the_same_in_small():
    assert BenchTest("pp", 512, 4).warm_up() == BenchTest("pp", 16, 4)
    assert BenchTest("pp", 16, 1).warm_up() == BenchTest("pp", 16, 1)
    assert BenchTest("pp", 16, 100).warm_up() == BenchTest("pp", 1, 100)
    assert BenchTest("tg", 128, 4).warm_up() == BenchTest("tg", 4, 4)
    assert BenchTest("tg", 2, 4).warm_up() == BenchTest("tg", 2, 4)
