"""The whole pipeline on one screen: from logged runs to a promoted adapter."""

from prefect import State, flow

from artifacts.serializer import ArtifactSerializer
from flows.pipeline import Pipeline
from flows.stages import Execution
from schemas.config import RunConfig
from schemas.requests import StageName
from schemas.runs import RunReport
from tasks import stages
from tasks.identity import run_inputs
from tasks.incumbent import comparable_incumbent


@flow(name="traceforge", persist_result=True, result_serializer=ArtifactSerializer())
def traceforge(
    config: RunConfig,
    execution: Execution = "inline",
    until: StageName = "promote",
    refresh: tuple[StageName, ...] = (),
    pool_timeout_s: float | None = None,
) -> RunReport | State[RunReport]:
    """Logged agent runs to a better adapter.

    Args:
        config: the run, one section per stage
        execution: inline (every stage in this process) or pools (stages that train go to the GPU pool)
        until: the last stage to run
        refresh: stages to run again although their result is in the cache
        pool_timeout_s: how long a stage on the GPU pool may take, waiting included; unlimited when empty
    """
    inputs = run_inputs(config)
    with Pipeline(config, inputs.sha256, execution, until, refresh, pool_timeout_s) as run:
        runs = run(stages.INGEST, source=config.source, source_sha256=inputs.source_sha256).trajectories
        model = run(stages.MODEL, model=config.model, source_sha256=inputs.model_sha256).model
        branches = run(
            stages.RENDER,
            trajectories=runs,
            model=model,
            render=config.render,
            split=config.split,
            chat_template=config.model.chat_template,
            template_sha256=inputs.template_sha256,
        ).branches
        on_model = {"branches": branches, "model": model, "base": config.model}
        if until == "sft":  # alone, it needs no pairs; otherwise their lack is told before hours of training
            run(stages.SFT, **on_model, lora=config.lora, sft=config.sft)
        pairs = run(stages.PAIRS, branches=branches, trajectories=runs, pairs=config.pairs)
        sft = run(stages.SFT, **on_model, lora=config.lora, sft=config.sft).adapter
        simpo = run(stages.SIMPO, **on_model, pairs=pairs, adapter=sft, simpo=config.simpo).adapter
        incumbent = comparable_incumbent(run.store, model, candidate=simpo)
        adapters = {"sft": sft, "simpo": simpo} | ({"incumbent": incumbent} if incumbent else {})
        evaluated = run(stages.EVALUATE, **on_model, pairs=pairs, adapters=adapters, evaluate=config.evaluate)
        run(stages.PROMOTE, evaluated=evaluated, candidate=simpo, promote=config.promote)
    return run.result()
