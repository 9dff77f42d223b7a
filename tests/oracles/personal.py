"""Personal models and tickets by hand, on `clients`: a list of `(x, y)` in float64."""

from typing import NamedTuple

import numpy as np

from fedjax_dp.core.keys import Purpose
from oracles import local, logistic

SECOND = Purpose.PERSONAL


def trainer(clients, replay, settings):
    """Plain SGD as `train(start, round, client, ...)`, of some entries, with a further gradient."""

    def train(start, r, i, *, mask=1.0, pull=lambda theta: 0.0, purpose=None, epochs=None):
        x, y = clients[i]
        epochs = settings.num_epochs[i] if epochs is None else epochs
        steps = local.num_steps(len(y), settings.batch_size[i], epochs)
        theta = start.copy()
        for rows in replay.batches(r, i, steps, purpose):
            gradient = np.zeros_like(theta)
            if len(rows):
                gradient = logistic.gradients(theta, x[rows], y[rows]).mean(axis=0)
            theta -= settings.learning_rate[i] * mask * (gradient + pull(theta))
        return theta

    return train


def at_home(theta, run, rounds, train, is_home, *, head_epochs=None):
    """FedBN and FedPer, and FedRep where the head is fitted first."""
    own = np.tile(theta, (len(run.clients), 1))
    for r in range(rounds):
        moved, total = np.zeros_like(theta), 0.0
        for i in run.replay.cohort(r):
            start = np.where(is_home, own[i], theta)
            if head_epochs is None:
                end = train(start, r, i)
            else:
                fitted = train(start, r, i, mask=is_home, purpose=SECOND, epochs=head_epochs)
                end = train(fitted, r, i, mask=~is_home)
            own[i] = end
            size = len(run.clients[i][1])
            moved += size * (end - start)
            total += size
        theta = np.where(is_home | (total == 0), theta, theta + moved / max(total, 1))
    return theta, own


def ditto(theta, run, rounds, train, strength, purpose=SECOND):
    """Li and others 2021, algorithm 1, with batches of its own or those of the shared model."""
    own = np.tile(theta, (len(run.clients), 1))
    for r in range(rounds):
        moved, total = np.zeros_like(theta), 0.0
        for i in run.replay.cohort(r):
            size = len(run.clients[i][1])
            moved += size * (train(theta, r, i) - theta)
            total += size
            own[i] = train(
                own[i], r, i, purpose=purpose, pull=lambda v, at=theta: strength * (v - at)
            )
        theta = theta + moved / total if total else theta
    return theta, own


def accuracy(theta, data):
    x, y = data
    return np.mean((x @ theta[1:] + theta[0] > 0) == (y > 0.5)) if len(y) else 0.0


def pruned(mask, theta, rate, target=None):
    """Drops the smallest of the weights alive; the bias is never pruned."""
    alive = [j for j in range(1, len(theta)) if mask[j]]
    count, size = int(np.floor(rate * len(alive) + 1e-9)), len(theta) - 1
    if target is not None:
        count = min(count, int(np.floor(target * size + 1e-9)) - (size - len(alive)))
    count = max(0, min(count, len(alive) - 1))
    left = mask.copy()
    left[sorted(alive, key=lambda j: (abs(theta[j]), j))[:count]] = 0
    return left


def share(mask):
    return 1 - mask[1:].mean()


def sparse_mean(theta, sent, is_masked=True):
    """The mean over those who keep a coordinate; that of before where none do."""
    if not sent:
        return theta, np.zeros(len(theta), bool)
    values, masks = (np.array(part) for part in zip(*sent, strict=True))
    kept = masks.sum(axis=0)
    divisor = kept if is_masked else np.full(len(theta), len(sent))
    mean = (values * masks).sum(axis=0) / np.maximum(divisor, 1)
    return np.where(kept > 0, mean, theta), kept > 0


