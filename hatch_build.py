"""What the metadata of a package that is built takes from the repository and its address."""

import os
import pathlib
import re
import runpy
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^()\s]+)\)")
_ADDRESS = re.compile(r"https://[\w.-]+(/[\w.-]+)+")


class Repository(MetadataHookInterface):
    """Adds the long description, and the addresses that follow from that of the repository.

    The environment variable `REPOSITORY_URL` has it, as for the site. Without it links of README.md
    become text, and its pictures are left out: an index page shows nothing of a relative path.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds `readme` and `urls`."""
        address, root = os.environ.get("REPOSITORY_URL", ""), pathlib.Path(self.root)
        if address and not _ADDRESS.fullmatch(address):
            raise ValueError(f"REPOSITORY_URL must be https://HOST/OWNER/NAME, got {address!r}")
        installed = runpy.run_path(str(root / "docs" / "hooks" / "installing.py"))["published"]
        text = installed((root / "README.md").read_text("utf-8"))
        if address:
            text = text.replace("a clone of the repository", f"a clone of {address}")
        tag = f"v{metadata['version']}"
        text = _LINK.sub(lambda link: _absolute(*link.groups(), address, tag), text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        pages = {"Repository": "", "Changelog": f"/blob/{tag}/CHANGELOG.md", "Issues": "/issues"}
        metadata["urls"] = {name: address + page for name, page in pages.items() if address}


def _absolute(image: str, text: str, target: str, address: str, tag: str) -> str:
    """A link to a file of the repository, as a page elsewhere has it."""
    if not address:
        return "" if image else text
    kind = "raw" if image else "tree" if target.endswith("/") else "blob"
    return f"{image}[{text}]({address}/{kind}/{tag}/{target})"
