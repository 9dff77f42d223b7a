"""The configured augmentation of training records."""

from fedjax_dp.core import checks
from fedjax_dp.data.augmentation import TRANSFORMS, Augmentation, compose
from fedjax_dp.experiment.schema.config import DataSection
from fedjax_dp.experiment.schema.constraints import keyed


def augmentation_of(section: DataSection) -> Augmentation | None:
    """Builds transforms by name with their options, in order; None without any."""
    copies, made = section.augmentation_copies, []
    rule = "be 1 without data.augmentation, as copies would be equal"
    is_any = bool(section.augmentation)
    checks.require(is_any or copies == 1, "data.augmentation_copies", rule, copies)
    for name, options in section.augmentation.items():
        key = f"data.augmentation.{name}"
        with keyed(key):
            transform = TRANSFORMS[name](**options)
        rule = "return a function (example, key) -> example"
        checks.require(callable(transform), key, rule, type(transform).__name__)
        made.append(transform)
    if not made:
        return None
    rule = "be left out with data.augmentation, which may make inputs longer"
    checks.require(section.input_norm is None, "data.input_norm", rule, section.input_norm)
    rule = "be 'unit' with data.augmentation.color, which cuts pixels off at 0 and 1"
    scaling = section.options.get("scaling", "unit")
    fits = scaling == "unit" or "color" not in section.augmentation
    checks.require(fits, "data.options.scaling", rule, scaling)
    return compose(*made, num_copies=copies)
