"""Schedule, decay groups and clipping on one process."""

import itertools
import math

import pytest
import torch
from torch import nn

from raycp.config import OptimConfig
from raycp.errors import ConfigError
from raycp.training.optim import build_optimizer, clip_by_global_norm, learning_rate, set_learning_rate


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_to_the_peak_and_then_never_rises(schedule):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(s, 50, config) for s in range(1, 51)]
    assert all(a < b for a, b in itertools.pairwise(rates[:11]))
    assert rates[10] == pytest.approx(2.0)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert min(rates) > 0.0
    assert rates[-1] >= 0.1 * 2.0 or schedule == "constant"


def test_cosine_in_the_middle_and_at_the_ends():
    config = OptimConfig(lr=1.0, schedule="cosine", warmup=0.0)
    assert learning_rate(1, 100, config) == 1.0
    assert learning_rate(51, 100, config) == pytest.approx(0.5)
    assert learning_rate(100, 100, config) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))
    assert learning_rate(1, 1, config) == 1.0


def test_warm_up_in_steps_and_longer_than_the_run():
    config = OptimConfig(lr=1.0, warmup=10)
    assert [learning_rate(s, 3, config) for s in (1, 2, 3)] == pytest.approx([1 / 11, 2 / 11, 3 / 11])


def test_a_step_outside_the_run_is_refused():
    for step in (0, 4):
        with pytest.raises(ValueError, match="is not in"):
            learning_rate(step, 3, OptimConfig())
    with pytest.raises(ConfigError, match="schedule"):
        learning_rate(2, 3, OptimConfig(schedule="steps"))


def test_only_matrices_decay():
    module = model()
    optimizer = build_optimizer(module, OptimConfig(weight_decay=0.1))
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(module[0].weight), id(module[2].weight)}


@pytest.mark.parametrize("config", [OptimConfig(lr=1e-2), OptimConfig(name="sgd", lr=1e-2, momentum=0.9)])
def test_state_made_at_the_start_steps_as_torch_does(config):
    ours, theirs = model(), model()
    optimizer = build_optimizer(ours, config)
    plain = (
        torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.0)
        if config.name == "adamw"
        else torch.optim.SGD(theirs.parameters(), lr=1e-2, momentum=0.9)
    )
    for i in range(3):
        for module, stepper in ((ours, optimizer), (theirs, plain)):
            stepper.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(i))
            module(x).square().sum().backward()
            stepper.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_learning_rate_reaches_every_group():
    optimizer = build_optimizer(model(), OptimConfig(name="sgd", lr=1.0))
    set_learning_rate(optimizer, 0.25)
    assert {g["lr"] for g in optimizer.param_groups} == {0.25}


def test_clipping_equals_torch_and_returns_the_norm_before():
    ours, theirs = model(), model()
    for module in (ours, theirs):
        module(torch.ones(2, 8) * 3).square().sum().backward()
    norm = clip_by_global_norm(ours, 0.5)
    want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert norm == pytest.approx(float(want), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-8)


def test_a_gradient_that_is_not_finite_is_reported_and_left_alone():
    module = model()
    module(torch.ones(2, 8)).sum().backward()
    module[0].weight.grad[0, 0] = float("inf")
    before = module[2].weight.grad.clone()
    assert math.isinf(clip_by_global_norm(module, 1.0))
    assert torch.equal(module[2].weight.grad, before)


def test_no_limit_only_measures():
    module = model()
    module(torch.ones(2, 8)).sum().backward()
    before = module[0].weight.grad.clone()
    assert clip_by_global_norm(module, None) > 0
    assert torch.equal(module[0].weight.grad, before)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="adamw or sgd"):
        build_optimizer(model(), OptimConfig(name="lion"))
