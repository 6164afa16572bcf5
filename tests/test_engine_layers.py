"""The long-context walk against the oracle, in float64: scores and every LoRA gradient."""

from __future__ import annotations

import pytest
import torch
from engine_models import ARCHITECTURES, lora_gradients, relative_error, tiny_model
from torch.utils.checkpoint import checkpoint

from engine import reference, segments
from engine.attention import BACKENDS
from engine.block_attention import block_backends
from engine.layer_forward import LayerForward
from engine.layers import LongContextScorer
from engine.offload import Kept, Transfers
from engine.plan import POLICIES, LayerPlan, MemoryPlan, uniform_plan
from schemas.errors import UserError

N_TOKENS = 23
TOLERANCE = 1e-9  # measured: below 3e-14


def scorer_with(policy: str = "attention_offload", tile: int = 7, groups: int = 2, chunk: int = 3) -> LongContextScorer:
    plan = uniform_plan(policy, 3, tile_tokens=tile, head_groups=groups)  # type: ignore[arg-type]
    return LongContextScorer(lambda _: plan, chunk_positions=chunk)


def one_row(positions: list[int], n_tokens: int = N_TOKENS) -> tuple[torch.Tensor, ...]:
    ids_BT = torch.randint(0, 89, (1, n_tokens), generator=torch.Generator().manual_seed(1))
    positions_P = torch.tensor(positions)
    return ids_BT, torch.ones_like(ids_BT), torch.zeros_like(positions_P), positions_P


def assert_equal(model, scorer, batch, upstream: torch.Tensor | float = 1.0) -> None:
    want_P = reference.token_logprobs(model, *batch)
    (want_P * upstream).sum().backward()
    want = lora_gradients(model)
    got_P = scorer(model, *batch)
    (got_P * upstream).sum().backward()
    got = lora_gradients(model)
    assert relative_error(got_P, want_P) < TOLERANCE
    assert got.keys() == want.keys()
    largest = max(float(grad.norm()) for grad in want.values())
    for name, grad in want.items():
        if float(grad.norm()) > 1e-9 * largest:
            assert relative_error(got[name], grad) < TOLERANCE, name
        else:  # token 0 attends to itself alone: its query has no gradient
            assert float(got[name].norm()) < 1e-9 * largest, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_architecture(architecture: str, policy: str) -> None:
    assert_equal(tiny_model(architecture), scorer_with(policy), one_row([1, 4, 5, 6, 15, 22]))


@pytest.mark.parametrize("tile", [1, 7, N_TOKENS, 1000])
@pytest.mark.parametrize("chunk", [1, 7, N_TOKENS, 1000])
def test_tile_and_chunk_sizes(tile: int, chunk: int) -> None:
    assert_equal(tiny_model(), scorer_with(tile=tile, chunk=chunk), one_row(list(range(1, N_TOKENS))))


@pytest.mark.parametrize("positions", [[1], [N_TOKENS - 1], [1, N_TOKENS - 1], [5, 5, 9], [9, 2, 20]])
@pytest.mark.parametrize("groups", [1, 2])
def test_positions(positions: list[int], groups: int) -> None:
    """One scored token, the first scorable one, the last, a repeated one, unordered ones."""
    assert_equal(tiny_model(), scorer_with(groups=groups), one_row(positions))


@pytest.mark.parametrize("upstream", [3.0, torch.randn(4, dtype=torch.float64), torch.tensor([0.0, 0, 0, -2e-6])])
def test_upstream_gradients(upstream) -> None:
    assert_equal(tiny_model(), scorer_with(), one_row([1, 4, 15, 22]), upstream)


@pytest.mark.parametrize("n_tokens", [2, 3, 14, 15])
def test_odd_lengths(n_tokens: int) -> None:
    assert_equal(tiny_model(), scorer_with(), one_row([1, n_tokens - 1], n_tokens))


def restored_plan(tile: int = 7, groups: int = 2) -> MemoryPlan:
    """Five layers: inputs of layers 1, 2 and 4 are dropped and restored, layers 1, 2 and 4 compute attention twice."""
    full = LayerPlan(input="host", attention="host")
    layers = (full, LayerPlan(), LayerPlan(mid="host", gate_up="device"), full, LayerPlan(qkv="host"))
    return MemoryPlan(policy="auto", layers=layers, tile_tokens=tile, head_groups=groups)


def test_dropped_inputs_are_restored() -> None:
    plan = restored_plan()
    assert (plan.scratch_inputs, plan.scratch_attention) == (2, 2)
    assert_equal(tiny_model(num_hidden_layers=5), LongContextScorer(lambda _: plan), one_row([1, 9, 22]))


def test_a_plan_that_cannot_be_restored_is_refused() -> None:
    with pytest.raises(ValueError, match="first layer must keep"):
        MemoryPlan(policy="auto", layers=(LayerPlan(attention="host"),), tile_tokens=7, head_groups=1)


