"""What steps cost by their rows, learned from the steps that were run."""

from __future__ import annotations

import random

import pytest

from executor.speculation import StepCost


def learned(
    rows_of_fixed_cost: float, *, num_steps: int = 600, noise: float = 0.3, sizes: tuple[int, ...] = ()
) -> float:
    generator = random.Random(1)
    step_cost = StepCost()
    for _ in range(num_steps):
        num_rows = generator.choice(sizes or (1, 1, 1, 2, 5, 8, 16))
        seconds = (rows_of_fixed_cost + num_rows) * 1e-3 * (1 + noise * generator.random())
        held_up = 8 if generator.random() < 0.02 else 1
        step_cost.learn(num_rows, seconds * held_up)
    return step_cost.rows_of_fixed_cost


@pytest.mark.parametrize("rows_of_fixed_cost", [8, 16, 40])
def test_the_fixed_cost_is_found_in_noisy_times(rows_of_fixed_cost: int) -> None:
    assert learned(rows_of_fixed_cost) == pytest.approx(rows_of_fixed_cost, rel=0.15)


def test_on_a_device_where_rows_cost_next_to_nothing_drafts_do_neither() -> None:
    assert learned(1000) > 100


def test_steps_of_one_size_leave_the_guess_as_it_is() -> None:
    assert learned(100, sizes=(1,), noise=0.0) == pytest.approx(StepCost().rows_of_fixed_cost)


def test_a_step_costs_the_rows_that_it_is_padded_to() -> None:
    step_cost = StepCost(lambda num_rows: -(-num_rows // 8) * 8, rows_of_fixed_cost=10)
    assert [step_cost(num_rows) for num_rows in (1, 8, 9)] == [18, 18, 26]


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e3])
def test_absurd_times_leave_an_estimate_within_bounds(seconds: float) -> None:
    step_cost = StepCost()
    for num_rows in (1, 5, 1, 16, 2):
        step_cost.learn(num_rows, seconds if num_rows > 1 else 0.01)
        assert 4 <= step_cost.rows_of_fixed_cost <= 512


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_more_rows_than_in_the_step_before_cost_what_such_steps_were_seen_to_cost(noise: float) -> None:
    generator = random.Random(2)
    step_cost = StepCost()
    before = 1
    for _ in range(400):
        num_rows = generator.choice((1, 1, 1, 4, 4, 8, before, before, before))
        rows = 16 + num_rows + (8 if num_rows != before else 0)
        step_cost.learn(num_rows, rows * 1e-3 * (1 + noise * generator.random()))
        before = num_rows
    step_cost.learn(4, 0.02)
    same, more = step_cost(4), step_cost(8) - 4
    assert more - same == pytest.approx(2 * 8, rel=0.5)  # there and back


def test_where_changing_the_number_of_rows_costs_nothing_the_first_guess_is_forgotten() -> None:
    step_cost = StepCost()
    for num_rows in (1, 4, 4, 1) * 40:
        step_cost.learn(num_rows, (16 + num_rows) * 1e-3)
    assert step_cost.rows_of_change == pytest.approx(0, abs=0.5)
