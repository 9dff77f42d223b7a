"""The loop over steps of one client, with any optimiser, any sampler and any gradient rule."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.clients import batches, gradients
from fedjax_dp.clients.base import (
    LocalConfig,
    LocalResult,
    LocalTrainer,
    Objective,
    TrainingMetrics,
)
from fedjax_dp.clients.batches import Share, WholeBatches
from fedjax_dp.clients.client_data import ClientData, PublicClient
from fedjax_dp.clients.optimizers import Optimizer, check_noised, ranges_of
from fedjax_dp.clients.transforms import UpdateContext, UpdateTransform, declared
from fedjax_dp.core import checks, masks, sums, trees
from fedjax_dp.core.backend import backend
from fedjax_dp.core.inspection import note_finite
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.made import exchanged
from fedjax_dp.core.materialize import as_stored
from fedjax_dp.core.messages import Form
from fedjax_dp.core.trees import library_promotion
from fedjax_dp.data import sampling
from fedjax_dp.data.augmentation import Augmentation
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import RecordClaim


def first_of(config: LocalConfig) -> LocalConfig:
    """Takes the numbers of one client, with a learning rate above 0."""
    return config.row(0)._replace(learning_rate=jnp.float32(1))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingLoop:
    """The training of `local_trainer`: a loop over steps, as a value that is called."""

    model: Model
    rule: gradients.GradientRule
    sampler: sampling.Sampler
    optimizer: Optimizer
    transforms: tuple[UpdateTransform, ...]
    micro_batch_size: int | None
    max_batch_size: int
    widest: int | None
    whole: WholeBatches | None = None
    is_compensated: bool = False
    augmentation: Augmentation | None = None

    def trainer(self, config: LocalConfig) -> LocalTrainer:
        """Builds the trainer of all parts, with its claim."""
        first = first_of(config)
        is_sgd = self.optimizer is optax.sgd and not config.optimizer
        sends: Any = "gradients" if is_sgd else "delta"
        return LocalTrainer(
            self,
            config,
            self.num_steps,
            None if self.rule.event is None else RecordClaim((self.event,)),
            sends="transformed" if self.transforms else sends,
            check_noised=partial(check_noised, self.model, lambda: self.optimizer_of(first)),
            reading_whole=lambda whole: self.reading_whole(whole).trainer(config),
            ranges=ranges_of(self.optimizer),
        )

    def reading_whole(self, whole: WholeBatches) -> "TrainingLoop":
        """Returns the same training with steps on all records, where the batch size says so."""
        rule = "keep examples apart if whole batches are read by micro-batches"
        checks.require(not self.model.mixes_examples, "model", rule, self.model.name)
        draws_as_asked = int(self.sampler.nominal_size(3, 2)) == 2
        rule = "draw batches of a size that can be chosen, if first batches are to have one"
        checks.require(not whole.largest or draws_as_asked, "sampler", rule, self.sampler.name)
        largest = max(self.max_batch_size, whole.largest)
        return dataclasses.replace(self, whole=whole, max_batch_size=largest)

    def compensated(self, micro_batch_size: int) -> "TrainingLoop":
        """Returns the same training with parameters in two floats, which lose no small step.

        It sums so many gradients at most without compensation.
        """
        rule = "be None for noise on minimisers, whose bound is that of the records as they are"
        checks.require(self.augmentation is None, "augmentation", rule, self.augmentation)
        most = min(self.micro_batch_size or micro_batch_size, micro_batch_size)
        return dataclasses.replace(self, micro_batch_size=most, is_compensated=True)

    def optimizer_of(self, config: LocalConfig) -> optax.GradientTransformation:
        """Builds the optimiser from a client's numbers."""
        if isinstance(self.optimizer, optax.GradientTransformation):
            return self.optimizer
        return self.optimizer(config.learning_rate, **dict(config.optimizer))

    def num_steps(self, size: Any, config: LocalConfig) -> Any:
        """Counts the steps of a client of some size."""
        if config.num_steps is not None:
            steps = config.num_steps
        else:
            batch = config.batch_size
            if not self.sampler.varies:
                batch = jnp.asarray(batch, jnp.int32)
            per_epoch = self.sampler.num_steps_per_epoch(size, batch)
            per_epoch = jnp.asarray(per_epoch, jnp.float32)
            steps = jnp.ceil(per_epoch * jnp.asarray(config.num_epochs, jnp.float32))
        return jnp.where(size > 0, steps, 0).astype(jnp.int32)

    def known_work(self, client: ClientData, config: LocalConfig) -> "_KnownWork | None":
        """Counts what all clients do alike, before the program is compiled; None if unknown.

        An empty slot of a round does it too; what it computes is not used.
        """
        numbers = config.batch_size, config.num_epochs, config.num_steps
        known = [x for x in numbers if x is not None]
        if client.common_size is None or any(map(checks.is_traced, known)):
            return None
        if not np.all(np.isfinite(known)):
            return None
        sampler, size = self.sampler, np.int32(client.common_size)
        asked = numbers[0] if sampler.varies else np.int32(numbers[0])
        with jax.ensure_compile_time_eval():
            steps = int(self.num_steps(size, config))
            batch = np.asarray(sampler.nominal_size(size, asked))
        # The sampler of a user may draw fewer than it says.
        is_known = sampler.made is not None and not exchanged(sampler)
        fewest = int(sampler.min_drawn(client.common_size, numbers[0])) if is_known else 0
        return _KnownWork(steps, fewest, int(size), batch, is_known)

    def event(self, size: int, config: LocalConfig) -> dp_accounting.DpEvent:
        """Returns the event of one run for a record of a client of some size."""
        assert self.rule.event is not None
        is_whole = self.whole is not None and bool(np.isinf(config.batch_size))
        if is_whole:
            config = config._replace(batch_size=max(size, 1))
        steps = int(self.num_steps(np.int32(size), config))
        if steps == 0:
            return dp_accounting.NoOpDpEvent()
        one = self.rule.event(config)
        if not is_whole:
            one = self.sampler.event(one, int(size), float(config.batch_size))
        return dp_accounting.SelfComposedDpEvent(one, steps)

    def __call__(
        self,
        start,
        client: ClientData | PublicClient,
        config: LocalConfig,
        key,
        *,
        gradient_transform=None,
        update_transform=None,
        objective: Objective = Objective(),
    ) -> LocalResult:
        """Trains one client from `start` on."""
        is_private = self.rule.event is not None
        more = () if update_transform is None else (update_transform,)
        transforms = self.transforms + declared("update_transform", more, is_private=is_private)
        event = self.event if is_private else None
        reporter, client = client, client.read_by("local training", event)
        share = Share(client.batch_axis)
        if not share.is_whole:
            _require_divisible(self.model, objective.until)
        until = objective.until
        known = self.known_work(client, config) if until is None and self.whole is None else None
        is_whole = None
        if self.whole is not None:
            is_whole = batches.is_whole(config)
            config = batches.with_size(config, client.size)
        if not self.sampler.varies:
            config = config._replace(batch_size=jnp.asarray(config.batch_size, jnp.int32))
        nominal = self.sampler.nominal_size(client.size, config.batch_size)
        config = config._replace(batch_size=nominal)
        optimizer = self.optimizer_of(config)
        if gradient_transform is not None:
            optimizer = optax.chain(gradient_transform, optimizer)
        steps = self.num_steps(client.size, config) if known is None else jnp.int32(known.steps)
        keys = _Keys(*(fold(key, purpose) for purpose in _PURPOSES))
        if self.augmentation is not None:
            keys = keys._replace(augmentation=fold(key, Purpose.AUGMENTATION))
        parts = self.parts(start, client, share)
        ahead = None
        if known is not None and known.is_as_made:
            ahead = self.ahead(known, keys, client.limit, parts[0])
        run = _Run(
            client,
            config,
            keys,
            steps,
            optimizer,
            objective,
            is_whole,
            share,
            *parts,
            known is not None and share.is_whole and known.fewest == parts[0],
            ahead,
        )
        # The last gradient is dead code, which costs nothing, if no transform reads it.
        local = _Local(
            jnp.int32(0),
            start,
            optimizer.init(start),
            self.sampler.init(client.limit),
            _nothing_read(),
            trees.zeros_like(start),
            trees.zeros_like(start) if self.is_compensated else None,
        )

        def continues(local):
            is_left = local.step < steps
            # The gradient transform is the first link of the chain.
            return is_left if until is None else is_left & ~until(local.optimizer[0])

        step = jax.named_call(partial(self.step, run), name="local_step")
        if known is None:
            local = jax.lax.while_loop(continues, step, local)
        elif known.steps == 1 and backend() == "gpu":
            # Without a loop all clients share the server's parameters, which are not copied for
            # each. A TPU's convolutions are faster if each has its own.
            local = step(local)
        else:
            local = jax.lax.fori_loop(0, known.steps, lambda _, now: step(now), local)
        is_loop = known is None or known.steps != 1
        delta = trees.subtract(local.params, _apart(start) if is_loop else start)
        form = Form()
        for i, transform in enumerate(transforms):
            # A key for each place in the chain: no two noises of a client are the same.
            own_key = fold(key, Purpose.CLIENT_NOISE, 0, i)
            context = UpdateContext(local.params, local.gradient, client, config, own_key)
            delta, form = transform(delta, context), transform.form(form)
        norm = trees.l2_norm(as_stored(delta))
        metrics = local.metrics._replace(update_norm=norm, form=form)
        weight = client.size.astype(jnp.float32)
        return LocalResult(delta, local.params, weight, local.step, metrics.reported_by(reporter))

    def parts(self, start: Any, client: ClientData, share: Share) -> tuple[int, int]:
        """Chooses the slots of a draw, and how many a device computes at once."""
        capacity = self.sampler.capacity(client.limit, self.max_batch_size)
        of_device = share.capacity(capacity)
        if self.micro_batch_size is not None:
            return capacity, min(self.micro_batch_size, of_device)
        most = min(self.widest or of_device, of_device)
        copies = 1 if self.augmentation is None else self.augmentation.num_copies
        return capacity, batches.size_for(self.model, start, client, most, copies)

    def ahead(
        self, known: "_KnownWork", keys: "_Keys", limit: int, capacity: int
    ) -> "_Ahead | None":
        """Draws for all steps before the first of them; None if they are too many."""
        draws = self.sampler.draws_ahead(
            keys.batch, known.steps, known.size, known.batch_size, limit, capacity
        )
        if draws is None:
            return None
        steps = jnp.arange(known.steps)
        return _Ahead(draws, jax.vmap(partial(fold, keys.model))(steps))

    def step(self, run: "_Run", local: "_Local") -> "_Local":
        """Takes one step: draws a batch, sums its gradients, releases them, updates parameters."""
        i = local.step

        def any_of(flag):
            return run.client.widest((flag & (i < run.num_steps)).astype(jnp.int32)) > 0

        # With a whole batch the draw is not read, and costs least if it is small.
        drawn = run.config.batch_size
        if run.is_whole is not None:
            drawn = jnp.where(run.is_whole, jnp.ones_like(drawn), drawn)
        if run.ahead is not None:
            drawing, draw = local.sampler, jax.tree.map(lambda x: x[i], run.ahead.draws)
        else:
            drawing, draw = self.sampler.draw(
                local.sampler,
                run.keys.batch,
                i,
                run.client.size,
                drawn,
                run.client.limit,
                run.capacity,
                any_of,
            )
        if run.is_full:
            draw = draw._replace(is_real=jnp.ones_like(draw.is_real))
        count, overflow = jnp.sum(draw.is_real), draw.overflow
        num_copies: Any = 1
        if run.is_whole is not None:
            count = jnp.where(run.is_whole, run.client.size, count)
            overflow = jnp.where(run.is_whole, 0, overflow)
            num_copies = jnp.where(run.is_whole, self.num_copies, 1)
        # A finished client waits for the others of its chunk: it must not request more passes.
        passes: Any = 1
        if run.is_looped:
            counts = run.share.counts(count)
            passes = jnp.where(i < run.num_steps, -(-counts // run.micro) * num_copies, 0)
        summed = self.gradient_sum(run, local, run.share.of(draw), run.share.own(passes))
        noise_key = fold(run.keys.noise, i)
        gradient = self.rule.release(summed.gradient, count, run.config, noise_key)
        if run.objective.value is not None and self.rule.event is None:
            loss = summed.loss / jnp.maximum(count, 1).astype(summed.loss.dtype)
            slope, moved = jax.grad(run.objective.value, (0, 1))(loss, local.params)
            moved = jax.tree.map(trees.at_least_float32, moved)
            gradient = trees.add(trees.scale(gradient, slope), moved)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, local.params)
        where = {"round": run.client.round, "client": run.client.index, "local_step": i}
        note_finite("the gradient", gradient, **where)
        gradient = run.masked(gradient)
        with library_promotion():
            updates, opt_state = run.optimizer.update(gradient, local.optimizer, summed.params)
        # Traced numbers are float32, and would widen the state of a narrow model.
        opt_state = trees.cast_like(opt_state, local.optimizer)
        # Decay and noisy optimisers move parameters without a gradient.
        updates = run.masked(_of_weights(self.model, updates))
        with library_promotion():
            params, low = optax.apply_updates(summed.params, updates), None
        note_finite("the model after the step", params, **where)
        if self.is_compensated:
            total = sums.add(jax.tree.map(sums.Sum, summed.params, local.low), updates)
            params, low = sums.parts(total)
        read = TrainingMetrics(
            loss_sum=summed.loss,
            num_read=count,
            num_clipped=summed.clipped,
            num_computed=run.micro * jnp.sum(run.client.widest(jnp.asarray(passes, jnp.int32))),
            num_overflow=overflow,
            update_norm=jnp.float32(0),
        )
        metrics = trees.add(local.metrics, read)
        return _Local(i + 1, params, opt_state, drawing, metrics, gradient, low)

    def gradient_sum(self, run: "_Run", local: "_Local", draw: sampling.Draw, passes: Any) -> Any:
        """Sums the gradient rule over the micro-batches of one draw, of which this is a share."""
        padding = run.num_micro * run.micro - len(draw.indices)
        indices = jnp.pad(draw.indices, (0, padding))
        is_real = jnp.pad(draw.is_real, (0, padding))
        ahead, step = run.ahead, local.step
        key = run.share.key(fold(run.keys.model, step) if ahead is None else ahead.keys[step])
        micro_batch = self.rule.micro_batch
        if run.objective.value is not None and self.rule.event is not None:
            micro_batch = partial(micro_batch, value=run.objective.value)

        def part(i, params):
            block = i if run.is_whole is None else jnp.where(run.is_whole, i // self.num_copies, i)
            rows = jax.lax.dynamic_slice_in_dim(indices, block * run.micro, run.micro)
            real = jax.lax.dynamic_slice_in_dim(is_real, block * run.micro, run.micro)
            if run.is_whole is not None:
                in_order = block * run.micro + jnp.arange(run.micro, dtype=rows.dtype)
                in_order = run.share.positions(in_order)
                rows = jnp.where(run.is_whole, in_order, rows)
                real = jnp.where(run.is_whole, in_order < run.client.size, real)
            batch = run.client.gather(rows)
            if self.whole is not None and run.is_whole is not None:
                copy = i % self.num_copies
                batch = self.whole.copies(batch, rows, copy, run.is_whole, run.keys.copies)
            if self.augmentation is not None:
                own = fold(run.keys.augmentation, step)
                if run.is_whole is not None:
                    own = fold(own, jnp.where(run.is_whole, i % self.num_copies, 0))
                is_private = self.rule.event is not None
                batch = batches.augmented(
                    self.augmentation, batch, rows, own, is_private=is_private
                )
            return micro_batch(params, batch, real, fold(key, i), run.config)

        if not run.is_looped:
            return part(0, local.params)

        def body(i, carry):
            total, params = carry
            one = part(i, params)
            return sums.add(total, one._replace(params=None)), one.params

        shapes = jax.eval_shape(part, 0, local.params)._replace(params=None)
        carry = sums.zeros_like(shapes), local.params
        total, params = jax.lax.fori_loop(0, passes, body, carry)
        summed = run.share.value(total)
        if self.num_copies > 1 and run.is_whole is not None:
            # A record counts once, by the mean over its copies, whose norm has the same bound.
            summed = trees.scale(summed, jnp.where(run.is_whole, 1 / self.num_copies, 1.0))
        return summed._replace(params=params)

    @property
    def num_copies(self) -> int:
        """Counts the copies of each record in a whole batch."""
        return 1 if self.whole is None else self.whole.num_copies


def _apart(start: Any) -> Any:
    """Reads the first parameters anew after a loop, whose first carry would have to be copied."""
    return start if backend() == "cpu" else jax.lax.optimization_barrier(start)


# In the order of `_Keys`.
_PURPOSES = Purpose.BATCH, Purpose.RECORD_NOISE, Purpose.MODEL, Purpose.COPIES


class _Keys(NamedTuple):
    """The root keys of a client's random draws in training."""

    batch: Any
    noise: Any
    model: Any
    copies: Any
    augmentation: Any = None


class _KnownWork(NamedTuple):
    """The local training that all clients do, known before the program is compiled."""

    steps: int
    fewest: int  # The fewest examples of a batch.
    size: int  # Of each client.
    batch_size: np.ndarray  # The nominal one.
    is_as_made: bool  # The sampler.


class _Ahead(NamedTuple):
    """What all steps draw, `[steps, ...]`: batches, and keys of the model."""

    draws: sampling.Draw
    keys: Any


class _Run(NamedTuple):
    """The values that all steps of one client's training share."""

    client: ClientData
    config: LocalConfig
    keys: "_Keys"
    num_steps: jax.Array
    optimizer: optax.GradientTransformation
    objective: Objective
    is_whole: jax.Array | None
    share: Share
    capacity: int
    micro: int
    # Whether each slot of each draw is known to hold an example.
    is_full: bool = False
    ahead: "_Ahead | None" = None

    @property
    def num_micro(self) -> int:
        """Counts the micro-batches of a device's share of a full draw."""
        return -(-self.share.capacity(self.capacity) // self.micro)

    @property
    def is_looped(self) -> bool:
        """Whether a step may need more than one micro-batch."""
        return self.num_micro > 1 or self.is_whole is not None or not self.share.is_whole

    def masked(self, tree: Any) -> Any:
        """Sets entries that are not trained to zero."""
        mask = self.objective.mask
        return tree if mask is None else masks.applied(mask, tree)


class _Local(NamedTuple):
    """The carry of local training from step to step; `low` is what rounding lost of parameters."""

    step: jax.Array
    params: Any
    optimizer: Any
    sampler: Any
    metrics: TrainingMetrics
    gradient: Any
    low: Any = None


def _require_divisible(model: Model, until: Any) -> None:
    """Refuses training whose batches several devices cannot divide."""
    rule = "keep examples apart and have no buffers where devices divide a client's batches"
    is_apart = not model.mixes_examples and not model.buffer_keys
    checks.require(is_apart, "model", rule, model.name)
    rule = "be None where devices divide a client's batches, as each has to take the same steps"
    checks.require(until is None, "until", rule, until)


def _nothing_read() -> TrainingMetrics:
    none = jnp.float32(0), jnp.int32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0), jnp.float32(0)
    return TrainingMetrics(*none)


def _of_weights(model: Model, updates: Any) -> Any:
    """Leaves buffers out: decay and proximal terms are for weights, training refreshes buffers."""
    if not model.buffer_keys:
        return updates
    is_buffer = model.is_buffer(updates)
    return jax.tree.map(lambda u, flag: jnp.zeros_like(u) if flag else u, updates, is_buffer)
