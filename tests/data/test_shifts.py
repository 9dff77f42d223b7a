"""Structured shifts between clients, against index arithmetic written out."""

import numpy as np
import pytest

from fedjax_dp.data import clusters, federated, partition, shifts


@pytest.fixture
def images():
    return np.random.default_rng(0).random((6, 8, 8, 1)).astype(np.float32)


class TestQuarterTurns:
    def test_direction_is_counter_clockwise(self):
        image = np.array([[1, 2, 3], [4, 5, 6]])[None, ..., None]
        turned = shifts.rotate_quarter_turns(image, 1)
        np.testing.assert_array_equal(turned[0, ..., 0], [[3, 6], [2, 5], [1, 4]])

    def test_turns_add_up(self, images):
        once = shifts.rotate_quarter_turns(images, 1)
        assert not np.array_equal(once, images)
        np.testing.assert_array_equal(
            shifts.rotate_quarter_turns(once, 2), shifts.rotate_quarter_turns(images, 3)
        )
        np.testing.assert_array_equal(shifts.rotate_quarter_turns(images, 4), images)
        assert once.flags.c_contiguous


class TestLabels:
    def test_shift(self):
        labels = np.array([0, 4, 9], np.int32)
        shifted = shifts.shift_labels(labels, 3, 10)
        np.testing.assert_array_equal(shifted, [3, 7, 2])
        assert shifted.dtype == np.int32
        np.testing.assert_array_equal(shifts.shift_labels(shifted, -3, 10), labels)

    @pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
    @pytest.mark.parametrize("shift", [250, -1, 7])
    def test_small_integers_do_not_wrap_around(self, kind, shift):
        found = shifts.shift_labels(np.array([9, 3], kind), shift, 10)
        assert found.dtype == kind and found.tolist() == [(9 + shift) % 10, (3 + shift) % 10]

    def test_refusal(self):
        with pytest.raises(ValueError, match=r"labels must be in \[0, 3\)"):
            shifts.shift_labels(np.array([0, 3]), 1, 3)


class TestColors:
    def test_each_image_is_grey_times_one_colour(self):
        rng = np.random.default_rng(1)
        grey = rng.integers(0, 256, (4000, 2, 2, 1)).astype(np.uint8)
        grey[:, 0, 0] = 255
        labels = rng.integers(0, 10, 4000)
        painted = shifts.color_by_label(grey, labels, 0)
        assert painted.dtype == np.uint8 and painted.shape == (4000, 2, 2, 3)
        palette = np.array(shifts.PALETTE, dtype=np.float64)
        own = np.all(painted[:, 0, 0] == np.rint(255 * palette[labels]), axis=1)
        following = np.all(painted[:, 0, 0] == np.rint(255 * palette[(labels + 1) % 10]), axis=1)
        assert np.all(own ^ following)
        # Both with equal chances: 4000 tosses, five standard errors.
        assert own.mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(4000))
        colour = palette[(labels + ~own) % 10][:, None, None]
        np.testing.assert_allclose(painted, grey * colour, atol=0.5 + 1e-4)

    def test_colours_of_training_and_testing_are_apart(self, images):
        assert len(np.unique(shifts.PALETTE, axis=0)) == 10
        for digit in range(10):
            train = {(digit + c) % 10 for c in shifts.TRAIN_COLORS}
            assert not train & {(digit + c) % 10 for c in shifts.TEST_COLORS}
        labels = np.arange(6)
        painted = shifts.color_by_label(images, labels, 0, colors=shifts.TEST_COLORS)
        np.testing.assert_allclose(
            painted, images * shifts.PALETTE[labels + 5 - 10][:, None, None], rtol=1e-6
        )

    def test_colour_images_are_refused(self, images):
        with pytest.raises(ValueError, match="images must have one channel"):
            shifts.color_by_label(np.repeat(images, 3, axis=-1), np.zeros(6, int), 0)

    @pytest.mark.parametrize(
        "labels, palette, rule",
        [
            (np.arange(6), np.zeros((10, 4)), "palette must be \\[colours, 3\\]"),
            (np.arange(6), np.full((10, 3), 2.0), "palette must be in \\[0, 1\\]"),
            (np.arange(6), np.full((10, 3), np.nan), "palette must be in \\[0, 1\\]"),
            (np.arange(6) - 1, shifts.PALETTE, "labels must be classes from 0 to 9"),
            (np.arange(6) + 94, shifts.PALETTE, "labels must be classes from 0 to 9"),
        ],
    )
    def test_what_is_no_colour_and_no_class_is_refused(self, images, labels, palette, rule):
        with pytest.raises(ValueError, match=rule):
            shifts.color_by_label(images, labels, 0, palette=palette)


