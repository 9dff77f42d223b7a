"""The layout of a round: chunks, devices, placement. It affects speed and memory, not results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import Choices, Measured, choices, no_split
from fedjax_dp.core.devices import MODEL_AXIS, is_distributed, memory_per_device
from fedjax_dp.core.products import Arithmetic
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.disk_arrays import is_on_disk
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.data.record_file import Folder
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.models.cost import Cost
from fedjax_dp.server.base import Stacked

# The mesh axis that clients are divided over, and the axis of a chunk that is vmapped.
AXIS = "clients"
CHUNK_AXIS = "chunk"
# So many values as large as a client's largest are live at once.
_LIVE_VALUES = 8
# Client states that fill a cache narrow no chunk below so many clients.
_STATES_PER_CHUNK = 16
# A client computed alone costs up to so many times as much as in a chunk; computing clients alone
# must reduce the cost to this share.
_ALONE_COST, _WORTHWHILE = 16, 0.5
# With fewer clients per device, waiting costs more than several devices save.
_CLIENTS_PER_DEVICE = 4


class EqualWork(NamedTuple):
    """The same local training of all clients, known before a round is compiled."""

    size: int  # The number of examples of each client, at least 1.
    batch_size: float  # The field of `LocalConfig`.
    num_epochs: float  # The field of `LocalConfig`.
    num_steps: float | None  # The field of `LocalConfig`, or None.

    @classmethod
    def of(cls, sizes: np.ndarray, hyper: Hyper) -> "EqualWork | None":
        """Describes the work of clients of such sizes by such numbers; None if it differs."""
        local = hyper.local
        if hyper.factors.keys() & {f"local.{name}" for name in cls._fields}:
            return None
        numbers = local.batch_size, local.num_epochs, local.num_steps
        is_equal = sizes.min() == sizes.max() > 0 and all(np.ndim(x) == 0 for x in numbers)
        if not is_equal:
            return None
        # As a round traces them.
        batch, epochs, steps = (None if x is None else float(np.float32(x)) for x in numbers)
        assert batch is not None and epochs is not None
        return cls(int(sizes[0]), batch, epochs, steps)

    def fixed(self, hyper: Hyper) -> Hyper:
        """Writes the numbers into those of a round, as constants of its program."""
        known = {name: getattr(self, name) for name in ("batch_size", "num_epochs", "num_steps")}
        own = {
            name: np.asarray(value, getattr(hyper.local, name).dtype)
            for name, value in known.items()
            if value is not None
        }
        return hyper._replace(local=hyper.local._replace(**own))


class Layout(NamedTuple):
    """The static choices of a round.

    Attributes:
      chunk: the number of clients that are vmapped together.
      mesh: the devices that share the cohort, or None for one device, with a second axis if they
        divide the model; an `AbstractMesh` is for draws alone.
      has_spare_slots: whether devices have twice the slots of an even division of clients, so that
        work can be balanced; not if the whole stack of updates is held.
      alone_above: clients with more local steps than this are computed one by one, before the
        chunks, which then do not wait for them; None for no client.
      splits_longest: whether all devices train each client together that has more local steps than
        the mean device, before all others, each with a share of every batch.
      arithmetic: how products and convolutions are computed.
      equal_work: the local training that all clients do, by which the compiler knows the length of
        loops; rounds by other numbers need a layout without it. None if it is not known.
      fewest_clients: the fewest clients of a round, by which the compiler knows how many chunks
        of equal work there are, if they fill all slots but those of the last chunk.
    """

    chunk: Count = 1
    mesh: Mesh | AbstractMesh | None = None
    has_spare_slots: bool = False
    alone_above: Index | None = None
    splits_longest: bool = False
    arithmetic: Arithmetic = Arithmetic()
    equal_work: EqualWork | None = None
    fewest_clients: int = 0

    @property
    def num_devices(self) -> int:
        """The number of devices, or of groups that divide the model, that share the cohort."""
        return 1 if self.mesh is None else self.mesh.shape[AXIS]

    @property
    def mesh_size(self) -> int:
        """The number of devices, those of a group included."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def divides_model(self) -> bool:
        """Whether groups of devices divide the frozen parameters, see `ModelAxis`."""
        return self.mesh is not None and MODEL_AXIS in self.mesh.axis_names

    @property
    def own_devices(self) -> range:
        """The devices of this process, counted as the mesh does."""
        if self.mesh is None:
            return range(1)
        count = self.num_devices // jax.process_count()
        return range(count * jax.process_index(), count * (jax.process_index() + 1))

    def clients_per_device(self, num_clients: int) -> int:
        """Counts the clients whose state a device holds.

        Args:
          num_clients: the population.

        Returns:
          The number; the last device may hold fewer.
        """
        return -(-num_clients // self.num_devices)

    def slots_per_device(self, participation: Participation, is_owned: bool = False) -> int:
        """Counts the slots of a device.

        Args:
          participation: the sampling of clients.
          is_owned: whether each client goes to the device that holds its state.

        Returns:
          A multiple of the chunk.
        """
        slots = -(-participation.capacity // self.num_devices)
        if is_owned:
            owned = self.clients_per_device(participation.num_clients)
            slots = min(participation.capacity, owned)
        elif self.has_spare_slots:
            slots = min(participation.capacity, 2 * slots)
        if self.splits_longest:
            slots += self.num_devices - 1
        if self.has_singles:
            slots += self.chunk
        return -(-slots // self.chunk) * self.chunk

    def usual_slots(self, participation: Participation) -> int:
        """Counts the slots of a device that are enough for nearly every cohort.

        Args:
          participation: the sampling of clients.

        Returns:
          A multiple of the chunk, enough for twice the expected clients.
        """
        usual = power_of_two(2 * participation.cohort_size / self.num_devices)
        usual = -(-usual // self.chunk) * self.chunk
        return min(usual, self.slots_per_device(participation, is_owned=True))

    def on_all_devices(self, tree: PyTree) -> PyTree:
        """Copies traced arrays to every device, so that every process can read them.

        Args:
          tree: traced arrays.

        Returns:
          The same arrays.
        """
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    @property
    def has_singles(self) -> bool:
        """Whether clients may come before the chunks, which begin at a multiple of their width."""
        return self.alone_above is not None or self.splits_longest

    def fills_chunks(self, num_slots: int) -> bool:
        """Checks whether each round is known to have a client in each chunk of slots.

        Args:
          num_slots: the slots of a device.

        Returns:
          False if that depends on the draw.
        """
        if self.equal_work is None or self.has_singles:
            return False
        # Devices share clients out, so that one may have none.
        fewest = self.fewest_clients if self.mesh is None else 0
        return num_slots == self.chunk or num_slots - self.chunk < fewest

    def num_split(self, steps: jax.Array) -> jax.Array:
        """Counts the clients of a cohort that all devices train together.

        Args:
          steps: the local steps of each client, `[clients]`.

        Returns:
          How many have more steps than the mean device; fewer than there are devices.
        """
        if not self.splits_longest:
            return jnp.int32(0)
        # Neither sum overflows unless the mean does.
        mean = jnp.sum(steps // self.num_devices)
        mean += jnp.sum(steps % self.num_devices) // self.num_devices
        return jnp.minimum(jnp.sum(steps > mean, dtype=jnp.int32), self.num_devices - 1)

    def is_alone(self, steps: jax.Array) -> jax.Array:
        """Marks the clients that are computed one by one.

        Args:
          steps: the local steps of each client.

        Returns:
          Flags of the same shape.
        """
        if self.alone_above is None:
            return jnp.zeros(jnp.shape(steps), bool)
        return steps > self.alone_above


def alone_above(steps: np.ndarray, chunk: int, share: float) -> int | None:
    """Chooses, from clients' steps `[clients]`, above how many one is computed alone; or None."""
    ordered = np.sort(np.asarray(steps, np.int64))[::-1]
    # The number of clients of the population that a chunk of a cohort spans.
    width = max(1, round(chunk / share))
    alone = min(chunk, _ALONE_COST)

    def cost(count: int) -> float:
        return share * (alone * ordered[:count].sum() + width * ordered[count::width].sum())

    counts = [0, *(2**i for i in range(len(ordered).bit_length()) if 2**i < len(ordered))]
    best = min(counts, key=cost)
    if chunk == 1 or best == 0 or cost(best) > _WORTHWHILE * cost(0):
        return None
    return int(ordered[best])


class Trial(NamedTuple):
    """The seconds that a layout takes.

    Attributes:
      clients_per_chunk: the layout.
      seconds: those of a round, the better of two.
      compile_seconds: those of its compilation.
    """

    clients_per_chunk: int
    seconds: float
    compile_seconds: float


class KeptTrials(Protocol):
    """Trials that outlast a process, of this machine and these versions alone."""

    def read(self, work: Mapping[str, str], chunks: Sequence[int]) -> tuple[Trial, ...] | None:
        """Reads trials.

        Args:
          work: all that speed depends on besides machine and versions.
          chunks: the candidates, numbers of clients per chunk.

        Returns:
          A trial for each of the candidates, fastest first; None if there are none.
        """
        ...

    def write(self, work: Mapping[str, str], trials: Sequence[Trial]) -> None:
        """Keeps trials for later processes.

        Args:
          work: as for `read`.
          trials: a trial for each candidate.
        """
        ...


class Tuned(NamedTuple):
    """A number of clients per chunk that two rounds of each candidate choose, by their time.

    Attributes:
      kept: where trials are kept from one process to the next, such as `io.TrialFiles`; None keeps
        them within this process.
    """

    kept: KeptTrials | None = None


class ExecutionConfig(NamedTuple):
    """Configures the layout of rounds. No choice here changes a result beyond rounding.

    Attributes:
      clients_per_chunk: the number of clients that are vmapped together, on which memory depends.
        "auto" chooses by what the backend reports (`core.choices`), and by the arithmetic and
        memory of a client; "tuned" times two rounds with that choice and its neighbours, once per
        process for each kind of work, and `Tuned(TrialFiles(folder))` once for all processes.
      devices: the number of devices that share the cohort, or the devices themselves; None is one.
        "auto" takes all devices if each gets a few clients, else one. Several processes use all
        devices of all of them.
      placement: "device" holds all examples and client states in device memory; "host" gathers
        those of each cohort on the host, before its round; "disk" does the same, with client states
        in a file, where clients that never participated take no space; "auto" is "device" if
        examples are not on disk and all fits, else "host".
      rounds_per_call: the number of rounds of one compiled call.
      folder: the folder of the file of client states; None if `stored_in` names it later. A new
        state in the same folder overwrites those of any other.
      model_axis: the division of frozen parameters over groups of `devices`; None if each device
        holds all of them.
      split_clients: whether a client with more local steps than the mean device of its round is
        trained by all devices, each with a share of every batch; others would wait for it. Only the
        order of sums and draws of dropout differ. No effect on one device.
      products: the products of gradients of records, which are bounded in float32: "exact", or
        "split" into three products of bfloat16 with sums in float32, for GPUs and TPUs, with an
        error of about 2^-15 of what is multiplied; the bound of a clipped sum holds as well. "auto"
        is "split" where that is faster by the measured speeds, else "exact".
      measured: speeds of this GPU or TPU, as `io.read_measured` reads them, which automatic choices
        follow.
      debug: whether rounds are looked into: one client at a time on one device, and the first
        client, local step and array that is not finite is named by a `NotFinite` error. Results are
        those of other rounds, but for rounding. Nothing that it says is private.
    """

    clients_per_chunk: Count | str | Tuned = "auto"
    devices: int | str | Sequence[jax.Device] | None = "auto"
    placement: str = "auto"
    rounds_per_call: int = 10
    folder: Folder | None = None
    model_axis: ModelAxis | None = None
    split_clients: bool = False
    products: Literal["exact", "split", "auto"] = "exact"
    measured: Measured | None = None
    debug: bool = False

    def validate(self) -> None:
        """Checks every choice.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        argument_checks.check_fields(self)
        if isinstance(self.clients_per_chunk, str):
            checks.one_of("clients_per_chunk", self.clients_per_chunk, ("auto", "tuned"))
        elif not isinstance(self.clients_per_chunk, Tuned):
            checks.whole("clients_per_chunk", self.clients_per_chunk)
        checks.one_of("placement", self.placement, ("auto", "device", "host", "disk"))
        checks.whole("rounds_per_call", self.rounds_per_call)
        here = facts()
        checks.one_of("products", self.products, ("exact", "split", "auto"))
        missing = no_split(here) if self.products == "split" else None
        checks.require(missing is None, "products", f"be 'exact' or 'auto': {missing}", "split")
        if self.measured is not None:
            rule = "be None on a CPU, whose constants are measured"
            checks.require(here.backend != "cpu", "measured", rule, self.measured.device)
            rule = f"be of this device, {here.device}"
            is_same = here.device in ("", self.measured.device)
            checks.require(is_same, "measured", rule, self.measured.device)
        if self.debug:
            rule = "be 'auto' or 1 with debug, which runs one client at a time"
            fits = self.clients_per_chunk in ("auto", 1)
            checks.require(fits, "clients_per_chunk", rule, self.clients_per_chunk)
            rule = "be 'auto' or 1 with debug, which runs on one device"
            is_one = self.devices in (None, "auto", 1) and not is_distributed()
            checks.require(is_one, "devices", rule, self.devices)
        num_devices = len(self.device_list())
        if self.model_axis is not None:
            self.model_axis.validate(num_devices)
            rule = "be False where groups of devices divide the model"
            checks.require(not self.split_clients, "split_clients", rule, True)
        if not is_distributed():
            return
        check_processes(self.model_axis, self.tuned, self.placement, self.split_clients)
        rule = (
            f"be 'auto' or {jax.device_count()}, the devices of all {jax.process_count()} processes"
        )
        checks.require(num_devices == jax.device_count(), "devices", rule, self.devices)

    @property
    def tuned(self) -> Tuned | None:
        """The way the clients per chunk are timed; None if they are not."""
        if isinstance(self.clients_per_chunk, Tuned):
            return self.clients_per_chunk
        return Tuned() if self.clients_per_chunk == "tuned" else None

    def device_list(self) -> list[Any]:
        """Lists the devices that share the cohort.

        Returns:
          One or more JAX devices.

        Raises:
          ValueError: if more devices are asked for than there are.
        """
        if self.devices is None:
            return jax.devices()[:1]
        if isinstance(self.devices, str):
            checks.one_of("devices", self.devices, ("auto",))
            return jax.devices()
        if isinstance(self.devices, int):
            checks.whole("devices", self.devices)
            checks.require(
                self.devices <= jax.device_count(),
                "devices",
                f"be at most {jax.device_count()}, the number of {jax.default_backend()} devices",
                self.devices,
            )
            return jax.devices()[: self.devices]
        checks.require(len(self.devices) > 0, "devices", "name a device", self.devices)
        return list(self.devices)

    def for_cohort(self, cohort_size: float) -> "ExecutionConfig":
        """Decides which devices share a cohort, if `devices` is "auto".

        Args:
          cohort_size: the expected number of clients in a round.

        Returns:
          The configuration with `devices` decided.
        """
        if not isinstance(self.devices, str):
            return self
        if self.debug:
            return self._replace(devices=None)
        count, axis = len(self.device_list()), self.model_axis
        groups = count if axis is None else count // axis.size
        least = None if axis is None else axis.size
        is_worthwhile = is_distributed() or cohort_size >= _CLIENTS_PER_DEVICE * groups
        return self._replace(devices=count if is_worthwhile else least)

    def clients_of_device(self, cohort_size: float, num_devices: int) -> int:
        """Counts the clients of a round that one device computes, which a chunk may hold.

        Args:
          cohort_size: the expected number of clients in a round.
          num_devices: the number of devices, or of groups that divide the model.

        Returns:
          The mean number, at least 1. It is rounded on a CPU, and rounded up elsewhere, where a
          client that no chunk has room for costs a whole one.
        """
        mean = cohort_size / num_devices
        return max(1, round(mean) if self.choices().has_caches else int(np.ceil(mean)))

    def chunk(self, cost: Callable[[], Cost], clients_per_device: int, own_bytes: int = 0) -> int:
        """Chooses the clients per chunk.

        Args:
          cost: returns the cost of one pass through a client's loop body; called only for "auto"
            and "tuned".
          clients_per_device: the expected clients of one device, the widest chunk.
          own_bytes: the bytes of one client's state.

        Returns:
          The number of clients that are vmapped together.
        """
        if self.debug:
            return 1
        if not isinstance(self.clients_per_chunk, str | Tuned):
            return min(int(self.clients_per_chunk), clients_per_device)
        chosen, of_one = self.choices(), cost()
        passes = max(1.0, of_one.products / chosen.products_per_pass)
        busy = passes * chosen.operations_per_chunk / max(1.0, of_one.operations)
        busy = min(busy, chosen.convolved_per_chunk / max(1.0, of_one.convolved))
        fitting = chosen.chunk_bytes / max(1, _LIVE_VALUES * of_one.largest_bytes)
        widest = min(chosen.widest_chunk, clients_per_device)
        if own_bytes and chosen.cached_state_bytes is not None:
            widest = min(widest, max(_STATES_PER_CHUNK, chosen.cached_state_bytes // own_bytes))
        width = int(np.clip(min(busy, fitting), 1, widest))
        if chosen.has_caches:
            return width
        # As few chunks, of equal width: an empty slot of an accelerator costs as much as a client.
        return -(-clients_per_device // -(-clients_per_device // width))

    def is_resident(self, data: FederatedData, state_bytes: int = 0) -> bool:
        """Decides whether all examples and client states are held in device memory.

        Args:
          data: the population's store.
          state_bytes: the bytes of the client states of one device.

        Returns:
          True for device memory, False to stream cohorts from the host.
        """
        if self.placement != "auto":
            return self.placement == "device"
        chosen = self.choices()
        on_disk = any(is_on_disk(array) for array in data.examples.values())
        is_small = data.num_bytes <= chosen.resident_bytes
        return not on_disk and is_small and state_bytes <= chosen.state_bytes

    def choices(self) -> Choices:
        """Returns what "auto" stands for on this backend; all processes have to ask."""
        return choices(facts()._replace(memory=memory_per_device()), self.measured)

    def arithmetic(self) -> Arithmetic:
        """Returns how products and convolutions are computed."""
        chosen = choices(facts(), self.measured)
        products = chosen.products if self.products == "auto" else self.products
        return Arithmetic(products, chosen.convolutions)


def power_of_two(count: float) -> int:
    """Rounds a number up to a power of two."""
    return 1 << max(int(np.ceil(count)) - 1, 0).bit_length()


def check_processes(model_axis: Any, tuned: Any, placement: str, split_clients: bool) -> None:
    """Refuses what several processes do not do, None and False being nothing."""
    rule = "be left out for several processes, which do not divide a model"
    checks.require(model_axis is None, "model_axis", rule, model_axis)
    rule = "be a number or 'auto' for several processes, which would measure different times"
    checks.require(not tuned, "clients_per_chunk", rule, "tuned")
    rule = "not be 'disk' for several processes, each of which would have a file of its own"
    checks.require(placement != "disk", "placement", rule, placement)
    require_split(not split_clients, "for several processes")


def require_split(condition: bool, rule: str) -> None:
    """Requires a condition of splitting clients."""
    checks.require(condition, "split_clients", f"be False {rule}", True)


def require_on_each_device(algorithm: FederatedAlgorithm, *, is_resident: bool) -> None:
    """Requires that each device has all that a share of any client's batches needs."""
    name, has_state = algorithm.name, algorithm.client_state is not None
    where = "unless examples are in device memory, as a device gets those of its own slots"
    require_split(is_resident, where)
    require_split(not has_state, f"for {name}, whose clients have states, each on one device")
    is_stacked = isinstance(algorithm.aggregator, Stacked)
    require_split(not is_stacked, f"for {name}, which holds all updates of a cohort side by side")
