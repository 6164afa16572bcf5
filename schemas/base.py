"""The base of every type that crosses a boundary."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable and closed: an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
