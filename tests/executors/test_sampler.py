"""Sampling: never an empty set, ties by id, penalties over the right tokens, and nothing of a row's neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executors.sampling_cases import drawn_token, kept_tokens, make_request, sample

INF = math.inf


def draw(logits, request):
    return sample(torch.tensor([logits], dtype=torch.float32), [request])[0][0]


def drawn_set(logits, num_seeds=200, **params):
    """Every token that some seed draws."""
    requests = [make_request(seed=seed, **params) for seed in range(num_seeds)]
    return set(sample(torch.tensor([logits] * num_seeds, dtype=torch.float32), requests)[0])


def test_greedy_takes_the_smallest_id_on_ties():
    assert draw([0.0, 2.0, 2.0, 1.0], make_request()) == 1


def test_greedy_is_the_same_beside_a_row_that_draws():
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert sample(logits, [make_request(), make_request(temperature=1.0)])[0][0] == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, {0, 1}),  # three tie at the boundary: the smaller ids stay
        ({"top_k": 1, "top_p": 0.8}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 1.0}, {0, 1, 2}),
        ({"top_p": 0.9999999}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),  # top_p is of the mass that top_k leaves
    ],
)
def test_truncation_keeps_the_first_tokens_by_probability_then_id(params, expected):
    assert drawn_set([1.0, 1.0, 1.0, 0.0], temperature=1.0, **params) == expected


@pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"top_p": 0.9999999}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.1}])
def test_one_possible_token_is_drawn_whatever_the_truncation(params):
    assert drawn_set([-INF, -INF, 3.0, -INF], num_seeds=20, temperature=1.0, **params) == {2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
def test_a_vanishing_temperature_draws_the_most_probable_token(temperature):
    assert drawn_set([0.5, 80.0, 79.0], num_seeds=20, temperature=temperature) == {1}


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.01, 0.37, 0.9, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.4, 1.0]),
    seed=st.integers(-(2**65), 2**65),
    output=st.lists(st.just(0), max_size=3),
)
def test_draws_agree_with_the_obvious_sampler(logits, temperature, top_k, top_p, min_p, seed, output):
    request = make_request(seed=seed, output=output, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw(logits, request) == drawn_token([float(x) for x in logits], request)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 900, "top_p": 0.95}, {"min_p": 0.2}, {"top_p": 0.2}])
def test_a_flat_distribution_over_many_tokens_is_cut_where_it_should_be(params):
    logits = np.random.default_rng(0).normal(0, 0.3, size=3000).astype(np.float32).tolist()
    request = make_request(temperature=1.0, **params)
    kept = set(kept_tokens(logits, request.sampling))
    assert len(kept) < 3000
    drawn = drawn_set(logits, num_seeds=300, temperature=1.0, **params)
    assert drawn <= kept
    assert draw(logits, request) == drawn_token(logits, request)


def test_frequencies_follow_the_softmax():
    logits = [0.0, 1.0, -1.0, 2.0]
    requests = [make_request(seed=seed, temperature=0.7) for seed in range(8000)]
    counts = np.bincount(sample(torch.tensor([logits] * 8000), requests)[0], minlength=4)
    expected = 8000 * torch.softmax(torch.tensor(logits) / 0.7, -1).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square of 3 degrees of freedom, p = 0.001


def test_a_draw_does_not_depend_on_the_rows_around_it():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(150, 700)).astype(np.float32))
    kinds = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}, {"temperature": 0.0}, {"logprobs": 2}]
    requests = [make_request(seed=i, **{"temperature": 1.0, **kinds[i % len(kinds)]}) for i in range(150)]
    alone = [sample(logits[i : i + 1].clone(), [requests[i]])[0][0] for i in range(150)]
    assert sample(logits.clone(), requests)[0] == alone


def test_the_same_seed_draws_anew_at_every_position():
    logits = [0.0] * 50
    drawn = [draw(logits, make_request(seed=5, output=[0] * length, temperature=1.0)) for length in range(30)]
    assert len(set(drawn)) > 15


def test_repetition_penalty_looks_at_prompt_and_output():
    logits = [1.0, 1.5, 1.9, 2.0]
    assert draw(logits, make_request(prompt=[3], output=[2], repetition_penalty=2.0)) == 1


def test_repetition_penalty_makes_negative_logits_smaller():
    assert draw([-1.0, -1.5], make_request(prompt=[0], repetition_penalty=2.0)) == 1


@pytest.mark.parametrize("penalty", [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}])
def test_presence_and_frequency_penalties_leave_prompt_words_alone(penalty):
    logits = [1.0, 1.6, 2.0]
    assert draw(logits, make_request(prompt=[2, 2], **penalty)) == 2
    assert draw(logits, make_request(prompt=[2, 2], output=[2], **penalty)) == 1


def test_frequency_counts_occurrences_and_presence_does_not():
    logits = [1.0, 2.0]
    assert draw(logits, make_request(output=[1, 1, 1], presence_penalty=0.9)) == 1
    assert draw(logits, make_request(output=[1, 1, 1], frequency_penalty=0.4)) == 0


def test_logit_bias_is_added_before_anything_is_chosen():
    assert draw([0.0, 1.0, 2.0], make_request(logit_bias={0: 5.0, 2: -100.0})) == 0


def test_stop_tokens_are_impossible_before_min_tokens():
    logits = [0.0, 5.0, 4.0]
    assert draw(logits, make_request(output=[0], stop=[1, 2], min_tokens=2)) == 0
    assert draw(logits, make_request(output=[0, 0], stop=[1, 2], min_tokens=2)) == 1


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 1}])
def test_logits_that_are_no_numbers_name_the_request(bad, params):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    with pytest.raises(ValueError, match=r"'asked'.*(NaN|inf)"):
        sample(logits, [make_request(**params) for _ in range(3)])


def test_a_vocabulary_of_stop_tokens_alone_is_an_error_that_names_the_request():
    with pytest.raises(ValueError, match="'asked': no token is left"):
        draw([0.0, 1.0], make_request(stop=[0, 1], min_tokens=1))


def test_logprobs_are_of_the_models_own_distribution():
    logits = [0.0, 1.0, 3.0, 2.0]
    request = make_request(logprobs=2, temperature=0.5, top_k=1, logit_bias={0: 50.0}, repetition_penalty=1.5)
    entry = sample(torch.tensor([logits]), [request])[1][0]
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()
    assert (entry.token_id, entry.rank) == (0, 4)
    assert entry.logprob == pytest.approx(expected[0], abs=1e-6)  # float32, as the op gives it
    assert [token for token, _ in entry.top] == [2, 3]
    assert [value for _, value in entry.top] == pytest.approx([expected[2], expected[3]], abs=1e-6)
