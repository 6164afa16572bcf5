"""Which names say what a run worked at."""

import json

import pytest

from tasks.sources import parse
from tasks.sources.instances import instance_in_path, instance_repo, instance_task


@pytest.mark.parametrize(
    ("instance", "task", "repo"),
    [
        ("pylint-dev__astroid-1196", "pylint-dev__astroid-1196", "pylint-dev/astroid"),
        ("tomerfiliba__plumbum-366_17", "tomerfiliba__plumbum-366", "tomerfiliba/plumbum"),
        ("python__mypy-15976_0", "python__mypy-15976", "python/mypy"),
        (
            "arrow-py__arrow.1d70d009.lm_rewrite__nuzjfyur",
            "arrow-py__arrow.1d70d009.lm_rewrite__nuzjfyur",
            "arrow-py/arrow",
        ),
        ("a__b.1d70d009.lm_rewrite__nuzjfyur.l13ggwmx_1", "a__b.1d70d009.lm_rewrite__nuzjfyur", "a/b"),
        ("pandas-dev__pandas.95280573.pr_53856", "pandas-dev__pandas.95280573.pr_53856", "pandas-dev/pandas"),
        ("scikit-learn__scikit-learn-10297", "scikit-learn__scikit-learn-10297", "scikit-learn/scikit-learn"),
        ("plain-id", "plain-id", None),
    ],
)
def test_instance_ids(instance: str, task: str, repo: str | None) -> None:
    assert (instance_task(instance), instance_repo(instance)) == (task, repo)


@pytest.mark.parametrize(
    ("path", "instance"),
    [
        ("pylint-dev__astroid-1196.traj.json", "pylint-dev__astroid-1196"),
        ("runs/astropy__astropy-12907/agent/run.json", "astropy__astropy-12907"),
        ("runs/astropy__astropy-12907__AbCdEf7/agent/trajectory.json", "astropy__astropy-12907"),
        ("tomerfiliba__plumbum-366_17.jsonl.gz", "tomerfiliba__plumbum-366"),
        ("pvlib__pvlib-python-1606.traj", "pvlib__pvlib-python-1606"),
        ("run-llama__llama_index-7365/x.json", "run-llama__llama_index-7365"),
        ("huggingface__transformers-12.json", "huggingface__transformers-12"),
        (
            "mozilla__bleach.73871d76.func_pm_remove_cond__lq60cp3u.l13ggwmx_1.traj",
            "mozilla__bleach.73871d76.func_pm_remove_cond__lq60cp3u.l13ggwmx_1",
        ),
        ("anthropic__claude-3-5-sonnet/s1.json", None),
        ("anthropic__claude-3/s1.json", None),
        ("Qwen__Qwen2.5-7/s1.json", None),
        ("deepseek-ai__deepseek-coder-33/s1.json", None),
        ("me__my-gpt-4.json", None),
        ("litellm_proxy__anthropic__claude-sonnet-4-20250514-1757015046.707.json", None),
        ("experiment__2024-01-05/s1.json", None),
        ("experiment__2024-01-15/s1.json", None),
        ("agent__first-20240115/s1.json", None),
        ("agent__first-2024-01-15/s1.json", None),
        ("agent__run-1/s1.json", None),
        ("claude__default__t-0.00__p-1.00__c-0.00___install-1/s1.traj", None),
        ("astropy__astropy-12907-notes.json", None),
        ("my astropy__astropy-12907.json", None),
    ],
)
def test_a_path_names_the_task_only_where_the_whole_name_is_an_instance(path: str, instance: str | None) -> None:
    assert instance_in_path(path) == instance


def test_two_prompts_in_a_folder_named_after_a_model_are_two_tasks() -> None:
    found = set()
    for prompt in ("question A", "question B"):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"}]
        (run,) = parse(json.dumps({"messages": turns}).encode(), "logs/anthropic__claude-3-5-sonnet/s.json")
        assert run.repo is None
        found.add(run.task_id)
    assert len(found) == 2
    assert all(task.startswith("prompt-") for task in found)


@pytest.mark.parametrize("missing", [None, "", ["q"], {}])
def test_an_id_that_is_missing_is_no_name(missing: object) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = (
        {"task_id": missing, "reward": 1.0, "trial": 0, "traj": turns},
        {"problem": missing, "log": [{"obs": "q"}, {"action": {"name": "x", "arguments": {}}, "obs": "o"}]},
        {"version": 2, "eval": {"task": "t"}, "plan": {}, "samples": [{"id": missing, "epoch": 1, "messages": turns}]},
    )
    for row in rows:
        (run,) = parse(json.dumps(row).encode())
        assert run.task_id.startswith("prompt-")


def test_a_number_is_an_id() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (run,) = parse(json.dumps({"task_id": 0, "reward": 1.0, "trial": 0, "traj": turns}).encode())
    assert run.task_id == "tau-bench/unknown/0"