def test_accumulation_over_branches_equals_one_batch() -> None:
    """Four backwards of one branch each leave the gradient of one backward over all four (1x4 = 4x1)."""
    model, scorer = tiny_model(), scorer_with()
    ids_BT = torch.randint(0, 89, (4, 17), generator=torch.Generator().manual_seed(3))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0  # left padding
    mask_BT[2, 12:] = 0  # right padding
    rows_P, positions_P = torch.tensor([3, 0, 1, 2, 0]), torch.tensor([4, 16, 7, 11, 1])
    reference.token_logprobs(model, ids_BT, mask_BT, rows_P, positions_P).sum().backward()
    want = lora_gradients(model)
    scorer(model, ids_BT, mask_BT, rows_P, positions_P).sum().backward()
    together = lora_gradients(model)
    for row in range(4):
        mine = rows_P == row
        scorer(model, ids_BT, mask_BT, rows_P[mine], positions_P[mine]).sum().backward()
    one_by_one = lora_gradients(model)
    for name in want:
        assert relative_error(together[name], want[name]) < TOLERANCE, name
        assert relative_error(one_by_one[name], want[name]) < TOLERANCE, name


def test_two_branches_before_one_backward() -> None:
    """A pairwise loss: both scores have a graph at once, so the second must not overwrite what the first keeps."""
    model, scorer = tiny_model(), scorer_with()
    first, second = one_row([3, 8]), one_row([5, 20])
    second[0].copy_(second[0].flip(1))

    def loss(score) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(score(model, *first).mean() - score(model, *second).mean())

    loss(reference.token_logprobs).backward()
    want = lora_gradients(model)
    loss(scorer).backward()
    for name, grad in lora_gradients(model).items():
        assert relative_error(grad, want[name]) < TOLERANCE, name


def test_the_first_token_changes_the_last_score() -> None:
    model, scorer = tiny_model(), scorer_with()
    ids_BT, *rest = one_row([N_TOKENS - 1])
    other_BT = ids_BT.clone()
    other_BT[0, 0] = (ids_BT[0, 0] + 1) % 89
    with torch.no_grad():
        assert abs(float(scorer(model, ids_BT, *rest)) - float(scorer(model, other_BT, *rest))) > 1e-6


def test_without_gradients_and_with_the_adapter_off() -> None:
    """A reference model is the same model with its adapter off."""
    model, scorer, batch = tiny_model("qwen2"), scorer_with(), one_row([2, 22])
    with torch.no_grad(), model.disable_adapter():
        off_P, want_P = scorer(model, *batch), reference.token_logprobs(model, *batch)
        assert not off_P.requires_grad
        assert relative_error(off_P, want_P) < TOLERANCE
    with torch.no_grad():
        assert relative_error(scorer(model, *batch), want_P) > 1e-3


def test_backward_twice_is_refused() -> None:
    model, scorer = tiny_model(), scorer_with()
    total = scorer(model, *one_row([4])).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        total.backward()


@pytest.mark.parametrize("part", ["dropout", "norm", "window", "family"])
def test_models_the_walk_does_not_compute_are_refused(part: str) -> None:
    if part == "dropout":
        model = tiny_model()
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.1)
    elif part == "norm":
        model = tiny_model()
        model.get_base_model().model.norm.weight.requires_grad_(True)
    elif part == "window":
        model = tiny_model("mistral", sliding_window=8)
    else:
        model = tiny_model("gemma2")
    with pytest.raises(UserError):
        scorer_with()(model, *one_row([4]))


def test_recomputing_a_norm_is_exact() -> None:
    """The claim 'checkpointing a norm layer makes training diverge' is false: its recomputation is bit-identical.

    Checked bit by bit in bfloat16, through torch.utils.checkpoint and through the walk's own recomputation.
    """
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    norm = torch.nn.RMSNorm(96, eps=1e-6).bfloat16()
    results = []
    for run in (norm, lambda y: checkpoint(norm, y, use_reentrant=False)):
        norm.weight.grad = x.grad = None
        out = run(x)
        out.float().square().sum().backward()
        assert x.grad is not None
        assert norm.weight.grad is not None
        results.append((out.detach(), x.grad.clone(), norm.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    model, gradients = tiny_model(dtype=torch.bfloat16), []
    for policy in ("none", "layer", "layer_offload"):
        scorer_with(policy)(model, *one_row([1, 9, 22])).sum().backward()
        gradients.append(lora_gradients(model))
    for name, kept in gradients[0].items():
        assert all(torch.equal(kept, other[name]) for other in gradients[1:]), name


def test_gate_up_goes_to_the_host_in_as_many_pieces_as_layers_follow() -> None:
    """Until the next layer whose gate|up goes there, or the last layer, has run; every row once."""
    on_host = (True, False, False, True, False)
    layers = tuple(LayerPlan(input="host", gate_up="host" if there else "recompute") for there in on_host)
    plan = MemoryPlan(policy="auto", layers=layers, tile_tokens=7, head_groups=1)
    decoder, transfers = tiny_model(num_hidden_layers=5).get_base_model().model, Transfers(torch.device("cpu"))
    walk = LayerForward(decoder, plan, segments.one_row(N_TOKENS), transfers, block_backends(BACKENDS["math"]))
    gate_up = Kept(torch.zeros(N_TOKENS, 4))
    for index, n_pieces in ((0, 3), (3, 1), (4, 1)):
        walk._index = index
        spans = [span for _, span in walk._gate_up_pieces(gate_up)]
        assert len(spans) == n_pieces
        assert [row for span in spans for row in range(span.start, span.stop)] == list(range(N_TOKENS))


def test_a_dropped_graph_frees_the_host_buffer() -> None:
    """A step that failed, or a score nobody differentiated, must not make the next branch pin another buffer."""
    model, scorer = tiny_model(), scorer_with()
    for _ in range(3):
        logp_P = scorer(model, *one_row([4]))
        del logp_P
    assert len(scorer._pools) == 1
