"""Bytes that masks cost besides the words of messages: keys, and shares of seeds."""

import numpy as np

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Exchange
from fedjax_dp.server.secure.graphs import MaskGraph
from fedjax_dp.server.secure.secret_sharing import PRIME

# A public key of X25519; a share, an element of the field; the tag of an encryption.
_KEY, _SHARE, _TAG = 32, -(-PRIME.bit_length() // 8), 16


@checked
def mask_messages(graph: MaskGraph) -> Exchange:
    """Counts the keys and shares of a round under masks, for the communication meter.

    Every client sends two public keys, which the server forwards to its k neighbours, and to each
    neighbour an encrypted share of each of its two seeds, through the server. At the end those that
    sent are sent one bit for each neighbour, whether it sent too, and return one share for each.
    All of that is sent again in every round. Headers and signatures are not counted.

    Args:
      graph: as given to `masked`.

    Returns:
      Bytes of types "keys", "shares" and "bool", for `communication(..., exchange=...)`.

    Source: Bonawitz and others 2017, figure 4; Bell and others 2020, algorithm 2.
    """

    def neighbors(num_notified: np.ndarray) -> np.ndarray:
        others = np.maximum(num_notified - 1, 0)
        return others if graph.num_neighbors is None else np.minimum(others, graph.num_neighbors)

    def up(
        rounds: np.ndarray, num_notified: np.ndarray, num_sent: np.ndarray
    ) -> dict[str, np.ndarray]:
        k = neighbors(num_notified)
        encrypted = num_notified * k * (2 * _SHARE + _TAG)
        return {"keys": num_notified * 2 * _KEY, "shares": encrypted + num_sent * k * _SHARE}

    def down(
        rounds: np.ndarray, num_notified: np.ndarray, num_sent: np.ndarray
    ) -> dict[str, np.ndarray]:
        k = neighbors(num_notified)
        pairs = num_notified * k
        shares = pairs * (2 * _SHARE + _TAG)
        return {"keys": pairs * 2 * _KEY, "shares": shares, "bool": num_sent * -(-k // 8)}

    return Exchange(up, down)
