"""Stage promote: whether the candidate replaces the incumbent, and the alias `current` that says who is in charge.

`aliases/current.json` is replaced atomically, so a reader finds the old or the new adapter and never half of one.
`aliases/history.jsonl` gets one line per decision, also when nothing moved.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from artifacts.store import Store, write_atomically
from schemas.config import PromoteConfig
from schemas.errors import UserError
from schemas.refs import STORE, Ref
from schemas.reports import Evaluated, ModelScore, Promoted, PromoteReport

STAGE_VERSION: Final = 1


def _gain(candidate: ModelScore, incumbent: ModelScore, metric: str) -> float | None:
    """How much better the candidate is, positive for better; None when either has no value."""
    new, old = getattr(candidate, metric), getattr(incumbent, metric)
    if new is None or old is None:
        return None
    return old - new if metric == "nll_per_action_token" else new - old


def decide(candidate: ModelScore, incumbent: ModelScore | None, policy: PromoteConfig) -> tuple[bool, tuple[str, ...]]:
    """Whether the candidate is to be promoted, and every reason for or against.

    It is when there were enough held-out pairs, its metric is better than the incumbent's by at least `min_gain` (and
    by more than nothing), and it lost no more than `max_nll_increase` on resolved runs. Without an incumbent to
    compare with, enough pairs and a value of the metric suffice.
    """
    against: list[str] = []
    if candidate.n_pairs < policy.min_pairs:
        against.append(f"{candidate.n_pairs} held-out pairs, {policy.min_pairs} needed to decide")
    value = getattr(candidate, policy.metric)
    if value is None:
        against.append(f"the candidate has no {policy.metric}: nothing was held out to measure it on")
    if incumbent is None:
        return not against, tuple(against) or (f"nothing to compare with; {policy.metric} {value:.4f}",)

    gain = _gain(candidate, incumbent, policy.metric)
    if value is not None and gain is None:
        against.append(f"{incumbent.name} has no {policy.metric} to compare with")
    if gain is not None and not (gain > 0 and gain >= policy.min_gain):
        against.append(
            f"{policy.metric} gains {gain:+.4f} over {incumbent.name}; "
            f"{f'at least {policy.min_gain:g}' if policy.min_gain else 'more than nothing'} is needed"
        )
    loss = _gain(candidate, incumbent, "nll_per_action_token")
    if loss is not None and -loss > policy.max_nll_increase:
        against.append(
            f"nll_per_action_token rises by {-loss:.4f} nats over {incumbent.name}, {policy.max_nll_increase:g} allowed"
        )
    if against:
        return False, tuple(against)
    return True, (f"{policy.metric} {value:.4f} gains {gain:+.4f} over {incumbent.name}",)


class Incumbent(NamedTuple):
    """Who is in charge, and whom it replaced when it came."""

    adapter: Ref
    replaced: Ref | None


def current(store: Store) -> Incumbent | None:
    """The adapter that the alias `current` names; None before the first promotion.

    Raises:
        UserError: the alias file is damaged.
    """
    alias, here = _alias(store), {STORE: store.root}
    if not alias.is_file():
        return None
    try:
        record = json.loads(alias.read_text())
        replaced = record.get("replaced")
        adapter = Ref.model_validate(record["adapter"], context=here)
        return Incumbent(adapter, Ref.model_validate(replaced, context=here) if replaced else None)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the alias `current` cannot be read", where=alias, fix="restore it from history.jsonl"
        ) from error


def _alias(store: Store) -> Path:
    return store.root / "aliases" / "current.json"


def _append_line(path: Path, line: str) -> None:
    """One line at the end of a file, in one write, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def promote(evaluated: Evaluated, candidate: Ref, config: PromoteConfig, store: Store) -> Promoted:
    """Moves the alias to the candidate (the last adapter evaluated: SimPO, else SFT) if `decide` says so.

    The incumbent of the evaluation is compared with; without one, the base model. The decision is recorded either way.

    Raises:
        UserError: the evaluation holds no score of the candidate.
    """
    report = evaluated.report
    score = report.of("simpo") or report.of("sft")
    if score is None:
        raise UserError("the evaluation has no score of the candidate", where="promote")
    in_charge = current(store)
    incumbent = in_charge.adapter if in_charge else None
    if incumbent is not None and incumbent.sha256 == candidate.sha256:
        promoted, reasons = False, ("the candidate already is the incumbent",)
    else:
        promoted, reasons = decide(score, report.of("incumbent") or report.of("base"), config)
    outcome = PromoteReport(
        promoted=promoted,
        reasons=reasons,
        candidate_sha256=candidate.sha256,
        incumbent_sha256=incumbent.sha256 if incumbent else None,
    )
    record = {
        "adapter": candidate.model_dump(mode="json"),
        "replaced": incumbent.model_dump(mode="json") if incumbent else None,
        "decision": outcome.model_dump(mode="json"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _append_line(_alias(store).with_name("history.jsonl"), json.dumps(record))
    if promoted:
        write_atomically(_alias(store), json.dumps(record, indent=2))
    return Promoted(report=outcome)
