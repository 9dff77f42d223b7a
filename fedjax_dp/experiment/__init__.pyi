# The public names of the package, each with the module that defines it. At run time they are read
# from here, type checkers and editors read them here too.
from .assembly.assemble import assemble as assemble
from .components.experiment import Callback as Callback
from .components.experiment import Experiment as Experiment
from .reading.config_files import load_config as load_config
from .running.loading import (
    Run as Run,
    evaluate_run as evaluate_run,
    load_run as load_run,
)
from .running.pack import (
    Packed as Packed,
    pack as pack,
)
from .running.report import (
    Report as Report,
    report as report,
)
from .running.run import (
    Outcome as Outcome,
    Watcher as Watcher,
    resume as resume,
    run as run,
)
from .components.catalogue import Config as Config
from .schema.constraints import ConfigError as ConfigError
from .studies.audits import (
    AuditReport as AuditReport,
    audit_experiment as audit_experiment,
)
from .studies.cluster import (
    Cluster as Cluster,
    WorkerError as WorkerError,
)
from .studies.methods import (
    Method as Method,
    methods as methods,
    methods_table as methods_table,
)
from .studies.sweep import (
    Study as Study,
    average_over_seeds as average_over_seeds,
    grid_points as grid_points,
    read_summaries as read_summaries,
    sweep as sweep,
)
