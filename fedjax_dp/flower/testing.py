"""A grid without a network, for tests of apps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity


class InProcess(Grid):
    """Runs a client app in this process, once for each node."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, Mapping[str, Any]],
        change: Callable[[Message, Message], Iterable[Message]] = lambda sent, reply: [reply],
    ) -> None:
        """Makes a grid; `change`, `(message, reply) -> replies`, replaces what arrives."""
        # Flower builds messages in a task alone, whose identity is private to it.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self._app, self._change = app, change
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), {}) for node, config in nodes.items()
        }

    def set_run(self, run: Any) -> None:
        """Does nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Nothing: there is one run."""
        return None

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Builds a message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Lists the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Is not offered."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Is not offered."""
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Runs the app on each message; an exception becomes an error reply, as in Flower."""
        replies: list[Message] = []
        for message in messages:
            try:
                reply = self._app(message, self.contexts[message.metadata.dst_node_id])
            except Exception as error:
                reply = Message(Error(0, repr(error)), reply_to=message)
            replies += self._change(message, reply)
        return replies
