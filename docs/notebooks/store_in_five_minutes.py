"""Rendered by tools/notebooks.py; run by tests/docs/test_notebooks.py."""

# %% [markdown]
# # A store in five minutes
#
# A store is one file that holds one split of a data set: a few arrays with a sample axis, and what they
# were made from. Here you write one, stop halfway, go on, read it, and damage it on purpose.

# %%
from pathlib import Path

import numpy as np

import ups_store

# %% [markdown]
# ## Write
#
# Say which arrays there will be, and what decides their content: the *identity*. The whole file is laid
# out, and its room on the disk taken, before the first sample is written.

# %%
NUM_SAMPLES = 200
arrays = {
    "u": ups_store.ArraySpec((NUM_SAMPLES, 64, 128), "float32"),
    "nu": ups_store.ArraySpec((NUM_SAMPLES,), "float64"),
}
identity = {"solver": "mine", "seed": 0}


def simulate(samples):
    """Your solver goes here: a dict of arrays, one row per sample."""
    rng = [np.random.default_rng(int(i)) for i in samples]
    return {
        "u": np.stack([r.standard_normal((64, 128), dtype="f4") for r in rng]),
        "nu": np.array([r.uniform(0.001, 0.1) for r in rng]),
    }


writer = ups_store.create("wave_train.zarr.zip", arrays, identity=identity)
for start in range(0, 120, 40):
    samples = np.arange(start, start + 40)
    writer.commit_many(samples, simulate(samples))
writer.close()

# %% [markdown]
# Each `commit_many` is atomic and durable: when it returns, its samples survive a crash and a power cut.
# Here the program stopped after 120 of 200 samples. The unfinished file bears another name, so that no
# reader takes it for a data set:

# %%
sorted(path.name for path in Path().iterdir())

# %% [markdown]
# ## Continue
#
# What is there is continued only if it is to hold the same data. With another identity you get an error
# that names the difference, never a file with samples of both:

# %%
try:
    ups_store.create("wave_train.zarr.zip", arrays, identity={"solver": "mine", "seed": 1})
except ups_store.IdentityMismatchError as error:
    print(error)

# %% [markdown]
# The same call goes on where the file ends; `missing()` says what is left. `finish()` publishes the store
# under its name, in one rename.

# %%
with ups_store.create("wave_train.zarr.zip", arrays, identity=identity) as writer:
    missing = np.asarray(writer.missing())
    print(f"{len(missing)} samples are missing, from number {missing[0]} on")
    for samples in np.array_split(missing, 2):
        writer.commit_many(samples, simulate(samples))
    writer.finish()

# %% [markdown]
# ## Read
#
# Opening maps the file and reads a few kilobytes, however many samples there are.

# %%
store = ups_store.open("wave_train.zarr.zip")
print(len(store), store.arrays)
batch = store.gather([7, 3, 150], ["u", "nu"])
batch["u"].shape, batch["nu"]

# %% [markdown]
# One sample is a view of the mapped file: nothing is copied until you use it.

# %%
view = store["u"][7]
np.array_equal(view, batch["u"][0])

# %% [markdown]
# Other programs read it as well. For zarr-python it is a Zarr v3 hierarchy in a ZIP archive:

# %%
import zarr

with zarr.storage.ZipStore("wave_train.zarr.zip", mode="r") as archive:
    group = zarr.open_group(archive, mode="r")
    print(np.array_equal(group["u"][7], view))

# %% [markdown]
# ## Check
#
# Every byte of the file has a checksum, or can be made again from what has one. `verify` checks all of
# them:

# %%
# !ups-store verify wave_train.zarr.zip

# %% [markdown]
# Now turn one bit in the middle of a copy and check that.

# %%
content = bytearray(Path("wave_train.zarr.zip").read_bytes())
content[len(content) // 2] ^= 1
Path("damaged.zarr.zip").write_bytes(content)
report = ups_store.open("damaged.zarr.zip").verify()
for problem in report.problems:
    print(problem)

# %% [markdown]
# ## Know what it was made from
#
# The store keeps the identity that you gave it, so a program can compare before it trains on the wrong
# file.

# %%
store.identity

# %% [markdown]
# Where to go from here: [train on it](../guides/load.md), [build stores from HDF5](../guides/build.md), or
# read how the file is laid out, [on one page](../format/design.md).
