"""Whether what is planned for is what the stage would run: the ledger knows the long-context engine alone."""

from collections.abc import Mapping
from typing import Final

from engine.budget import choose_engine
from engine.memory import ALL_LINEARS
from engine.model_config import stored_format
from schemas.config import RunConfig
from schemas.errors import UserError
from tasks.model_shape import ModelShape

_REMEDIES: Final[Mapping[str, tuple[str, str]]] = {
    "LoRA on": ("lora.target_modules", f"it takes {', '.join(ALL_LINEARS)}"),
    "LoRA dropout": ("lora.dropout", "set it to 0"),
    "attention dropout": ("attention_dropout in config.json", "set it to 0"),
    "a sliding window": ("--tokens", "plan for a branch within the window"),
    "activation": ("hidden_act in config.json", "plan for a model with silu"),
}
"""By what the long-context engine does not cover: where that stands, and what to do about it."""

_UNPLANNED: Final = ("", "the stage can train it with the plain engine, unplanned")


def check_engine(config: RunConfig, shape: ModelShape, n_tokens: int) -> str:
    """The engine that the preference stage would run on a GPU, and why.

    Raises:
        UserError: not the long-context engine, which alone has a ledger.
    """
    from engine.scorers import long_context_problem  # engine code: torch is loaded only when there is something to plan

    base = config.model
    if base.backend != "transformers":
        where, fix = "model.backend", 'set it to "transformers"'
        raise UserError(f"the memory of a model loaded by {base.backend} is not predicted", where=where, fix=fix)
    if base.engine == "plain":
        raise UserError("the memory of the plain engine is not predicted", where="model.engine", fix='set it to "auto"')
    stored = stored_format(shape)
    if stored not in ("none", base.quantization):
        known = stored in ("nf4", "int8")
        raise UserError(
            f"the model's weights are stored quantised as {stored}, planned for is {base.quantization}",
            where="model.quantization",
            fix=f'set it to "{stored}"' if known else "give a folder with weights that are not quantised",
        )
    problem = long_context_problem(base, shape.config(), config.lora, n_tokens, trains=True)
    if problem:
        where, fix = next((said for start, said in _REMEDIES.items() if problem.startswith(start)), _UNPLANNED)
        said = f"the long-context engine, whose memory alone is predicted, does not cover {problem}"
        raise UserError(said, where=where, fix=fix)
    name, why = choose_engine(base, problem, n_tokens, on_gpu=True)
    return f"{name} ({why})"
