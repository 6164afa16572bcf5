"""Blocks of attention: the last layer at scored positions only, packed rows, pairs behind a common prefix; float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from engine_models import ARCHITECTURES, lora_gradients, relative_error, tiny_model
from test_engine_layers import N_TOKENS, TOLERANCE, assert_equal, one_row, restored_plan

from engine import block_attention, reference, segments
from engine.attention import BACKENDS
from engine.block_attention import block_backends
from engine.data import Branch
from engine.layers import LongContextScorer, packs
from engine.plan import POLICIES, uniform_plan
from engine.segments import KeyBlock, Layout, all_queries, packed_rows, query_windows, scored_queries, shared_prefix
from engine.shared_prefix import common_prefix, shared_prefix_logprobs

MATH = block_backends(BACKENDS["math"])
SCATTERED = [1, 2, 9, 21, 22]


def scorer_with(policy: str = "attention_offload", tile: int = 7, groups: int = 2, **options: int) -> LongContextScorer:
    plan = uniform_plan(policy, 3, tile_tokens=tile, head_groups=groups)  # type: ignore[arg-type]
    return LongContextScorer(lambda _: plan, chunk_positions=3, **options)  # type: ignore[arg-type]


def visible(layout: Layout) -> torch.Tensor:
    """mask_TT, true where a query (row) sees a key, by the definition of a segment."""
    mask_TT = torch.zeros(layout.n_tokens, layout.n_tokens, dtype=torch.bool)
    for segment in layout.segments:
        for row in range(segment.start, segment.stop):
            mask_TT[row, segment.start : row + 1] = True
            for start, stop in segment.sees:
                mask_TT[row, start:stop] = True
    return mask_TT


LAYOUTS = {
    "one row": segments.one_row(19),
    "packed": packed_rows([5, 1, 9, 4]),
    "shared prefix": shared_prefix(8, 13, 14),
    "prefix alone": shared_prefix(8, 8, 19),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("rows", [None, [0], [18], [3, 4, 11, 17], [2, 7, 8, 12, 13, 14]])
def test_blocks_equal_attention_under_a_mask(layout: Layout, rows: list[int] | None) -> None:
    """Output and dq, dk, dv of masked softmax attention by autograd, upstream gradients only where rows are wanted."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(19, n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    scores = torch.einsum("ihe,jhe->hij", q, k.repeat_interleave(2, 1)) * 0.4
    scores = scores.masked_fill(~visible(layout), -torch.inf)
    want = torch.einsum("hij,jhe->ihe", scores.softmax(-1), v.repeat_interleave(2, 1))
    queries = all_queries(layout) if rows is None else scored_queries(layout, rows, 0)
    starts = [(0, 19)] if queries.windows is None else queries.windows
    picked = torch.cat([torch.arange(*window) for window in starts])
    assert queries.n_rows == len(picked)
    upstream = torch.randn(len(picked), 4, 6, dtype=torch.float64)
    grads = torch.autograd.grad(want[picked], (q, k, v), upstream)
    with torch.no_grad():
        out, lse = block_attention.forward(MATH, queries, q, k, v, 0.4)
        got = block_attention.backward(MATH, queries, upstream, q, k, v, out, lse, 0.4)
    assert relative_error(out, want[picked]) < 1e-13
    assert relative_error(lse, scores.logsumexp(-1)[:, picked]) < 1e-13
    assert relative_error(torch.cat([x.flatten() for x in got]), torch.cat([x.flatten() for x in grads])) < 1e-13


