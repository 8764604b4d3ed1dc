"""Pictures that tests draw themselves: a bright disc where the label is 1, on a ground whose colour
goes with the group, so that a small network learns the label and picks the group up on the way."""

import numpy as np

from fedgft.data.dataset import Dataset


def pictures(rows: int = 240, size: int = 32, seed: int = 0, classes: int = 2) -> Dataset:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 2, rows)
    label = np.where(rng.random(rows) < np.where(group == 1, 0.7, 0.3), classes - 1, 0)
    pixels = rng.integers(0, 90, (rows, size, size, 3))
    pixels[..., 0] += (80 * group)[:, None, None]
    high, wide = np.ogrid[:size, :size]
    for i in range(rows):
        at, radius = rng.uniform(size / 3, 2 * size / 3, 2), size / 6 + label[i] * size / 8
        pixels[i, (high - at[0]) ** 2 + (wide - at[1]) ** 2 < radius**2] += 80
    return Dataset(
        name="drawn", features=pixels.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2),
        labels=label, groups=group, columns=("red", "green", "blue"),
        classes=tuple(map(str, range(classes))),
    )  # fmt: skip
