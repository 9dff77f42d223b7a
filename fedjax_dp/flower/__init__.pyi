# The public names of the package, each with the module that defines it. At run time they are read
# from here, type checkers and editors read them here too.
from . import testing as testing
from .apps import (
    OnFlower as OnFlower,
    client_app_of as client_app_of,
    run_on as run_on,
    server_app_of as server_app_of,
)
from .exchange import NotOpenError as NotOpenError
from .export import write_app as write_app
from .grid import GridNodes as GridNodes
from .server import Journal as Journal
from .ledger import Budget as Budget
from .node import client_app as client_app
from .exchange import Project as Project, project as project
from .server import Nodes as Nodes, deployed as deployed
from .terms import Node as Node, Script as Script, Terms as Terms