def test_windows() -> None:
    layout = packed_rows([10, 10])
    assert query_windows(layout, [3, 3, 4, 7], 1) == [(3, 5), (7, 8)]
    assert query_windows(layout, [7, 4, 3], 2) == [(3, 8)]
    assert query_windows(layout, [9, 10, 19], 50) == [(9, 10), (10, 20)]  # a window ends with its row
    assert scored_queries(layout, [3], 1).windows == ((3, 4),)
    assert scored_queries(layout, range(11), 1).windows is None  # more than half
    window = scored_queries(shared_prefix(4, 8, 10), [9, 10], 1).blocks[0]
    assert window.keys == (KeyBlock(0, 4, False), KeyBlock(8, 9, False), KeyBlock(9, 11, True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", POLICIES)
def test_last_layer_at_scored_positions(architecture: str, policy: str) -> None:
    """Windows {0-2}, {8}, {20-21} of 23 tokens; every policy keeps fewer rows of the last layer."""
    assert_equal(tiny_model(architecture), scorer_with(policy, gap_tokens=1), one_row(SCATTERED))


@pytest.mark.parametrize("tile", [1, 7, N_TOKENS, 1000])
@pytest.mark.parametrize("gap", [0, 1, 7])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_windows_and_tiles(tile: int, gap: int, upstream: float) -> None:
    positions = [2, 3, 5, 6, 14, 2]  # with 0: windows of 2, 2 and 1 rows, a repeated position
    assert_equal(tiny_model(), scorer_with(tile=tile, gap_tokens=gap), one_row(positions), upstream)


@pytest.mark.parametrize("positions", [[1], [N_TOKENS - 1], [9]])
@pytest.mark.parametrize("groups", [1, 2])
def test_one_scored_position(positions: list[int], groups: int) -> None:
    assert_equal(tiny_model(), scorer_with(groups=groups, gap_tokens=0), one_row(positions))


def test_restored_inputs_with_windows() -> None:
    plan = restored_plan()
    scorer = LongContextScorer(lambda _: plan, gap_tokens=1)
    assert_equal(tiny_model(num_hidden_layers=5), scorer, one_row([2, 9, 22]))


def batch_of(lengths: list[int], seed: int = 3) -> tuple[torch.Tensor, ...]:
    """Right-padded rows; scored: the first scorable, a middle and the last token of each, rows mixed up."""
    ids_BT = torch.randint(0, 89, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    scored = [(row, position) for row, n in enumerate(lengths) for position in {1, (n + 1) // 2, n - 1}]
    order = torch.randperm(len(scored), generator=torch.Generator().manual_seed(seed)).tolist()
    rows_P, positions_P = torch.tensor([scored[i] for i in order]).t()
    return ids_BT, mask_BT, rows_P, positions_P


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tile", [1, 7, 24, 1000])
def test_packed_rows_equal_the_oracle(architecture: str, tile: int) -> None:
    """Four rows of 24 tokens in all in one walk; the oracle takes one row at a time."""
    for gap, upstream in ((0, 1.0), (128, 3.0)):
        scorer = scorer_with(tile=tile, gap_tokens=gap)
        assert_equal(tiny_model(architecture), scorer, batch_of([9, 2, 6, 7]), upstream)


@pytest.mark.parametrize("policy", POLICIES)
def test_packed_rows_under_every_policy(policy: str) -> None:
    assert_equal(tiny_model(), scorer_with(policy, gap_tokens=1), batch_of([9, 2, 6, 7]))


def test_packed_equals_one_by_one_to_the_last_digits() -> None:
    """Rows in packs of any size, down to one: the same scores and gradients."""
    model, batch = tiny_model(), batch_of([9, 2, 6, 7, 11])
    found = []
    for pack_tokens in (0, 9, 20, 100):
        logp_P = scorer_with(pack_tokens=pack_tokens)(model, *batch)
        logp_P.sum().backward()
        found.append((logp_P, lora_gradients(model)))
    for logp_P, grads in found[1:]:
        assert relative_error(logp_P, found[0][0]) < TOLERANCE
        assert all(relative_error(grads[name], grad) < TOLERANCE for name, grad in found[0][1].items())


def test_packs() -> None:
    assert packs({0: 4, 1: 4, 2: 9, 5: 2}, 8) == [[0, 1], [2], [5]]
    assert packs({0: 4, 1: 4}, 0) == [[0], [1]]


def test_rows_are_not_packed_where_rotary_embeddings_depend_on_the_length() -> None:
    model, layouts = tiny_model(), []
    decoder = model.get_base_model().model
    scorer = scorer_with()
    score = scorer.score
    scorer.score = lambda model, sequence, **how: layouts.append(sequence.layout) or score(model, sequence, **how)  # type: ignore
    for rope_type, n_walks in (("default", 1), ("dynamic", 3)):
        decoder.rotary_emb.rope_type = rope_type
        layouts.clear()
        scorer(model, *batch_of([3, 4, 5]))
        assert len(layouts) == n_walks


def pair_of(n_prefix: int, n_chosen: int, n_rejected: int) -> tuple[Branch, Branch]:
    generator = np.random.default_rng(n_prefix)
    prefix_T = generator.integers(0, 89, n_prefix)
    branches = []
    for name, n_tokens, first in (("chosen", n_chosen, 5), ("rejected", n_rejected, 6)):
        tail_T = np.concatenate([[first], generator.integers(0, 89, n_tokens)])[: n_tokens - n_prefix]
        positions_P = np.unique([1, n_prefix // 2 + 1, max(1, min(n_prefix, n_tokens - 1)), n_tokens - 1])
        ids_T = np.concatenate([prefix_T, tail_T])
        branches.append(Branch(name, ids_T, positions_P, np.ones(len(positions_P))))
    return branches[0], branches[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [(11, 15, 20), (11, 20, 12), (0, 8, 9), (9, 9, 14), (9, 14, 9)])
def test_shared_prefix_equals_both_branches_alone(architecture: str, lengths: tuple[int, int, int]) -> None:
    """Also without a common prefix, and where one branch is the prefix of the other."""
    model, (chosen, rejected) = tiny_model(architecture), pair_of(*lengths)
    assert common_prefix(chosen.token_ids_T, rejected.token_ids_T) == lengths[0]
    want, upstream = [], (1.0, -3.0)
    for branch, factor in zip((chosen, rejected), upstream, strict=True):
        ids_1T = torch.from_numpy(branch.token_ids_T)[None]
        positions_P = torch.from_numpy(branch.positions_P)
        batch = ids_1T, torch.ones_like(ids_1T), torch.zeros_like(positions_P), positions_P
        want.append(reference.token_logprobs(model, *batch))
        (factor * want[-1].mean()).backward()
    true = lora_gradients(model)
    for tile, gap in itertools.product((1, 7, 1000), (0, 128)):
        scorer = scorer_with(tile=tile, gap_tokens=gap)
        got = shared_prefix_logprobs(model, chosen, rejected, torch.device("cpu"), scorer)
        sum(factor * logp_P.mean() for factor, logp_P in zip(upstream, got, strict=True)).backward()  # type: ignore
        for one, other in zip(got, want, strict=True):
            assert relative_error(one, other) < TOLERANCE
        for name, grad in lora_gradients(model).items():
            assert relative_error(grad, true[name]) < TOLERANCE, name


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_prefix_under_every_policy(policy: str) -> None:
    """Against the plain pass under a dense mask, in float64 too but with the library's float32 norms (1e-7)."""
    model, (chosen, rejected) = tiny_model(), pair_of(11, 15, 20)
    found = []
    for scorer in (scorer_with("none"), scorer_with(policy, gap_tokens=1)):
        logps = shared_prefix_logprobs(model, chosen, rejected, torch.device("cpu"), scorer)
        (logps[0].mean() - logps[1].mean()).backward()
        found.append((torch.cat(logps), lora_gradients(model)))
    assert relative_error(found[1][0], found[0][0]) < TOLERANCE
    for name, grad in found[0][1].items():
        assert relative_error(found[1][1][name], grad) < TOLERANCE, name
    plain = shared_prefix_logprobs(model, chosen, rejected, torch.device("cpu"))
    assert relative_error(found[0][0], torch.cat(plain)) < 1e-6
