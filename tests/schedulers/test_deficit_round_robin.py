"""deficit_round_robin: turns of equal worth, whatever the clients' requests are like."""

from __future__ import annotations

import pytest

from schedulers.deficit_round_robin import DeficitRoundRobin
from tests.engine.shadow import drain, greedy, make_engine

from .test_vtc import backlogged


def test_a_turn_is_worth_one_quantum():
    """Requests of 10 against 5 (prompt 8 or 3, one output at 2), a quantum of 20: two against four a round."""
    engine = make_engine(DeficitRoundRobin(quantum=20.0), max_num_seqs=1)
    for i in range(4):
        engine.add_request(f"a{i}", range(100 * i, 100 * i + 8), greedy(1), client="a")
    for i in range(8):
        engine.add_request(f"b{i}", range(1000 * i, 1000 * i + 3), greedy(1), client="b")
    drain(engine)
    order = "".join(r.request_id[0] for r in engine.records.requests)
    assert order == "aabbbbaabbbb"


@pytest.mark.parametrize("seed", range(8))
def test_clients_with_unlike_requests_get_equal_service(seed):
    """Backlogged all the time, they never part by more than two quanta and what the cache can draw."""
    quantum = 32.0
    for own, other, longest, slots in backlogged(DeficitRoundRobin(quantum=quantum), seed):
        assert abs(own - other) <= 2 * (quantum + longest + 2 * slots)
    assert min(own, other) > 300


def test_an_answer_longer_than_a_quantum_is_paid_off_before_the_next_turn():
    """One answer of 10 tokens (22 with its prompt of 2) against ten small requests of 4: debts are real."""
    engine = make_engine(DeficitRoundRobin(quantum=4.0), max_num_seqs=1)
    for i in range(2):
        engine.add_request(f"long {i}", [100 * i, 1], greedy(10), client="long")
    for i in range(10):
        engine.add_request(f"small {i}", [1000 * i, 2], greedy(1), client="small")
    drain(engine)
    order = [r.request_id.split()[0] for r in engine.records.requests]
    assert order[0] == "long" and order.index("long", 1) in (5, 6, 7)


def test_a_client_with_nothing_waiting_keeps_its_debt_and_no_credit():
    policy = DeficitRoundRobin(quantum=100.0)
    engine = make_engine(policy, num_blocks=32)
    engine.add_request("thrifty", [1], greedy(1), client="thrifty")
    engine.step()
    assert policy.deficits["thrifty"] == 0.0 and not policy.ring
    engine.add_request("spender", range(20), greedy(60), client="spender", arrival_time=0.0)
    drain(engine)
    assert policy.deficits["spender"] == -2.0 * 60 + 2.0, (
        "the quantum paid the prompt and the first token; then it lapsed"
    )


@pytest.mark.parametrize(("field", "value"), [("quantum", 0), ("weight_input", -1), ("weight_output", -1)])
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value}: must be"):
        DeficitRoundRobin(**{field: value})
