"""Configurations on stores and on the published populations, read once from TOML."""

import pytest

pytestmark = pytest.mark.usefixtures("no_pictures")
