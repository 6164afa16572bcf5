"""Instance ids of SWE-bench and its kin: what they say of task and repository, and which file names are one."""

import re
from pathlib import PurePosixPath

_RUN_NUMBER = re.compile(r"(-\d+)_\d+$")
_SWE_SMITH_RUN = re.compile(r"(\.[0-9a-f]{8}\.[^.]+)\.[a-z0-9]{8}(?:_\d+)?$")
_COMMIT = re.compile(r"\.[0-9a-f]{7,40}(?:\.|$)")


def instance_task(instance_id: str) -> str:
    """The task of an instance id, without what names a run: `-366_17` is run 17, `...__lq60cp3u.l13ggwmx_1` too."""
    instance_id = instance_id.strip()
    rollout = _SWE_SMITH_RUN.search(instance_id)
    if rollout and "__" in instance_id[: rollout.start()]:
        return instance_id[: rollout.end(1)]
    return _RUN_NUMBER.sub(r"\1", instance_id)


def instance_repo(instance_id: str) -> str | None:
    """owner/name of `owner__name-123` and `owner__name.commit.change`; None for other ids."""
    owner, separator, rest = _COMMIT.split(instance_id, maxsplit=1)[0].partition("__")
    name = re.sub(r"-[0-9]+(_[0-9]+)?$", "", rest)
    return f"{owner}/{name}" if separator and owner and name else None


_OWNER_AND_NAME = r"[A-Za-z0-9][A-Za-z0-9-]*__(?P<name>[A-Za-z0-9](?:(?!__)[\w.-])*)"
_SUFFIXES = (
    r"(?:\.(?:traj|trajectory|report|output|history|jsonl?|ya?ml|log|md|txt|eval|pred|patch|tar|tgz|gz|zst|zip))*"
)
_NUMBERED = re.compile(rf"(?P<id>{_OWNER_AND_NAME}-[1-9][0-9]{{0,5}})(?:_[0-9]+|__[A-Za-z0-9]{{7}})?{_SUFFIXES}")
"""`owner__name-123`, perhaps with a run's number, or with the seven signs that Harbor adds for a trial."""
_SWE_SMITH = re.compile(rf"(?P<id>{_OWNER_AND_NAME}\.[0-9a-f]{{8}}\.\w+(?:\.[a-z0-9]{{8}}(?:_[0-9]+)?)?){_SUFFIXES}")

_MODELS = (
    "claude|sonnet|opus|haiku|gpt|chatgpt|o[1345]|codex|gemini|gemma|llama|codellama|qwen|qwq|deepseek|mistral|mixtral|"
    "codestral|devstral|magistral|ministral|phi|grok|glm|kimi|minimax|nemotron|granite|starcoder"
)
_NO_REPOSITORY = re.compile(
    rf"(?:.*[-_.])?(?:{_MODELS})(?:[-_.]?\d.*|-.*)?"  # a model
    r"|.*\b(?:19|20)\d\d-?[01]\d(?:-?[0-3]\d)?|[\d._-]+"  # a date, of which the number is the last part; no name at all
    r"|(?:run|trial|seed|attempt|try|rollout|step|epoch|iter|shard|part|batch|sample|temp|exp|experiment|install|test)s?",
    re.IGNORECASE,
)


def instance_in_path(path: str) -> str | None:
    """The instance id that an agent named its file or folder by, for logs that do not repeat it. The whole name has to
    be one, and models, dates and experiments are none: a wrong id would make one task of two.
    """
    for part in reversed(PurePosixPath(path).parts):
        found = _NUMBERED.fullmatch(part) or _SWE_SMITH.fullmatch(part)
        if found and not _NO_REPOSITORY.fullmatch(found["name"]):
            return found["id"]
    return None
