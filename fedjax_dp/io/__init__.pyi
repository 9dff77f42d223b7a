"""The public names, for tools that read types; `__init__.py` imports each when it is first used."""

from . import drawing as drawing
from . import plots as plots
from .checkpoint import Checkpoints as Checkpoints
from .plots import client_accuracies as client_accuracies
from .plots import labels_by_client as labels_by_client
from .plots import round_chart as round_chart
from .journal import JournalFile as JournalFile
from .logbook import Logbook as Logbook
from .logbook import read_metrics as read_metrics
from .logbook import write_json as write_json
from .trials import read_measured as read_measured
from .plots import accuracy_and_epsilon as accuracy_and_epsilon
from .plots import accuracy_by_bytes as accuracy_by_bytes
from .plots import accuracy_by_seconds as accuracy_by_seconds
from .trials import TrialFiles as TrialFiles
