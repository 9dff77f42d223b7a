"""Shows which version the site is about; typesets formulas."""

from typing import Any

import fedjax_dp

# What pages of notebooks load too.
_MATHJAX = (
    '<script async src="https://cdn.jsdelivr.net/npm/mathjax@4.1.3/tex-mml-chtml.js"></script>'
)


def on_config(config: Any) -> Any:
    """Puts the version below every page."""
    config.copyright = f"fedjax_dp {fedjax_dp.__version__}, Apache-2.0"
    return config


def on_post_page(output: str, **_: Any) -> str:
    """Loads MathJax where a page has formulas."""
    has_formulas = 'class="arithmatex"' in output
    return output.replace("</body>", f"{_MATHJAX}</body>") if has_formulas else output