def lottery_fl(theta, run, rounds, train, rate, target, threshold):
    first, masks = theta, np.ones((len(run.clients), len(theta)))
    for r in range(rounds):
        sent = []
        for i in run.replay.cohort(r):
            start = theta * masks[i]
            size, found = len(run.clients[i][1]), accuracy(start, run.validation[i])
            if size and found > threshold and share(masks[i]) < target:
                masks[i] = pruned(masks[i], start, rate)
                start = first * masks[i]
            end = train(start, r, i, mask=masks[i])
            if size:
                sent.append((end, masks[i]))
        theta, _ = sparse_mean(theta, sent)
    return theta, masks


class Variant(NamedTuple):
    """What FedLTN and its first stage leave open."""

    rewinds: bool = False
    prunes: str = "after"
    distance: str = "norm"
    is_masked_mean: bool = True
    looks_ahead: bool = True


def ticket(run, train, start, mask, r, i, numbers, target, rewound, variant):
    """A client's update in FedLTN: train, prune where that is due, train again; or prune first."""

    def pull_to(anchor):
        def pull(theta):
            if variant.distance == "squared":
                return numbers["strength"] * (theta - anchor)
            distance = np.linalg.norm(theta - anchor)
            return numbers["strength"] * (theta - anchor) / distance if distance else 0.0

        return pull

    def left_of(theta):
        found = accuracy(theta, run.validation[i])
        is_due = found > numbers["accuracy_threshold"] and share(mask) < target
        if is_due and len(run.clients[i][1]):
            return pruned(mask, theta, numbers["prune_rate"], target)
        return mask

    def cut(theta, left):
        if left.sum() == mask.sum():
            return theta
        return (rewound if variant.rewinds else theta) * left

    if variant.prunes == "before":
        left = left_of(start)
        start = cut(start, left)
        return train(start, r, i, mask=left, pull=pull_to(start)), left
    end = train(start, r, i, mask=mask, pull=pull_to(start))
    left = left_of(end)
    if left.sum() < mask.sum():
        end = train(cut(end, left), r, i, mask=left, purpose=SECOND)
    return end, left


def fed_ltn(
    theta,
    run,
    rounds,
    train,
    is_home,
    numbers,
    *,
    variant=Variant(),
    jump_rounds=0,
    jump_target=None,
    score="own",
    inherits_mask=True,
):
    own, masks = np.tile(theta, (len(run.clients), 1)), np.ones((len(run.clients), len(theta)))
    alone, scores = own.copy(), np.full(len(own), -1.0)
    change, first = np.zeros_like(theta), theta
    for r in range(rounds):
        sent = []
        for i in run.replay.cohort(r):
            is_alone = r < jump_rounds
            start = alone[i] if is_alone else np.where(is_home, own[i], theta * masks[i])
            target = jump_target if is_alone else numbers["target"]
            rewound = np.where(is_home, start, first)
            end, masks[i] = ticket(
                run, train, start, masks[i], r, i, numbers, target, rewound, variant
            )
            own[i] = end
            if is_alone:
                alone[i] = end
                if len(run.clients[i][1]):
                    scores[i] = accuracy(end, run.validation[i])
            elif len(run.clients[i][1]):
                sent.append((end, masks[i]))
        if r >= jump_rounds:
            mean, kept = sparse_mean(theta, sent, variant.is_masked_mean)
            mixing, momentum = numbers["mixing"], numbers["momentum"]
            new = mixing * mean + (1 - mixing) * (theta - momentum * change)
            new = np.where(kept & ~is_home, new, theta)
            step = np.where(is_home, 0.0, new - theta)
            theta, change = new, -step if variant.looks_ahead else step
        elif r == jump_rounds - 1 and scores.max() >= 0:
            if score == "all":
                found = [[accuracy(v, data) for data in run.validation] for v in alone]
                scores = np.where(scores >= 0, np.mean(found, axis=1), -1.0)
            best = int(np.argmax(scores))
            theta = first = np.where(is_home, theta, alone[best])
            if inherits_mask:
                masks = np.tile(masks[best], (len(masks), 1))
    return {"params": theta, "own": own, "masks": masks[:, 1:], "alone": alone}
