"""Forward of one decoder layer, written out tile by tile; keeps what the plan says.

Shapes: T tokens, Q query rows, N rows of a tile, D hidden size, F MLP size.

In the last layer the query rows are those of the windows around scored positions: its output is wanted there only,
while its keys and values are those of every token. In all others Q = T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.offload import Kept
from engine.segments import Queries
from engine.workspace import MID_RING, LayerActivations, Workspace, tiles


class LayerForward(Workspace):
    """Forward of one layer at a time, first layer first."""

    _index = -1  # of the layer that runs

    def forward(self, hidden_TD: Tensor, kept: LayerActivations, next_input: Kept | None, queries: Queries) -> Tensor:
        """The layer's output [Q, D], written over its input where Q = T. `load` the layer first."""
        self._index += 1
        self._send_gate_up()
        for span in self.spans:
            self._project_qkv(hidden_TD[span], span, kept.staged_qkv or kept.qkv)
        outputs = list(self._attend(kept, queries))
        self.transfers.wait_written(kept.input)
        hidden_QD = hidden_TD
        if queries.windows is not None:
            hidden_QD = torch.cat([hidden_TD[start:stop] for start, stop in queries.windows])
        for index, span in enumerate(tiles(queries.n_rows, self.plan.tile_tokens)):
            mid_ND = self._ring_tile(index, span)
            self._mid(hidden_QD[span], [out[span] for out in outputs], mid_ND)
            if kept.mid is not None:
                self._ring_events[index % MID_RING] = self.transfers.write(kept.mid, span, mid_ND)
            self._mlp(mid_ND, hidden_QD[span], kept.gate_up, span)
            if next_input is not None:
                self.transfers.write(next_input, span, hidden_QD[span])
        if kept.gate_up is not None and self.transfers.is_remote(kept.gate_up):
            self._unsent, self._gate_up_sent = self._gate_up_pieces(kept.gate_up), []
        self._wait_all(kept)
        return hidden_QD

    def _gate_up_pieces(self, gate_up: Kept) -> list[tuple[Kept, slice]]:
        """What of gate|up travels beside each following layer, up to the next one whose gate|up goes to the host.

        In one go the copy would take longer than a layer computes, and the layer's own copies would wait for it.
        """
        later = [layer.gate_up == "host" for layer in self.plan.layers[self._index + 1 :]]
        n_pieces = later.index(True) + 1 if any(later) else max(1, len(later))
        n_rows = gate_up.data_TW.shape[0]
        return [(gate_up, span) for span in tiles(n_rows, -(-n_rows // n_pieces))]

    def _send_gate_up(self) -> None:
        if self._unsent and self._gate_up_TX is not None:
            kept, span = self._unsent.pop(0)
            event = self.transfers.write(kept, span, self._gate_up_TX[span], bulk=True)
            self._gate_up_sent.append((span, event))

    def finish(self) -> None:
        """All copies to the host are done before the workspace may be freed."""
        while self._unsent:
            self._send_gate_up()
        for event in (*(event for _, event in self._gate_up_sent), *self._ring_events):
            self.transfers.wait(event)