def rotated(image, degrees):
    """Turns one square image by looking every pixel up in the original, linearly."""
    size = len(image)
    padded = np.zeros((size + 2, size + 2))
    padded[1:-1, 1:-1] = image
    centre, result = (size - 1) / 2, np.zeros((size, size))
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    for row in range(size):
        for column in range(size):
            # Counter-clockwise with y upward: undo the turn to find where a pixel came from.
            x, y = column - centre, centre - row
            from_x, from_y = cos * x + sin * y, -sin * x + cos * y
            r, c = centre - from_y + 1, centre + from_x + 1
            if 0 <= r <= size + 1 and 0 <= c <= size + 1:
                i, j = min(int(r), size), min(int(c), size)
                a, b = r - i, c - j
                result[row, column] = (
                    (1 - a) * ((1 - b) * padded[i, j] + b * padded[i, j + 1])
                    + a * ((1 - b) * padded[i + 1, j] + b * padded[i + 1, j + 1])
                )  # fmt: skip
    return result


class TestAngles:
    def test_a_right_angle_is_a_quarter_turn(self, images):
        turned = shifts.rotate_by_label(images, np.zeros(6, int), angles=[90.0])
        np.testing.assert_allclose(turned, shifts.rotate_quarter_turns(images, 1), atol=1e-5)

    def test_each_class_by_its_own_angle(self, images):
        labels = np.array([0, 3, 9, 3, 8, 1])
        turned = shifts.rotate_by_label(images, labels)
        for image, label, result in zip(images, labels, turned, strict=True):
            angle = (10, -10, 20, -20, 30, -30, 40, -40, 50, -50)[label]
            np.testing.assert_allclose(result[..., 0], rotated(image[..., 0], angle), atol=1e-5)

    def test_bytes_stay_bytes(self, images):
        images = np.rint(images * 255).astype(np.uint8)
        exact = shifts.rotate_by_label(images.astype(np.float32), np.arange(6))
        turned = shifts.rotate_by_label(images, np.arange(6))
        assert turned.dtype == np.uint8
        np.testing.assert_allclose(turned, exact, atol=0.5 + 1e-3)

    def test_a_label_without_an_angle_is_refused(self, images):
        with pytest.raises(ValueError, match=r"labels must be in \[0, 2\)"):
            shifts.rotate_by_label(images, np.full(6, 2), angles=[0.0, 1.0])


class TestClusters:
    def test_the_draw_of_the_papers(self):
        clients, cluster = clusters.overlapping_draw(60_000, 0)
        assert len(clients) == 21
        np.testing.assert_array_equal(np.bincount(cluster), [3, 6, 6, 6])
        for rows in clients:
            assert len(rows) == len(np.unique(rows)) == 10_000
        # Independent draws of a sixth: two clients share a sixth of a sixth of the pool.
        shared = len(np.intersect1d(clients[0], clients[20]))
        assert shared == pytest.approx(60_000 / 36, abs=5 * np.sqrt(60_000 / 36))
        train, validation = partition.split_clients(clients, 0, test_fraction=0.2)
        assert {len(rows) for rows in train} == {8000} and {len(r) for r in validation} == {2000}
        again, _ = clusters.overlapping_draw(60_000, 0)
        np.testing.assert_array_equal(np.stack(clients), np.stack(again))

    @pytest.mark.parametrize("shift", ["rotation", "label"])
    def test_every_cluster_is_shifted_by_its_number(self, images, shift):
        examples = {"x": images, "y": np.array([0, 1, 2, 3, 4, 4], np.int32)}
        clients, cluster = clusters.overlapping_draw(
            6, 0, cluster_sizes=(1, 2, 1), samples_per_client=4
        )
        shifted = clusters.shift_clusters(examples, clients, cluster, shift=shift, num_classes=5)
        assert cluster.tolist() == [0, 1, 1, 2]
        for rows, k, client in zip(clients, cluster, shifted, strict=True):
            turns, moved = (k, 0) if shift == "rotation" else (0, k)
            for row, x, y in zip(rows, client["x"], client["y"], strict=True):
                np.testing.assert_array_equal(x, np.rot90(images[row], turns))
                assert y == (examples["y"][row] + moved) % 5
        assert federated.FederatedData.from_clients(shifted).sizes.tolist() == [4, 4, 4, 4]

    def test_refusals(self, images):
        with pytest.raises(ValueError, match="samples_per_client must be at most 5"):
            clusters.overlapping_draw(5, 0, samples_per_client=6)
        with pytest.raises(ValueError, match="did you mean 'rotation'"):
            clusters.shift_clusters(
                {"x": images, "y": np.zeros(6)}, [], np.zeros(0), shift="rotate", num_classes=2
            )
