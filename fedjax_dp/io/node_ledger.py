"""The file of a node's ledger of records, and the claim that follows from it."""

import json
import pathlib
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports.statement import statement

LEDGER_FILE = "ledger.json"


def read_ledger(path: pathlib.Path, *, needs_digest: bool = False) -> dict[str, Any]:
    """Reads the file of a node's ledger; a ValueError that names it if it was damaged."""
    written = files.parse_json(files.read_text(path), path)
    content = files.without_digest(written, path)
    is_sealed = content.keys() < written.keys()
    rule = "have the digest with which nodes write it"
    checks.require(is_sealed or not needs_digest, str(path), rule, "none")
    return content


def claim_of_node(path: pathlib.Path, dp_delta: float, accountant: str) -> dict[str, Any]:
    """Returns the claim of a node for the records of its clients, over all runs with its ledger."""
    content = read_ledger(path, needs_digest=True)
    rule = "be the ledger of a node, as it writes it"
    with files.reading(path, rule, ValueError, TypeError, LookupError, AttributeError):
        sizes = {int(client): int(size) for client, size in content["sizes"].items()}
        saved, clients = content["accounts"]["record"], sorted(sizes)
        whole = Ledger.from_json(json.dumps(saved))
        own = Ledger("record", whole.relation, len(clients))
        for entry in saved["entries"]:
            counts = np.zeros(whole.num_units, np.int64)
            counts[entry.get("units", slice(None))] = entry["count"]
            counts = counts[clients]
            paid = np.flatnonzero(counts)
            if len(paid):
                own.charge(ev.from_dict(entry["event"]), units=paid, count=counts[paid])
        has_parity = "parity" in content["keys"]
        read_once = {"reads_once": True} if content["times"] else {}
    return statement(
        own,
        dp_delta,
        accountant=accountant,
        num_units=[sizes[client] for client in clients],
        noise_root="seed" if has_parity else "secret",
        deployment={"keys": "parity" if has_parity else "device"},
        client_names=[str(client) for client in clients],
        **read_once,
    )
