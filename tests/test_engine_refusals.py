"""What the long-context walk would not compute as the model does, it refuses in one line; what it does, it accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from engine_models import LINEARS, lora_gradients, relative_error, tiny_config, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from engine import reference
from engine.layers import LongContextScorer, uncovered
from engine.plan import uniform_plan
from engine.scores import Scorer, token_logprobs
from schemas.errors import UserError

N_TOKENS = 12
TOLERANCE = 1e-9


def walk() -> LongContextScorer:
    return LongContextScorer(lambda _: uniform_plan("mlp", 2, tile_tokens=64, head_groups=1))


def batch() -> tuple[torch.Tensor, ...]:
    ids_1T = torch.randint(0, 89, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    positions_P = torch.tensor([1, 5, 11])
    return ids_1T, torch.ones_like(ids_1T), torch.zeros_like(positions_P), positions_P


def randomised(model: Any) -> Any:
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def adapted(config: Any) -> Any:
    """Two layers with peft's adapter of this config, nothing of it zero."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(tiny_config("qwen3", num_hidden_layers=2), attn_implementation="sdpa")
    return randomised(get_peft_model(base, config))


def two_adapters(**second: Any) -> Any:
    model = adapted(LoraConfig(r=2, target_modules=LINEARS))
    model.add_adapter("second", LoraConfig(**({"r": 2, "target_modules": LINEARS} | second)))
    model.set_adapter("second")
    randomised(model)
    model.set_adapter("default")
    return model


