import pytest
import torch
from torch import Tensor

from keepstep.core.errors import UsageError
from keepstep.evaluate.generate import chooser, generate


def counting(tokens_bt: Tensor) -> Tensor:
    """A model that is sure the next token is the last one plus one."""
    logits = torch.zeros(1, 10)
    logits[0, (int(tokens_bt[0, -1]) + 1) % 10] = 9.0
    return logits


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    assert generate(counting, [1, 2], max_new_tokens=4, temperature=0) == [3, 4, 5, 6]


def test_generation_ends_before_the_end_token() -> None:
    assert generate(counting, [1], max_new_tokens=100, temperature=0, eos=5) == [2, 3, 4]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    def flat(tokens_bt: Tensor) -> Tensor:
        return torch.zeros(1000)

    once = generate(flat, [0], max_new_tokens=20, seed=5)
    assert once == generate(flat, [0], max_new_tokens=20, seed=5)
    assert once != generate(flat, [0], max_new_tokens=20, seed=6)


@pytest.mark.slow
def test_top_p_leaves_the_tail_out_and_keeps_the_shares_of_the_rest() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    choose = chooser(top_p=0.7, seed=1)
    drawn = [choose(logits) for _ in range(4000)]
    assert set(drawn) == {0, 1}
    assert drawn.count(0) / 4000 == pytest.approx(0.5 / 0.8, abs=0.03)


def test_a_tiny_top_p_is_greedy() -> None:
    choose = chooser(top_p=1e-9, seed=1)
    assert {choose(torch.tensor([0.1, 0.3, 0.2])) for _ in range(20)} == {1}


@pytest.mark.slow
def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0])
    cold, warm = chooser(0.25, seed=3), chooser(1.0, seed=3)
    assert sum(cold(logits) for _ in range(2000)) < sum(warm(logits) for _ in range(2000)) / 4


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        generate(counting, [1], **bad)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        generate(counting, [])


def test_no_gradients_are_recorded() -> None:
    weight = torch.ones(5, requires_grad=True)
    seen: list[bool] = []

    def forward(tokens_bt: Tensor) -> Tensor:
        logits = weight * 2
        seen.append(logits.requires_grad)
        return logits

    generate(forward, [1], max_new_tokens=2)
    assert seen == [False, False]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    logits = torch.tensor([0.5, 3.0, -1.0, float("-inf")])
    assert {chooser(temperature, seed=seed)(logits) for seed in range(20)} == {1}


def test_numbers_that_choose_nothing_are_refused() -> None:
    for settings in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": float("nan")}):
        with pytest.raises(UsageError):
            chooser(**settings)
    with pytest.raises(UsageError, match="seed is"):
        chooser(seed=1 << 70)
