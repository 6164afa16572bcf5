"""The Arrow tables that stages hand to each other: fixed schemas, never inferred ones.

`large_string` because plain `string` columns overflow at 2 GiB per chunk. Token spans are runs, not a value per token:
an 80K-token branch has a few hundred of them, they carry the message they came from, and they expand in one call.
"""

from typing import Final

import pyarrow as pa

TRAJECTORY_SCHEMA_VERSION: Final = 2
BRANCH_SCHEMA_VERSION: Final = 1
PAIR_SCHEMA_VERSION: Final = 1

SPAN_KINDS: Final = ("prompt", "observation", "reasoning", "thought", "action", "turn_end")
"""Names of the span kinds; the tables store the index.

prompt       system and user text, template scaffolding, and everything that is not one of the others
observation  what came back from the environment
reasoning    a turn's reasoning block
thought      text the policy wrote beside its calls
action       the calls themselves, in the template's exact text; the whole text of a turn without a call
turn_end     the token that ends a policy turn
"""

_text = pa.large_string()

_tool_call = pa.struct([("name", _text), ("arguments", _text), ("call_id", _text)])
_char_span = pa.struct([("start", pa.int64()), ("end", pa.int64())])
_message = pa.struct(
    [
        ("role", _text),
        ("author", _text),
        ("content", _text),
        ("reasoning", _text),
        ("tool_calls", pa.list_(_tool_call)),
        ("action_spans", pa.list_(_char_span)),
        ("tool_call_id", _text),
        ("name", _text),
        ("failed", pa.bool_()),
    ]
)
_outcome = pa.struct([("status", _text), ("source", _text), ("score", pa.float64())])

TRAJECTORIES: Final = pa.schema(
    [
        ("trajectory_id", _text),
        ("task_id", _text),
        ("source_format", _text),
        ("source_path", _text),
        ("source_blake3", _text),
        ("messages", pa.list_(_message)),
        ("outcome", _outcome),
        ("repo", _text),
        ("run_id", _text),
        ("agent", _text),
        ("model", _text),
        ("tools_json", _text),
        ("exit_status", _text),
        ("patch", _text),
        ("parent_id", _text),
        ("parent_link", _text),
    ],
    metadata={
        "traceforge.table": "trajectories",
        "traceforge.schema_version": str(TRAJECTORY_SCHEMA_VERSION),
    },
)
"""Column for column the fields of `schemas.trajectory.Trajectory`, so a row is `Trajectory.model_dump()`."""

TOKEN_SPAN: Final = pa.struct(
    [
        ("start", pa.int32()),  # tokens [start, end) of the branch
        ("end", pa.int32()),
        ("kind", pa.int8()),  # index into SPAN_KINDS
        ("message", pa.int32()),  # index into the trajectory's messages; -1 for scaffolding before the first
        ("weight", pa.float32()),  # 0: not scored
    ]
)

BRANCHES: Final = pa.schema(
    [
        ("branch_id", _text),
        ("trajectory_id", _text),
        ("task_id", _text),
        ("split", _text),  # train or heldout
        ("outcome", _text),
        ("score", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(TOKEN_SPAN)),  # in order, covering [0, n_tokens) without gap or overlap
        ("n_tokens", pa.int32()),
        ("n_scored", pa.int32()),
        ("has_reasoning", pa.bool_()),  # both sides of a pair must agree
        (
            "opening_sha256",
            _text,
        ),  # of the system message, and of the task message unless a simulated user wrote it
    ],
    metadata={"traceforge.table": "branches", "traceforge.schema_version": str(BRANCH_SCHEMA_VERSION)},
)

PAIRS: Final = pa.schema(
    [
        ("pair_id", _text),
        ("rule", _text),
        ("task_id", _text),
        ("split", _text),
        ("chosen_branch_id", _text),
        ("rejected_branch_id", _text),
        ("n_shared_prefix", pa.int32()),  # leading tokens that are equal on both sides
        ("chosen_n_tokens", pa.int32()),
        ("rejected_n_tokens", pa.int32()),
        ("chosen_n_scored", pa.int32()),
        ("rejected_n_scored", pa.int32()),
        ("weight", pa.float32()),
    ],
    metadata={"traceforge.table": "pairs", "traceforge.schema_version": str(PAIR_SCHEMA_VERSION)},
)

TABLES: Final = {"trajectories": TRAJECTORIES, "branches": BRANCHES, "pairs": PAIRS}