REFUSED: dict[str, tuple[str, Any]] = {
    "ia3": ("IA3", peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": ("LOHA", peft.LoHaConfig(target_modules=LINEARS, r=2)),
    "lokr": ("LOKR", peft.LoKrConfig(target_modules=LINEARS, r=2)),
    "vera": ("VERA", peft.VeraConfig(target_modules=["q_proj"], r=2)),
    "adalora": ("ADALORA", peft.AdaLoraConfig(target_modules=LINEARS, init_r=3, target_r=2, total_step=10)),
    "randlora": ("RANDLORA", peft.RandLoraConfig(target_modules=["q_proj"], r=2)),
    "fourierft": ("FOURIERFT", peft.FourierFTConfig(target_modules=["q_proj"], n_frequency=10)),
    "prompt": ("PROMPT_TUNING", peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "prefix": ("PREFIX_TUNING", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "norms": ("LN_TUNING", peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "alora": ("ALora", LoraConfig(r=2, target_modules=LINEARS, alora_invocation_tokens=[5])),
    "dora": ("Dora", LoraConfig(r=2, target_modules=LINEARS, use_dora=True)),
    "lora_bias": ("LoRA with a bias", LoraConfig(r=2, target_modules=["down_proj"], lora_bias=True)),
    "parameter": ("ParamWrapper", LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"])),
    "embedding": ("embed_tokens", LoraConfig(r=2, target_modules=[*LINEARS, "embed_tokens"])),
    "head": ("lm_head", LoraConfig(r=2, target_modules=[*LINEARS, "lm_head"])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_not_plain_lora_on_the_linears_are_refused(name: str) -> None:
    match, config = REFUSED[name]
    with torch.no_grad(), pytest.raises(UserError, match=match):
        walk()(adapted(config), *batch())


def test_frozen_lora_on_the_embedding_is_refused_beside_trained_linears() -> None:
    model = adapted(REFUSED["embedding"][1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj.lora" in name)
    with pytest.raises(UserError, match="embed_tokens"):
        walk()(model, *batch())


ACCEPTED: dict[str, Callable[[], Any]] = {
    "head saved": lambda: adapted(LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["lm_head"])),
    "norm saved": lambda: adapted(LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["input_layernorm"])),
    "attention saved": lambda: adapted(LoraConfig(r=2, target_modules=LINEARS, modules_to_save=["self_attn"])),
    "tokens": lambda: adapted(LoraConfig(r=2, target_modules=LINEARS, trainable_token_indices=[1, 2, 3])),
    "rslora": lambda: adapted(LoraConfig(r=2, target_modules=["k_proj", "up_proj"], use_rslora=True)),
    "dropout in eval": lambda: adapted(LoraConfig(r=2, target_modules=LINEARS, lora_dropout=0.5)).eval(),
    "inactive DoRA": lambda: two_adapters(use_dora=True),
    "inactive on the embedding": lambda: two_adapters(target_modules=["embed_tokens"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_scored_exactly_is_accepted(name: str) -> None:
    model = ACCEPTED[name]()
    with torch.no_grad():
        assert relative_error(walk()(model, *batch()), reference.token_logprobs(model, *batch())) < TOLERANCE


@pytest.mark.parametrize("name", ["embedding", "head", "dora", "alora"])
def test_disabled_adapters_leave_the_base_model(name: str) -> None:
    model = adapted(REFUSED[name][1])
    with torch.no_grad(), model.disable_adapter():
        assert relative_error(walk()(model, *batch()), reference.token_logprobs(model, *batch())) < TOLERANCE


def test_both_active_adapters_count() -> None:
    model = two_adapters(r=3)
    with torch.no_grad():
        one_P = walk()(model, *batch())
    model.base_model.set_adapter(["default", "second"])
    want_P = reference.token_logprobs(model, *batch())
    want_P.sum().backward()
    want = lora_gradients(model)
    got_P = walk()(model, *batch())
    got_P.sum().backward()
    assert relative_error(got_P, want_P) < TOLERANCE < relative_error(one_P, want_P)
    assert all(relative_error(grad, want[name]) < 1e-6 for name, grad in lora_gradients(model).items())


def test_merged_adapters_are_the_weights_until_they_are_disabled() -> None:
    """peft unmerges in the forward of a disabled layer, which the walk never calls."""
    model = adapted(LoraConfig(r=2, target_modules=LINEARS))
    with torch.no_grad():
        want_P = reference.token_logprobs(model, *batch())
    model.merge_adapter()
    got_P = walk()(model, *batch())
    assert not got_P.requires_grad  # nor does peft's own: no LoRA matrix takes part
    assert relative_error(got_P, want_P) < TOLERANCE
    with model.disable_adapter(), pytest.raises(UserError, match=r"still merged .*unmerge_adapter"):
        walk()(model, *batch())


def _double(model: Any) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.up_proj.lora_B["default"].weight.mul_(2)


def _rescale(model: Any) -> None:
    model.get_base_model().model.layers[1].mlp.up_proj.scale_layer(2)


def _replace_norm(model: Any) -> None:
    norm = model.get_base_model().model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)


def _grow(find: Callable[[Any], torch.nn.Parameter]) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        with torch.no_grad():
            find(model.get_base_model()).mul_(2)

    return change


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "switched": ("q_proj has other", lambda model: model.set_adapter("second")),
    "both": ("q_proj has other", lambda model: model.base_model.set_adapter(["default", "second"])),
    "merged": ("q_proj has other", lambda model: model.merge_adapter()),
    "frozen": ("q_proj was frozen", lambda model: model.requires_grad_(False)),
    "weights": (r"layers.1.mlp.up_proj was changed in place", _double),
    "scaling": (r"layers.1.mlp.up_proj was changed in place", _rescale),
    "norm": ("norm of layers.1 has other", _replace_norm),
    "embedding": ("the embedding was changed in place", _grow(lambda base: base.model.embed_tokens.weight)),
    "last norm": ("the last norm was changed in place", _grow(lambda base: base.model.norm.weight)),
    "head": ("the head was changed in place", _grow(lambda base: base.lm_head.weight)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_between_forward_and_backward_is_refused(name: str) -> None:
    match, change = CHANGES[name]
    model = two_adapters()
    total = walk()(model, *batch()).sum()
    change(model)
    with pytest.raises(RuntimeError, match=f"{match}.* between forward and backward"):
        total.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_linears_that_share_a_lora_matrix_are_refused() -> None:
    """Autograd would add the last layer's part of its gradient for each of them."""
    model = adapted(LoraConfig(r=2, target_modules=LINEARS))
    first, second = (layer.mlp.up_proj.lora_A["default"] for layer in model.get_base_model().model.layers[:2])
    second.weight = first.weight
    with pytest.raises(UserError, match="linears that share a LoRA matrix"):
        walk()(model, *batch())


def test_autocast_changes_nothing() -> None:
    model = adapted(LoraConfig(r=2, target_modules=LINEARS)).float()
    want_P = walk()(model, *batch())
    want_P.sum().backward()
    want = lora_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        got_P = walk()(model, *batch())
    got_P.sum().backward()
    assert got_P.equal(want_P)
    assert all(grad.equal(want[name]) for name, grad in lora_gradients(model).items())


@pytest.mark.parametrize("keep", [True, False])
def test_backward_with_the_adapter_disabled_is_refused(keep: bool) -> None:
    """A walk of several in a batch keeps nothing and runs its forward pass again in backward."""
    model, (ids_1T, mask_1T, _, positions_P) = two_adapters(), batch()
    scorer = LongContextScorer(lambda _: uniform_plan("mlp", 2, tile_tokens=64, head_groups=1), pack_tokens=0)
    rows_P = torch.arange(3) // 2  # two rows, of which the last one's walk is kept
    logp_P = scorer(model, ids_1T.repeat(2, 1), mask_1T.repeat(2, 1), rows_P, positions_P)
    total = logp_P[rows_P == int(keep)].sum()
    with model.disable_adapter(), pytest.raises(RuntimeError, match=r"disabled\) between forward and backward"):
        total.backward()


def test_scoring_a_reference_between_forward_and_backward_is_fine() -> None:
    model = two_adapters()
    walk()(model, *batch()).sum().backward()
    want = lora_gradients(model)
    total = walk()(model, *batch()).sum()
    with torch.no_grad(), model.disable_adapter():
        walk()(model, *batch())
        token_logprobs(model, *batch())
    total.backward()
    assert all(torch.equal(grad, want[name]) for name, grad in lora_gradients(model).items())


SCORERS: dict[str, Callable[[], Scorer]] = {
    "plain": lambda: token_logprobs, "walk": walk, "oracle": lambda: reference.token_logprobs
}  # fmt: skip


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(
    ("mask", "position", "match"),
    [
        ("111111110000", 8, "first 8 of row 1"),  # right padding
        ("000011111111", 2, "first 2 of row 1"),  # left padding
        ("000011111111", 4, "first 4 of row 1"),  # nothing before it; packed, the token before is another row's
        ("000000000000", 4, "first 4 of row 1"),
        ("111110011111", 7, "first 7 of row 1"),  # right behind a hole
        ("111110011111", 9, "hole: 2 runs"),
    ],
)
def test_positions_without_a_token_before_them_are_refused(scorer: str, mask: str, position: int, match: str) -> None:
    model = adapted(LoraConfig(r=2, target_modules=LINEARS))
    ids_2T = batch()[0].repeat(2, 1)
    mask_2T = torch.stack([torch.ones(N_TOKENS, dtype=torch.long), torch.tensor([int(bit) for bit in mask])])
    with torch.no_grad(), pytest.raises(ValueError, match=match):
        SCORERS[scorer]()(model, ids_2T, mask_2T, torch.tensor([0, 1]), torch.tensor([5, position]))


@pytest.mark.parametrize("scorer", SCORERS)
def test_rows_that_are_not_scored_may_be_empty_and_masks_and_ids_of_any_number_type(scorer: str) -> None:
    model, (ids_1T, mask_1T, rows_P, positions_P) = adapted(LoraConfig(r=2, target_modules=LINEARS)), batch()
    with torch.no_grad():
        want_P = SCORERS[scorer]()(model, ids_1T, mask_1T, rows_P, positions_P)
        masks_2T = torch.cat([mask_1T, torch.zeros_like(mask_1T)]).double()
        got_P = SCORERS[scorer]()(model, ids_1T.repeat(2, 1).int(), masks_2T, rows_P, positions_P.int())
    assert relative_error(got_P, want_P) < TOLERANCE


def test_a_mask_of_another_shape_is_refused() -> None:
    ids_1T, mask_1T, *rest = batch()
    with pytest.raises(ValueError, match="attention mask"):
        token_logprobs(tiny_model(), ids_1T, mask_1T[:, 1:], *rest)


@pytest.mark.parametrize(
    ("architecture", "overrides", "what"),
    [
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, None),  # transformers' Llama does not look at them
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "without a sliding_window"),
        # transformers' Mistral has its window whatever layer_types say
        ("mistral", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, "window of 8"),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}, None),
        ("mistral", {"sliding_window": 9}, None),
    ],
)
def test_layer_types(architecture: str, overrides: dict[str, Any], what: str | None) -> None:
    found = uncovered(tiny_config(architecture, num_hidden_layers=2, **overrides), 9, trains=True)
    assert found is None if what is None else found and what in found
