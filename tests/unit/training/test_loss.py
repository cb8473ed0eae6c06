"""Chunked cross-entropy against plain autograd in fp64."""

import pytest
import torch

from raycp.training.loss import ChunkedCrossEntropy, chunked_cross_entropy

N, HIDDEN, VOCAB = 37, 16, 101


def make(n=N, dtype=torch.float32, weighted=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, HIDDEN, generator=g).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (n,), generator=g)
    weights = torch.rand(n, generator=g) if weighted else None
    return hidden, head, targets, weights


def reference(hidden, head, targets, weights, scale, logit_scale):
    h, w = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    nll = torch.nn.functional.cross_entropy(h @ w.t() * logit_scale, targets, reduction="none")
    loss = (nll * (1.0 if weights is None else weights.double())).sum() * scale
    loss.backward()
    return loss.detach(), h.grad, w.grad


def error(x, ref):
    return float((x.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize("chunk", [1, 7, 37, 1000])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_loss_and_gradients_equal_autograd(chunk, weighted, logit_scale):
    hidden, head, targets, weights = make(weighted=weighted)
    loss = chunked_cross_entropy(hidden, head, targets, weights, chunk=chunk, scale=0.3, logit_scale=logit_scale)
    (2.0 * loss).backward()
    want, d_hidden, d_head = reference(hidden, head, targets, weights, 0.6, logit_scale)
    assert 2 * loss.item() == pytest.approx(float(want), rel=1e-6)
    assert error(hidden.grad, d_hidden) < 1e-6
    assert error(head.grad, d_head) < 1e-6


def test_planted_fault_a_wrong_scale_is_seen():
    hidden, head, targets, weights = make()
    chunked_cross_entropy(hidden, head, targets, weights, chunk=8, scale=1.0).backward()
    _, d_hidden, d_head = reference(hidden, head, targets, weights, 2.0, 1.0)
    assert error(hidden.grad, d_hidden) > 0.4
    assert error(head.grad, d_head) > 0.4


def test_bf16_is_close_and_keeps_its_dtype():
    hidden, head, targets, weights = make(dtype=torch.bfloat16)
    loss = chunked_cross_entropy(hidden, head, targets, weights, chunk=8, scale=0.1)
    loss.backward()
    want, d_hidden, d_head = reference(hidden, head, targets, weights, 0.1, 1.0)
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(float(want), rel=1e-2)
    assert error(hidden.grad, d_hidden) < 2e-2
    assert error(head.grad, d_head) < 2e-2


def test_no_target_gives_zero_and_a_connected_graph():
    hidden, head, targets, weights = make(n=0)
    loss = chunked_cross_entropy(hidden, head, targets, weights, chunk=8, scale=1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.shape == (0, HIDDEN)
    assert torch.equal(head.grad, torch.zeros(VOCAB, HIDDEN))


def test_logits_of_1e4_stay_finite():
    hidden, head, targets, _ = make()
    loss = chunked_cross_entropy(hidden * 1e4, head, targets, None, chunk=8, scale=1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(head.grad).all()


def test_without_gradients_no_buffer_of_the_head_is_made():
    hidden, head, targets, weights = make()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, head, targets, weights, chunk=8, scale=1.0)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(float(reference(hidden, head, targets, weights, 1.0, 1.0)[0]), rel=1e-6)


def test_backward_twice_is_refused():
    hidden, head, targets, weights = make()
    loss = chunked_cross_entropy(hidden, head, targets, weights, chunk=8, scale=1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    assert issubclass(ChunkedCrossEntropy, torch.autograd.Function)
